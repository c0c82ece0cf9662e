/* kvhost.h: the kit for kvhost policies in C. abi/SPEC.md is the contract; this header is its records, its
 * imports and its exports, and needs no C library.
 *
 * A policy is a file that includes this header, writes the functions of its role, and names them once:
 *
 *     #include "kvhost.h"
 *     static int32_t init(const kv_info *info) { ... }
 *     static void events(const kv_event *batch, uint32_t n) { ... }
 *     static uint32_t victims(const kv_ask *ask, uint32_t *out) { ... }
 *     KV_MODULE(init)
 *     KV_EVICT(events, victims)
 *     KV_MANIFEST_FILE("manifest.json")
 *
 *     clang --target=wasm32 -mbulk-memory -O2 -nostdlib -ffreestanding -Wl,--no-entry -o mine.wasm mine.c
 *
 * Include it in one file of a module: the buffers and the imports' helpers live where it is included. */
#ifndef KVHOST_H
#define KVHOST_H

#include <stddef.h>
#include <stdint.h>

#define KV_ABI 1u
#define KV_NONE 0xffffffffu  /* no parent resident, the host's choice of root, any tenant */
#define KV_SIZE_UNIT 4096u   /* the unit of every u32 size */
#define KV_KEY_BYTES 32u
#define KV_PATH_BYTES 1024u
#define KV_MAX_SEGMENTS 65536u
#define KV_ROOT_WRITABLE 1u    /* kv_root_facts.flags: it takes stores at present */
#define KV_PARENT_RESIDENT 1u  /* kv_candidate.flags: the parent, in any level */
#define KV_CONTINUED 2u        /* kv_candidate.flags: a child is resident, in any level, or stored with it */
#define KV_LAST 4u             /* kv_candidate.flags: this host has no level of its own behind to */
#define KV_ROOM 8u             /* kv_candidate.flags, at a promotion: level to has room, so that nothing goes for it */
#define KV_NO_LEVEL 0xffu      /* kv_candidate.from of what an engine stores */
#define KV_PEER_LEVEL 0xfeu    /* kv_candidate.from and to: another host */
#define KV_FEATURE_LEVELS 2u   /* kv_info.features: candidates tell kind, from, to and hits */

/* Status of a call: 0 is success, above 0 leaves the call to the host, below 0 is a fault. */
enum { KV_OK = 0, KV_DEFAULT = 1, KV_BAD_INPUT = -1, KV_NO_SPACE = -2, KV_INTERNAL = -3 };
enum { KV_OP_INSERT = 1, KV_OP_TOUCH, KV_OP_REMOVE, KV_OP_LINK, KV_OP_PIN, KV_OP_UNPIN, KV_OP_RESIDENT, KV_OP_REQUEST_END };
enum { KV_BUFFER_INFO, KV_BUFFER_EVENTS, KV_BUFFER_ARGS, KV_BUFFER_RESULT, KV_BUFFER_ROOTS, KV_BUFFER_STATE, KV_BUFFER_KINDS };
enum { KV_KIND_NEW, KV_KIND_DEMOTION, KV_KIND_PROMOTION }; /* kv_candidate.kind */
enum { KV_LEVEL_DEBUG, KV_LEVEL_INFO, KV_LEVEL_WARN, KV_LEVEL_ERROR };

/* Records. A published offset never changes, and the compiler holds each against its place. */

typedef struct {
  uint32_t slot, parent;
  uint64_t key, parent_key;
  uint32_t size, depth, request, tenant;
  uint8_t op, reserved[7];
  uint64_t time;
} kv_event;

/* An event with KV_OP_REQUEST_END. If info->features has KV_FEATURE_HINTS, its fields are what an engine tells about the
 * request; 0 is unknown. */
#define KV_FEATURE_HINTS 1u
enum { KV_END_STOP = 1, KV_END_LENGTH, KV_END_TOOL_CALL, KV_END_ABORT }; /* kv_request_end.reason */

