/* recency: the entry whose last touch lies furthest back goes first. The smallest whole policy in C, and the measure of
 * what one costs. One list over the slots, newest to oldest, through a root node; every event takes a few instructions. */
#include "kvhost.h"

typedef struct {
  uint32_t newer, older; /* slots, or root */
  uint32_t tenant;
  uint32_t size : 30, pinned : 1, resident : 1; /* 16 bytes in all: a slot's place is one shift away */
} node;

static node *nodes; /* max_slots of them, and the root: its older is the newest entry, its newer the oldest */
static uint32_t root;

static int32_t init(const kv_info *info) {
  root = info->max_slots;
  nodes = kv_alloc(((uint64_t)root + 1) * sizeof(node));
  if (!nodes) return KV_FAIL("memory_pages is too small for so many slots");
  nodes[root].newer = nodes[root].older = root;
  return KV_OK;
}

static void unlink(uint32_t slot) {
  nodes[nodes[slot].newer].older = nodes[slot].older;
  nodes[nodes[slot].older].newer = nodes[slot].newer;
}

static void link(uint32_t slot) {
  nodes[slot].newer = root;
  nodes[slot].older = nodes[root].older;
  nodes[nodes[root].older].newer = slot;
  nodes[root].older = slot;
}

/* What is rare stands in a function of its own: a meter charges for what a loop holds, taken or not. */
static __attribute__((noinline)) void rare(const kv_event *ev, node *e) {
  switch (ev->op) {
  case KV_OP_INSERT:
  case KV_OP_RESIDENT:
    if (e->resident) unlink(ev->slot);
    e->resident = 1, e->pinned = 0, e->size = ev->size, e->tenant = ev->tenant;
    link(ev->slot);
    break;
  case KV_OP_REMOVE:
    if (e->resident) unlink(ev->slot);
    e->resident = e->pinned = 0;
    break;
  case KV_OP_PIN:
    e->pinned = e->resident;
    break;
  case KV_OP_UNPIN:
    e->pinned = 0;
  }
}

static void events(const kv_event *batch, uint32_t n) {
  for (const kv_event *ev = batch, *end = batch + n; ev != end; ev++) {
    uint32_t slot = ev->slot;
    if (slot >= root) continue;
    node *e = &nodes[slot];
    if (ev->op != KV_OP_TOUCH)
      rare(ev, e);
    else if (e->resident)
      unlink(slot), link(slot);
  }
}

/* A call must end soon, also when a hundred thousand entries at the back are pinned or another tenant's. */
#define MOST_PASSED 4096

static uint32_t victims(const kv_ask *ask, uint32_t *out) {
  uint32_t n = 0, passed = 0;
  uint64_t freed = 0;
  for (uint32_t s = nodes[root].newer; s != root && n < ask->max_victims && freed < ask->bytes; s = nodes[s].newer) {
    const node *e = &nodes[s];
    if (e->pinned || (ask->tenant != KV_NONE && ask->tenant != e->tenant)) {
      if (++passed > MOST_PASSED) break;
      continue;
    }
    out[n++] = s;
    freed += (uint64_t)e->size * KV_SIZE_UNIT;
  }
  return n;
}

KV_MODULE(init)
KV_EVICT(events, victims)
KV_MANIFEST_FILE("manifest.json")
