/* spill: two roots, a fast local one and a large shared mount. Entries go to the fast root while it has room. As it fills
 * up they spill to the mount: those that profit least from the fast root first, the large ones, because a large read
 * hides the mount's latency. So the fast root keeps room for what needs it, and evicts later.
 *
 * Facts choose the root. The path is
 *
 *     r<rank>/<namespace>/<ab>/<key>.g<group>
 *
 * with each rank's files in a tree of their own, which can be mounted, copied or dropped by itself. namespace is a 128-bit
 * hash of the namespace's text in hexadecimal, ab are the key's first two digits. */
#include "kvhost.h"

typedef struct {
  uint8_t bytes[16];
} digest;

typedef struct {
  digest name;
  uint32_t known;
} space;

static space *spaces;
static uint32_t most_spaces;
static uint64_t room_percent = 20; /* below so much free, entries spill */
static uint64_t large_mib = 8;     /* an entry of this size spills at once, smaller ones later */

static int32_t init(const kv_info *info) {
  if (!kv_setting_u64(info, "room_percent", &room_percent) || room_percent < 1 || room_percent > 100)
    return KV_FAIL("room_percent: want 1 to 100");
  if (!kv_setting_u64(info, "large_mib", &large_mib) || large_mib < 1 || large_mib > 1 << 20)
    return KV_FAIL("large_mib: want 1 to 1048576");
  most_spaces = info->max_namespaces;
  spaces = kv_alloc((uint64_t)most_spaces * sizeof(space));
  if (!spaces) return KV_FAIL("no memory for so many namespaces");
  return KV_OK;
}

/* mix is the finaliser of SplitMix64. */
static uint64_t mix(uint64_t z) {
  z += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

/* hash folds a text into two lanes that share no constant. The host notices a collision, and gives that piece another name. */
static digest hash(const char *text, uint32_t len) {
  uint64_t a = mix(len), b = mix(~(uint64_t)len);
  for (uint32_t i = 0; i < len; i++) {
    a = mix(a ^ (uint8_t)text[i]);
    b = (b ^ (uint8_t)text[i]) * 0x100000001b3 + (b >> 47);
  }
  b = mix(b);
  digest d;
  kv_copy(d.bytes, &a, 8);
  kv_copy(d.bytes + 8, &b, 8);
  return d;
}

static int32_t namespace_text(uint32_t id, const char *text, uint32_t len) {
  if (id >= most_spaces || spaces[id].known) return id < most_spaces ? KV_OK : KV_BAD_INPUT;
  space *s = &spaces[id];
  s->name = hash(text, len);
  s->known = 1;
  return KV_OK;
}

/* speed is what a root reads per second, or an even guess while nobody has measured. */
static uint64_t speed(const kv_root_facts *r) { return r->read_bps ? r->read_bps : (uint64_t)1 << 30; }

/* choose gives the root for an entry. What it draws follows from the key alone, so that all ranks' pieces of an entry,
 * which have its size in common, go the same way under the same facts. */
static uint32_t choose(const kv_place_query *q, const kv_root_facts *roots, uint32_t count) {
  uint32_t fast = KV_NONE, mount = KV_NONE;
  for (uint32_t i = 0; i < count; i++) {
    if (!(roots[i].flags & KV_ROOT_WRITABLE)) continue;
    if (fast == KV_NONE || speed(&roots[i]) > speed(&roots[fast])) fast = i;
  }
  for (uint32_t i = 0; i < count; i++) { /* the emptiest of the others */
    if (i == fast || !(roots[i].flags & KV_ROOT_WRITABLE)) continue;
    if (mount == KV_NONE || roots[i].free > roots[mount].free) mount = i;
  }
  if (mount == KV_NONE) return fast;
  uint64_t low = roots[fast].capacity / 100 * room_percent, free = roots[fast].free;
  if (free >= low || !low) return fast;
  /* The share that spills grows from 0 to all as the room goes from low to none, and with the entry's size. */
  uint64_t pressure = (low - free) * 1024 / low; /* 1 to 1024 */
  uint64_t size = (uint64_t)q->size * KV_SIZE_UNIT, large = large_mib << 20;
  uint64_t weight = size >= large ? 4096 : 1024 + size * 3072 / large;
  uint64_t draw = 0;
  for (uint32_t i = 0; i < KV_KEY_BYTES; i += 8) {
    uint64_t word;
    kv_copy(&word, q->key + i, 8);
    draw = mix(draw ^ word);
  }
  return (draw & 0xfffff) < pressure * weight ? mount : fast; /* 1024 * 1024 is certain */
}

static int32_t place(const kv_place_query *q, const kv_root_facts *roots, uint32_t count, kv_path *path, uint32_t *root) {
  if (q->namespace >= most_spaces || !spaces[q->namespace].known) return KV_FAIL("a namespace that was not announced");
  if (q->key_len < 1 || q->key_len > KV_KEY_BYTES) return KV_FAIL("a key of no length that there is");
  kv_put(path, 'r');
  kv_put_u32(path, q->rank);
  kv_put(path, '/');
  kv_put_hex(path, spaces[q->namespace].name.bytes, sizeof(digest));
  kv_put(path, '/');
  kv_put_hex(path, q->key, 1);
  kv_put(path, '/');
  kv_put_hex(path, q->key, q->key_len);
  kv_put(path, '.');
  kv_put(path, 'g');
  kv_put_u32(path, q->group);
  *root = choose(q, roots, count);
  return KV_OK;
}

KV_MODULE(init)
KV_NAMESPACE(namespace_text)
KV_PLACE(place)
KV_MANIFEST_FILE("manifest.json")