typedef struct {
  uint32_t slot, reserved;
  uint64_t return_ms;
  int32_t priority;
  uint32_t reserved2, tokens_in, tokens_out, request, tenant;
  uint8_t op, reason, reserved3[6];
  uint64_t time;
} kv_request_end;

/* kv_request_end_of is the record of an event with KV_OP_REQUEST_END. */
static inline const kv_request_end *kv_request_end_of(const kv_event *e) { return (const kv_request_end *)e; }

typedef struct {
  uint32_t size, abi;
  uint64_t features;
  uint32_t event_stride, ask_stride, admit_stride, place_stride, reserved, plane_stride, root_stride;
  uint32_t max_slots, max_batch, max_victims, max_namespaces, config_len;
  uint64_t capacity, seed;
} kv_info;

typedef struct {
  uint64_t bytes;
  uint32_t max_victims, tenant;
} kv_ask;

typedef struct {
  uint64_t key, parent_key;
  uint32_t namespace, group, size, depth, request, tenant, flags, copies;
  uint64_t time;
  uint8_t kind, from, to, reserved;
  uint32_t hits;
} kv_candidate;

typedef struct {
  uint32_t namespace, group, rank, key_len, size, reserved;
  uint8_t key[KV_KEY_BYTES];
} kv_place_query;

typedef struct {
  uint32_t root, off, len, reserved;
} kv_place_answer;

typedef struct {
  uint32_t count, stride;
} kv_roots_header;

typedef struct {
  uint32_t id, flags;
  uint64_t capacity, free, read_bps, write_bps;
} kv_root_facts;

typedef struct {
  uint32_t namespace, group, blocks, planes;
} kv_layout_header;

typedef struct {
  uint32_t layer, part, page_bytes, reserved;
} kv_plane;

typedef struct {
  uint32_t plane, block, blocks, page_off, page_len, gap;
} kv_segment;

#define KV_SIZE_IS(type, size) _Static_assert(sizeof(type) == size, #type " has the wrong size")
#define KV_AT(type, field, at) _Static_assert(offsetof(type, field) == at, #type "." #field " is misplaced")
KV_SIZE_IS(kv_event, 56);
KV_AT(kv_event, key, 8); KV_AT(kv_event, size, 24); KV_AT(kv_event, tenant, 36); KV_AT(kv_event, op, 40);
KV_AT(kv_event, time, 48);
KV_SIZE_IS(kv_request_end, 56);
KV_AT(kv_request_end, return_ms, 8); KV_AT(kv_request_end, priority, 16); KV_AT(kv_request_end, tokens_in, 24);
KV_AT(kv_request_end, request, 32); KV_AT(kv_request_end, op, 40); KV_AT(kv_request_end, reason, 41); KV_AT(kv_request_end, time, 48);
KV_SIZE_IS(kv_info, 80);
KV_AT(kv_info, features, 8); KV_AT(kv_info, event_stride, 16); KV_AT(kv_info, root_stride, 40); KV_AT(kv_info, max_slots, 44);
KV_AT(kv_info, config_len, 60); KV_AT(kv_info, capacity, 64); KV_AT(kv_info, seed, 72);
KV_SIZE_IS(kv_ask, 16);
KV_AT(kv_ask, max_victims, 8); KV_AT(kv_ask, tenant, 12);
KV_SIZE_IS(kv_candidate, 64);
KV_AT(kv_candidate, namespace, 16); KV_AT(kv_candidate, flags, 40); KV_AT(kv_candidate, copies, 44); KV_AT(kv_candidate, time, 48);
KV_AT(kv_candidate, kind, 56); KV_AT(kv_candidate, to, 58); KV_AT(kv_candidate, hits, 60);
KV_SIZE_IS(kv_place_query, 56);
KV_AT(kv_place_query, key_len, 12); KV_AT(kv_place_query, size, 16); KV_AT(kv_place_query, key, 24);
KV_SIZE_IS(kv_place_answer, 16);
KV_AT(kv_place_answer, off, 4); KV_AT(kv_place_answer, len, 8);
KV_SIZE_IS(kv_roots_header, 8);
KV_SIZE_IS(kv_root_facts, 40);
KV_AT(kv_root_facts, capacity, 8); KV_AT(kv_root_facts, write_bps, 32);
KV_SIZE_IS(kv_layout_header, 16);
KV_SIZE_IS(kv_plane, 16);
KV_AT(kv_plane, page_bytes, 8);
KV_SIZE_IS(kv_segment, 24);
KV_AT(kv_segment, gap, 20);

