/* aligned: blocks one after the other, each from a multiple of so many bytes on.
 *
 * A chunk holds many blocks, and an engine that wants only some of them reads only those: all pages of a block stand
 * together, by layer and part. Storage is read in sectors, and direct I/O in nothing else; where pages are of odd sizes, a
 * block that starts in the middle of a sector costs a sector more at both ends, which are the neighbours'. So each block is
 * moved to the next boundary by a gap of zeros, at most 4,095 bytes.
 *
 * Where that would make more segments than a plan may have, runs of blocks share one in each plane: they are then
 * contiguous and aligned as a run. */
#include "kvhost.h"

enum { MOST_PLANES = 4096 };
static uint32_t order[2][MOST_PLANES]; /* planes by layer and part, and room to sort them */
static uint64_t alignment = 4096;

static int32_t init(const kv_info *info) {
  if (!kv_setting_u64(info, "alignment", &alignment) || alignment < 1 || alignment > 4096 || alignment & (alignment - 1))
    return KV_FAIL("alignment: want a power of two, at most 4096");
  return KV_OK;
}

static uint64_t rank(const kv_plane *p) { return (uint64_t)p->layer << 32 | p->part; }

/* sorted merges runs of growing length from one array to the other and back; a call must end soon, whatever the order. */
static const uint32_t *sorted(const kv_plane *planes, uint32_t n) {
  uint32_t *from = order[0], *to = order[1];
  for (uint32_t i = 0; i < n; i++) from[i] = i;
  for (uint32_t width = 1; width < n; width *= 2) {
    for (uint32_t start = 0; start < n; start += 2 * width) {
      uint32_t middle = start + width < n ? start + width : n, end = start + 2 * width < n ? start + 2 * width : n;
      for (uint32_t k = start, a = start, b = middle; k < end; k++) {
        int left = a < middle && (b >= end || rank(&planes[from[a]]) <= rank(&planes[from[b]]));
        to[k] = from[left ? a++ : b++];
      }
    }
    uint32_t *swap = from;
    from = to;
    to = swap;
  }
  return from;
}

static uint32_t layout(const kv_layout_header *h, const kv_plane *planes, kv_segment *out, uint32_t room) {
  if (h->planes > MOST_PLANES) return KV_NONE;
  const uint32_t *by = sorted(planes, h->planes);
  uint32_t run = 1; /* blocks that share a segment */
  while ((uint64_t)((h->blocks + run - 1) / run) * h->planes > room) run++;
  uint32_t n = 0;
  uint64_t end = 0; /* of the payload so far */
  for (uint32_t block = 0; block < h->blocks; block += run) {
    uint32_t blocks = h->blocks - block < run ? h->blocks - block : run;
    for (uint32_t i = 0; i < h->planes; i++) {
      uint32_t len = planes[by[i]].page_bytes, gap = i ? 0 : (uint32_t)(-end & (alignment - 1));
      out[n++] = (kv_segment){by[i], block, blocks, 0, len, gap};
      end += gap + (uint64_t)len * blocks;
    }
  }
  return n;
}

KV_MODULE(init)
KV_LAYOUT(layout)
KV_MANIFEST_FILE("manifest.json")
