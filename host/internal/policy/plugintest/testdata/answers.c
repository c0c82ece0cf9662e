/* Small admit, place and layout policies that conform, and the ways to break them: one macro each. */
#include "kvhost.h"

static int32_t init(const kv_info *info) {
  (void)info;
#ifdef WANTS_SLOTS
  if (!info->max_slots) return KV_FAIL("no slots");
#endif
  return KV_OK;
}

static void admit(const kv_candidate *batch, uint32_t n, uint8_t *out) {
  for (uint32_t i = 0; i < n; i++) {
    out[i] = batch[i].key % 3 > 0;
#ifdef ADMIT_TWO
    out[i] = 2;
#endif
  }
}
#ifdef ADMIT_SHORT
KV_EXPORT("kv_admit") uint64_t one(uint32_t n, uint32_t stride) {
  (void)stride;
  admit((const kv_candidate *)kv_buffers[KV_BUFFER_ARGS].at, n, kv_buffers[KV_BUFFER_RESULT].at);
  return kv_pack(KV_OK, 1);
}
#elif defined(ADMIT_DRIFTS)
KV_EXPORT("kv_admit") uint64_t one(uint32_t n, uint32_t stride) {
  for (uint32_t i = 0; i < n; i++) kv_buffers[KV_BUFFER_RESULT].at[i] = kv_buffers[KV_BUFFER_ARGS].at[i * 56 + 8] & 1;
  return stride < 56 ? kv_pack(KV_BAD_INPUT, 0) : kv_pack(KV_OK, n);
}
#elif !defined(NO_ADMIT)
KV_ADMIT(admit)
#endif

static uint64_t names[64]; /* a namespace's text as a number, 0 when it was not announced */
static int32_t namespace_text(uint32_t id, const char *text, uint32_t len) {
#ifdef NAMESPACE_TRAPS
  if (id > 1u << 30) __builtin_trap();
#endif
  if (id >= 64) return KV_BAD_INPUT;
#ifdef NAMESPACE_SHORT
  if (len > 4096) return KV_NO_SPACE;
#endif
  uint64_t h = 14695981039346656037u;
  for (uint32_t i = 0; i < len; i++) h = (h ^ (uint8_t)text[i]) * 1099511628211u;
  names[id] = h | 1;
#ifdef PATH_OF_ID
  names[id] = id + 1;
#endif
  return KV_OK;
}
KV_NAMESPACE(namespace_text)

static int32_t place(const kv_place_query *q, const kv_root_facts *roots, uint32_t count, kv_path *path, uint32_t *root) {
  (void)roots, (void)count, (void)root;
#ifdef PLACE_TRAPS
  if (q->namespace >= 64) __builtin_trap();
#endif
  if (q->namespace >= 64 || !names[q->namespace] || !q->key_len || q->key_len > KV_KEY_BYTES) return KV_FAIL("unknown");
#ifdef PATH_UP
  kv_put(path, '.'), kv_put(path, '.'), kv_put(path, '/');
#endif
#ifdef ROOT_FAR
  *root = 7;
#endif
#ifdef ROOT_CLOSED
  *root = count ? 0 : KV_NONE;
#endif
  kv_put_hex(path, (const uint8_t *)&names[q->namespace], 8);
  kv_put(path, '/');
  kv_put_hex(path, q->key, q->key_len);
  kv_put(path, '.');
  kv_put_u32(path, q->group);
#ifndef COLLIDES
  kv_put(path, '.');
  kv_put_u32(path, q->rank);
#endif
  return KV_OK;
}

#ifndef NO_PLACE
KV_PLACE(place)
#endif

static uint32_t layout(const kv_layout_header *h, const kv_plane *planes, kv_segment *out, uint32_t room) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < h->planes; i++) {
    uint32_t blocks = h->blocks, len = planes[i].page_bytes;
#ifdef LAYOUT_MISSES
    if (i + 1 == h->planes) len--;
#endif
#ifdef LAYOUT_OVER
    for (uint32_t b = 0; b < blocks; b++) {
      if (n < room) out[n] = (kv_segment){i, b, 1, 0, len, 0};
      n++;
    }
    continue;
#endif
    if (n < room) out[n] = (kv_segment){i, 0, blocks, 0, len, 0};
    n++;
  }
#ifdef LAYOUT_DRIFTS
  static uint32_t calls;
  out[0].gap = calls++;
#endif
  return n;
}
KV_LAYOUT(layout)

KV_MODULE(init)
KV_MANIFEST_FILE(MANIFEST)