/* Imports. An import that is not called is not linked, so no grant is needed for it. */
#define KV_IMPORT(symbol) __attribute__((import_module("kvhost_1"), import_name(symbol)))
#define KV_EXPORT(symbol) __attribute__((export_name(symbol), visibility("default")))
KV_IMPORT("log_enabled") int32_t kv_log_enabled(int32_t level);
KV_IMPORT("log") void kv_log(int32_t level, const char *text, uint32_t len);
KV_IMPORT("fail") void kv_fail(const char *text, uint32_t len);
KV_IMPORT("now_ns") uint64_t kv_now_ns(void);                          /* grant "clock" */
KV_IMPORT("counter_add") void kv_counter_add(uint32_t id, int64_t delta); /* grant "metrics" */
KV_IMPORT("rand_u64") uint64_t kv_rand_u64(void);                      /* grant "random" */

/* KV_LOG writes a line, KV_FAIL gives the words for a status below 0 and is one: return KV_FAIL("too small"). */
#define KV_LOG(level, text) kv_log(level, text, sizeof(text) - 1)
#define KV_FAIL(text) (kv_fail(text, sizeof(text) - 1), KV_BAD_INPUT)

/* Memory. kv_alloc gives zeroed memory that is never freed, or 0 when the limit of the manifest's memory_pages is
 * reached: allocate in init, bounded by what kv_info says, and not later. */
extern uint8_t __heap_base;
static uintptr_t kv_heap_next;

__attribute__((unused)) static void *kv_alloc(uint64_t bytes) {
  if (!kv_heap_next) kv_heap_next = ((uintptr_t)&__heap_base + 15) & ~(uintptr_t)15;
  uint64_t have = (uint64_t)__builtin_wasm_memory_size(0) << 16;
  uint64_t end = kv_heap_next + ((bytes + 15) & ~(uint64_t)15);
  if (bytes > 0xffffffffu || end > 0xffffffffu) return 0;
  if (end > have && __builtin_wasm_memory_grow(0, (end - have + 65535) >> 16) == (size_t)-1) return 0;
  void *p = (void *)kv_heap_next;
  kv_heap_next = (uintptr_t)end;
  return p;
}

static inline void kv_copy(void *to, const void *from, uint32_t n) { __builtin_memcpy(to, from, n); }

static inline int kv_same(const void *a, const void *b, uint32_t n) {
  const uint8_t *x = a, *y = b;
  for (uint32_t i = 0; i < n; i++)
    if (x[i] != y[i]) return 0;
  return 1;
}

/* Settings stand behind kv_info as lines "key=value\n". kv_setting gives a value and its length, or 0 when the key is
 * missing. kv_setting_u64 leaves *value alone when it is, and answers 0 when it is no whole number. */
__attribute__((unused)) static const char *kv_setting(const kv_info *info, const char *key, uint32_t *len) {
  const char *p = (const char *)info + info->size, *end = p + info->config_len;
  uint32_t k = 0;
  while (key[k]) k++;
  while (p < end) {
    const char *line = p;
    while (p < end && *p != '\n') p++;
    if ((uint32_t)(p - line) > k && line[k] == '=' && kv_same(line, key, k)) {
      *len = (uint32_t)(p - line) - k - 1;
      return line + k + 1;
    }
    p++;
  }
  return 0;
}

