/* A small evict policy that conforms, and the ways to break it: one macro each. */
#include "kvhost.h"

typedef struct {
  uint32_t resident, pinned, size, tenant;
} entry;

static entry *entries;
static uint32_t most, hand;

static int32_t init(const kv_info *info) {
  most = info->max_slots;
#ifdef FEW_SLOTS
  if (most > 10000) return KV_FAIL("too many slots");
#endif
  entries = kv_alloc(((uint64_t)most + 1) * sizeof *entries);
  return entries ? KV_OK : KV_NO_SPACE;
}

static void events(const kv_event *batch, uint32_t n) {
#ifdef ENDLESS
  for (volatile int i = 0;; i++) {}
#endif
  for (uint32_t i = 0; i < n; i++) {
    const kv_event *ev = &batch[i];
#ifdef TRAPS
    if (ev->op == KV_OP_LINK) __builtin_trap();
#endif
#ifdef HEEDS_UNKNOWN
    if (ev->op == 77) hand += 3;
#endif
    if (ev->slot >= most) continue;
    entry *e = &entries[ev->slot];
    switch (ev->op) {
    case KV_OP_INSERT:
    case KV_OP_RESIDENT:
      *e = (entry){1, 0, ev->size, ev->tenant};
      break;
    case KV_OP_REMOVE:
#ifndef KEEPS_REMOVED
      e->resident = e->pinned = 0;
#endif
      break;
    case KV_OP_PIN:
#ifndef NAMES_PINNED
      e->pinned = e->resident;
#endif
      break;
    case KV_OP_UNPIN:
      e->pinned = 0;
    }
  }
}

static uint32_t victims(const kv_ask *ask, uint32_t *out) {
  uint32_t n = 0, limit = ask->max_victims;
  uint64_t freed = 0;
#ifdef NAMES_NOBODY
  limit = 0;
#endif
#ifdef FALLS_SILENT
  static uint32_t asked;
  if (++asked > 100) limit = 0;
#endif
#ifdef OUT_OF_RANGE
  if (limit) { out[0] = most + 5; return 1; }
#endif
  for (uint32_t i = 0; i < most && i < 4096 && n < limit; i++) { /* a call must end soon */
    if (++hand >= most) hand = 0;
    const entry *e = &entries[hand];
    if (!e->resident || e->pinned) continue;
#ifndef ANY_TENANT
    if (ask->tenant != KV_NONE && ask->tenant != e->tenant) continue;
#endif
#ifndef TOO_MUCH
    if (freed >= ask->bytes) break;
#endif
    out[n++] = hand;
#ifdef TWICE
    if (n < limit) out[n++] = hand;
#endif
    freed += (uint64_t)e->size * KV_SIZE_UNIT;
  }
#ifdef TOO_MANY
  return n ? ask->max_victims + 1 : 0;
#endif
  return n;
}

#if defined(SAVES) || defined(FORGETS) || defined(TRUSTS_STATE)
static uint32_t save(uint8_t *out, uint32_t limit) {
  uint32_t n = most * (uint32_t)sizeof *entries;
  if (n + 8 > limit) return limit + 1;
  ((uint32_t *)out)[0] = most;
#ifndef FORGETS
  ((uint32_t *)out)[1] = hand;
#else
  ((uint32_t *)out)[1] = 0;
#endif
  kv_copy(out + 8, entries, n);
  return n + 8;
}

static int32_t load(const uint8_t *in, uint32_t len) {
#ifdef TRUSTS_STATE
  hand = ((const uint32_t *)in)[1];
  if (entries[hand].size > 1u << 30) __builtin_trap();
#else
  if (len < 8 || ((const uint32_t *)in)[0] > most || len != 8 + ((const uint32_t *)in)[0] * sizeof *entries) return KV_DEFAULT;
  hand = ((const uint32_t *)in)[1];
  if (hand > most) hand = 0;
#endif
  kv_copy(entries, in + 8, len < 8 ? 0 : len - 8);
  return KV_OK;
}
KV_STATE(save, load)
#endif

#ifdef READS_BEYOND
KV_EXPORT("kv_events") int32_t kv_export_events(uint32_t n, uint32_t stride) {
  (void)stride;
  events((const kv_event *)kv_buffers[KV_BUFFER_EVENTS].at, n);
  return KV_OK;
}
KV_EXPORT("kv_step") uint64_t kv_export_step(uint32_t n, uint32_t stride) {
  (void)stride;
  events((const kv_event *)kv_buffers[KV_BUFFER_EVENTS].at, n);
  kv_ask ask = *(const kv_ask *)kv_buffers[KV_BUFFER_ARGS].at;
  return kv_pack(KV_OK, victims(&ask, (uint32_t *)kv_buffers[KV_BUFFER_RESULT].at));
}
#else
KV_EVICT(events, victims)
#endif

#ifdef ANY_BUFFER
KV_EXPORT("kvhost_abi_1") void marker(void) {}
KV_EXPORT("kv_buffer") void *buffer(uint32_t kind, uint32_t len) {
  kind &= 7;
  if (kind >= KV_BUFFER_KINDS) kind = 5;
  kv_buffers[kind].at = kv_alloc(len > 1 << 20 ? 64 : len);
  kv_buffers[kind].size = len;
  return kv_buffers[kind].at;
}
KV_EXPORT("kv_init") int32_t start(uint32_t len) { (void)len; return init((const kv_info *)kv_buffers[0].at); }
#elif defined(ANY_INFO)
KV_EXPORT("kvhost_abi_1") void marker(void) {}
KV_EXPORT("kv_buffer") void *buffer(uint32_t kind, uint32_t len) {
  if (kind >= KV_BUFFER_KINDS) return 0;
  kv_buffers[kind].at = kv_alloc(len);
  kv_buffers[kind].size = len;
  return kv_buffers[kind].at;
}
KV_EXPORT("kv_init") int32_t start(uint32_t len) { (void)len; return init((const kv_info *)kv_buffers[0].at); }
#else
KV_MODULE(init)
#endif

#if !defined(NO_MANIFEST)
KV_MANIFEST_FILE(MANIFEST)
#endif