__attribute__((unused)) static int kv_setting_u64(const kv_info *info, const char *key, uint64_t *value) {
  uint32_t len;
  const char *text = kv_setting(info, key, &len);
  if (!text) return 1;
  uint64_t v = 0;
  for (uint32_t i = 0; i < len; i++) {
    if (text[i] < '0' || text[i] > '9' || v > (UINT64_MAX - 9) / 10) return 0;
    v = v * 10 + (uint64_t)(text[i] - '0');
  }
  *value = v;
  return len > 0;
}

/* Buffers: one per kind, allocated when the host asks and kept. */
static struct {
  uint8_t *at;
  uint32_t size;
} kv_buffers[KV_BUFFER_KINDS];

/* kv_records moves records that stand further apart than this header knows them together, and gives the first one, or 0
 * when they are too short or too many for the buffer. */
static inline void *kv_records(uint8_t *at, uint64_t room, uint32_t n, uint32_t stride, uint32_t size) {
  if (stride < size || (uint64_t)n * stride > room) return 0;
  if (stride > size)
    for (uint32_t i = 1; i < n; i++) __builtin_memmove(at + i * size, at + i * stride, size);
  return at;
}

static inline uint64_t kv_pack(int32_t status, uint32_t count) { return (uint64_t)(uint32_t)status << 32 | count; }

/* KV_MODULE exports what every module has. init(info) answers a status; info and the settings behind it are valid
 * during the call. */
#define KV_MODULE(init)                                                                                                \
  KV_EXPORT("kvhost_abi_1") void kv_export_marker(void) {}                                                             \
  KV_EXPORT("kv_buffer") void *kv_export_buffer(uint32_t kind, uint32_t len) {                                         \
    if (kind >= KV_BUFFER_KINDS) return 0;                                                                             \
    if (!kv_buffers[kind].at || kv_buffers[kind].size < len) {                                                         \
      uint8_t *at = kv_alloc(len);                                                                                     \
      if (!at) return 0;                                                                                               \
      kv_buffers[kind].at = at;                                                                                        \
      kv_buffers[kind].size = len;                                                                                     \
    }                                                                                                                  \
    return kv_buffers[kind].at;                                                                                        \
  }                                                                                                                    \
  KV_EXPORT("kv_init") int32_t kv_export_init(uint32_t len) {                                                          \
    const kv_info *info = (const kv_info *)kv_buffers[KV_BUFFER_INFO].at;                                              \
    if (len < sizeof(kv_info) || len > kv_buffers[KV_BUFFER_INFO].size || info->abi != KV_ABI ||                       \
        info->size < sizeof(kv_info) || (uint64_t)info->size + info->config_len > len)                                 \
      return KV_BAD_INPUT;                                                                                             \
    return init(info);                                                                                                 \
  }

/* KV_NAMESPACE: namespace_text(id, text, len) answers a status. The text is valid during the call. */
#define KV_NAMESPACE(namespace_text)                                                                                   \
  KV_EXPORT("kv_namespace") int32_t kv_export_namespace(uint32_t id, uint32_t len) {                                   \
    if (len > kv_buffers[KV_BUFFER_INFO].size) return KV_BAD_INPUT;                                                    \
    return namespace_text(id, (const char *)kv_buffers[KV_BUFFER_INFO].at, len);                                       \
  }

/* KV_EVICT: events(batch, n) applies events; victims(ask, out) writes at most ask->max_victims slots, best victim first,
 * and answers how many. */
#define KV_EVICT(events, victims)                                                                                      \
  KV_EXPORT("kv_events") int32_t kv_export_events(uint32_t n, uint32_t stride) {                                       \
    const kv_event *batch = kv_records(kv_buffers[KV_BUFFER_EVENTS].at, kv_buffers[KV_BUFFER_EVENTS].size, n, stride,  \
                                       sizeof(kv_event));                                                              \
    if (!batch) return KV_BAD_INPUT;                                                                                   \
    events(batch, n);                                                                                                  \
    return KV_OK;                                                                                                      \
  }                                                                                                                    \
  KV_EXPORT("kv_step") uint64_t kv_export_step(uint32_t n, uint32_t stride) {                                          \
    if (kv_buffers[KV_BUFFER_ARGS].size < sizeof(kv_ask)) return kv_pack(KV_BAD_INPUT, 0);                             \
    int32_t status = n ? kv_export_events(n, stride) : KV_OK;                                                          \
    if (status) return kv_pack(status, 0);                                                                             \
    kv_ask ask = *(const kv_ask *)kv_buffers[KV_BUFFER_ARGS].at;                                                       \
    uint32_t room = kv_buffers[KV_BUFFER_RESULT].size / 4;                                                             \
    if (ask.max_victims > room) ask.max_victims = room;                                                                \
    return kv_pack(KV_OK, victims(&ask, (uint32_t *)kv_buffers[KV_BUFFER_RESULT].at));                                 \
  }

/* KV_ADMIT: admit(batch, n, out) writes 1 or 0 for each candidate. */
#define KV_ADMIT(admit)                                                                                                \
  KV_EXPORT("kv_admit") uint64_t kv_export_admit(uint32_t n, uint32_t stride) {                                        \
    const kv_candidate *batch = kv_records(kv_buffers[KV_BUFFER_ARGS].at, kv_buffers[KV_BUFFER_ARGS].size, n, stride,  \
                                           sizeof(kv_candidate));                                                      \
    if (!batch) return kv_pack(KV_BAD_INPUT, 0);                                                                       \
    if (n > kv_buffers[KV_BUFFER_RESULT].size) return kv_pack(KV_NO_SPACE, 0);                                         \
    admit(batch, n, kv_buffers[KV_BUFFER_RESULT].at);                                                                  \
    return kv_pack(KV_OK, n);                                                                                          \
  }

/* A path under construction. What does not fit is not written, and shows in len > room. */
typedef struct {
  char *at;
  uint32_t len, room;
} kv_path;

__attribute__((unused)) static inline void kv_put(kv_path *p, char c) {
  if (p->len < p->room) p->at[p->len] = c;
  p->len++;
}

__attribute__((unused)) static void kv_put_u32(kv_path *p, uint32_t v) {
  uint32_t unit = 1;
  while (v / unit >= 10) unit *= 10;
  for (; unit; unit /= 10) kv_put(p, (char)('0' + v / unit % 10));
}

__attribute__((unused)) static void kv_put_hex(kv_path *p, const uint8_t *bytes, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    kv_put(p, "0123456789abcdef"[bytes[i] >> 4]);
    kv_put(p, "0123456789abcdef"[bytes[i] & 15]);
  }
}

/* KV_PLACE: place(query, roots, count, path, root) writes the path and may set *root to an index into roots, which is
 * KV_NONE before; it answers a status. Each piece is asked for once, and the name is written down. */
#define KV_PLACE(place)                                                                                                \
  KV_EXPORT("kv_place") uint64_t kv_export_place(uint32_t n, uint32_t stride) {                                        \
    const kv_place_query *q = kv_records(kv_buffers[KV_BUFFER_ARGS].at, kv_buffers[KV_BUFFER_ARGS].size, n, stride,    \
                                         sizeof(kv_place_query));                                                      \
    uint32_t count = 0, off = n * (uint32_t)sizeof(kv_place_answer);                                                   \
    uint8_t *roots = kv_buffers[KV_BUFFER_ROOTS].at, *out = kv_buffers[KV_BUFFER_RESULT].at;                           \
    if (!q) return kv_pack(KV_BAD_INPUT, 0);                                                                           \
    if ((uint64_t)n * sizeof(kv_place_answer) > kv_buffers[KV_BUFFER_RESULT].size) return kv_pack(KV_NO_SPACE, 0);     \
    if (roots) {                                                                                                       \
      kv_roots_header *h = (kv_roots_header *)roots;                                                                   \
      roots = kv_records(roots + sizeof *h, kv_buffers[KV_BUFFER_ROOTS].size - sizeof *h, h->count, h->stride,         \
                         sizeof(kv_root_facts));                                                                       \
      if (roots) count = h->count, h->stride = sizeof(kv_root_facts);                                                  \
    }                                                                                                                  \
    for (uint32_t i = 0; i < n; i++) {                                                                                 \
      kv_path path = {(char *)out + off, 0, kv_buffers[KV_BUFFER_RESULT].size - off};                                  \
      uint32_t root = KV_NONE;                                                                                         \
      int32_t status = place(&q[i], (const kv_root_facts *)roots, count, &path, &root);                                \
      if (status) return kv_pack(status, 0);                                                                           \
      if (path.len > path.room) return kv_pack(KV_NO_SPACE, 0);                                                        \
      ((kv_place_answer *)out)[i] = (kv_place_answer){root, off, path.len, 0};                                         \
      off += path.len;                                                                                                 \
    }                                                                                                                  \
    return kv_pack(KV_OK, n);                                                                                          \
  }

/* KV_LAYOUT: layout(header, planes, out, room) writes segments, or as many as there is room for, and answers how many it
 * has; more than room is a fault. Planes are header->planes. */
#define KV_LAYOUT(layout)                                                                                              \
  KV_EXPORT("kv_layout") uint64_t kv_export_layout(uint32_t n, uint32_t stride) {                                      \
    uint8_t *args = kv_buffers[KV_BUFFER_ARGS].at;                                                                     \
    if (kv_buffers[KV_BUFFER_ARGS].size < sizeof(kv_layout_header)) return kv_pack(KV_BAD_INPUT, 0);                   \
    kv_layout_header h = *(const kv_layout_header *)args;                                                              \
    const kv_plane *planes = kv_records(args + sizeof h, kv_buffers[KV_BUFFER_ARGS].size - sizeof h, n, stride,        \
                                        sizeof(kv_plane));                                                             \
    uint32_t room = kv_buffers[KV_BUFFER_RESULT].size / sizeof(kv_segment);                                            \
    if (!planes || h.planes != n) return kv_pack(KV_BAD_INPUT, 0);                                                     \
    uint32_t count = layout(&h, planes, (kv_segment *)kv_buffers[KV_BUFFER_RESULT].at, room);                          \
    return count > room ? kv_pack(KV_NO_SPACE, 0) : kv_pack(KV_OK, count);                                             \
  }

/* KV_STATE: save(out, limit) answers how many bytes it wrote; load(state, len) answers a status, KV_DEFAULT when it
 * cannot read them and starts empty. */
#define KV_STATE(save, load)                                                                                           \
  KV_EXPORT("kv_save") uint64_t kv_export_save(uint32_t limit) {                                                       \
    if (limit > kv_buffers[KV_BUFFER_STATE].size) return kv_pack(KV_BAD_INPUT, 0);                                     \
    uint32_t n = save(kv_buffers[KV_BUFFER_STATE].at, limit);                                                          \
    return n > limit ? kv_pack(KV_NO_SPACE, 0) : kv_pack(KV_OK, n);                                                    \
  }                                                                                                                    \
  KV_EXPORT("kv_load") int32_t kv_export_load(uint32_t len) {                                                          \
    if (len > kv_buffers[KV_BUFFER_STATE].size) return KV_BAD_INPUT;                                                   \
    return load((const uint8_t *)kv_buffers[KV_BUFFER_STATE].at, len);                                                 \
  }

/* KV_MANIFEST_FILE puts a file, found by the compiler's -I paths or from where it is run, into the module. */
#define KV_MANIFEST_FILE(path)                                                                                         \
  __asm__(".section .custom_section.kvhost.manifest,\"\",@\n.incbin \"" path "\"\n.text\n");

#endif
