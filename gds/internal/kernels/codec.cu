// The codec of extents (huffman.h) on the GPU: a window's extents are encoded, or decoded, side by side.
//
//   store: window --kvhost_encode, a block a plane--> planes --kvhost_pack, a block an extent--> what is stored, without gaps
//   load:  what is stored --kvhost_decode, a warp a plane--> planes --kvhost_join, a block an extent--> window
//
// An extent of a window is a row of 16 bytes: its offset (low word, high word), its length, and what the kernel says of it. The
// planes of the extent at offset o stand in scratch from 2*o on, which has twice the window's length.
//
// Generated to codec.ptx by generate.sh; a test compares the digest that the PTX carries with this file and the header.

#include "huffman.h"

constexpr unsigned kThreads = 256;       // of a block; the launcher uses the same number
constexpr unsigned kDecodeThreads = 32;  // of one that decodes: four of them read streams
constexpr unsigned kStreamThreads = kThreads / 4;
constexpr unsigned kAll = 0xffffffff;
constexpr float kUniform = 7.85f;        // bits of entropy from which on a plane is stored as it is, as host/internal/codec has it

__device__ __forceinline__ kv_u64 offset(const uint4& row) { return static_cast<kv_u64>(row.y) << 32 | row.x; }

// length of plane p of an extent.
__device__ __forceinline__ unsigned length_of(unsigned n, unsigned element, unsigned p) { return (n + element - 1 - p) / element; }

// place of plane p of an extent in scratch.
__device__ __forceinline__ kv_u64 place(const uint4& page, unsigned p) { return (2 * offset(page) + (p ? page.z : 0) + 7) & ~7ull; }

// each_byte calls f with each byte of a plane, those of 16 bytes of the extent by one thread.
template <typename F>
__device__ __forceinline__ void each_byte(const kv_byte* extent, unsigned bytes, unsigned element, unsigned p, F f) {
  const unsigned vectors = reinterpret_cast<kv_u64>(extent) % 16 ? 0 : bytes / 16;
  for (unsigned v = threadIdx.x; v < vectors; v += kThreads) {
    const uint4 w = reinterpret_cast<const uint4*>(extent)[v];
#pragma unroll
    for (unsigned i = 0; i < 4; i++) {
      const unsigned word = i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w;
      if (element == 2) {
        f(word >> 8 * p & 255);
        f(word >> (8 * p + 16) & 255);
      } else {
#pragma unroll
        for (unsigned k = 0; k < 4; k++) f(word >> 8 * k & 255);
      }
    }
  }
  const unsigned n = length_of(bytes, element, p);
  for (unsigned i = vectors * 16 / element + threadIdx.x; i < n; i += kThreads) f(extent[i * element + p]);
}

struct Encoder {
  kv_u32 partial[kThreads / 32][256]; // each warp counts apart
  kv_u32 count[256];
  kv_work work;
  kv_byte length[256];
  kv_u16 code[256];
  kv_byte table[KV_TABLE];
  kv_u32 bits[kThreads];
  unsigned longest, head;
  float entropy;
};

// codes finds the codes of what e.count has, and writes their table. It returns false if the plane is better stored as it is.
__device__ __forceinline__ bool codes(Encoder& e, unsigned n) {
  const unsigned s = threadIdx.x;
  const unsigned mine = e.count[s];
  if (mine) {
    atomicAdd(&e.entropy, mine * log2f(static_cast<float>(n) / mine));
    unsigned rank = 0;
    for (unsigned o = 0; o < 256; o++) {
      const unsigned c = e.count[o];
      rank += c && (c < mine || (c == mine && o < s));
    }
    e.work.order[rank] = s;
  }
  const unsigned symbols = __syncthreads_count(mine != 0);
  if (e.entropy > kUniform * n) return false;
  if (s == 0) {
    e.longest = kv_lengths(e.count, symbols, &e.work, e.length);
    e.head = kv_put_table(e.length, e.longest, &e.work, e.table);
  }
  __syncthreads();
  if (!e.head) return false;
  const unsigned longest = e.longest, own = e.length[s];
  unsigned before = 0; // where the code stands in a table of all: those of lower weight come first, then by symbol
  for (unsigned o = 0; o < 256; o++) {
    const unsigned l = e.length[o];
    if (l && (l > own || (l == own && o < s))) before += 1u << (longest - l);
  }
  e.code[s] = before >> (longest - own);
  return true;
}

// kvhost_encode writes the planes that gain by Huffman codes to scratch, and of each how it is stored to planes: the method, the
// stored length, and the extent's length.
extern "C" __global__ void __launch_bounds__(kThreads)
    kvhost_encode(const kv_byte* window, kv_byte* scratch, uint4* planes, const uint4* pages, unsigned count, unsigned element) {
  __shared__ Encoder e;
  const unsigned x = blockIdx.x / element, p = blockIdx.x % element, tid = threadIdx.x;
  if (x >= count) return;
  const uint4 page = pages[x];
  const kv_byte* extent = window + offset(page);
  const unsigned n = length_of(page.z, element, p);
  uint4* said = &planes[2 * x + p];
  for (unsigned w = 0; w < kThreads / 32; w++) e.partial[w][tid] = 0;
  e.length[tid] = 0;
  if (tid == 0) e.entropy = 0;
  __syncthreads();
  each_byte(extent, page.z, element, p, [&](unsigned byte) { atomicAdd(&e.partial[tid / 32][byte], 1); });
  __syncthreads();
  unsigned mine = 0;
  for (unsigned w = 0; w < kThreads / 32; w++) mine += e.partial[w][tid];
  e.count[tid] = mine;
  const unsigned symbols = __syncthreads_count(mine != 0);
  if (symbols <= 1 || n < KV_LEAST) {
    if (tid == 0) *said = symbols == 1 ? make_uint4(KV_PLANE_REPEATED, 1, page.z, 0) : make_uint4(KV_PLANE_RAW, n, page.z, 0);
    return;
  }
  if (!codes(e, n)) {
    if (tid == 0) *said = make_uint4(KV_PLANE_RAW, n, page.z, 0);
    return;
  }
  // A thread has a run of one stream. Streams are written from their last symbol to the first.
  __syncthreads();
  const unsigned each = (n + 3) / 4, stream = tid / kStreamThreads, part = tid % kStreamThreads;
  const unsigned from = stream * each, to = min(n, from + each), run = (to - from + kStreamThreads - 1) / kStreamThreads;
  const unsigned begin = min(to, from + part * run), end = min(to, begin + run);
  unsigned bits = 0;
#pragma unroll 4
  for (unsigned i = begin; i < end; i++) bits += e.length[extent[i * element + p]];
  e.bits[tid] = bits;
  __syncthreads();
  unsigned start = e.head + KV_JUMP, stored = start, at = 0, sizes[4];
#pragma unroll
  for (unsigned k = 0; k < 4; k++) {
    unsigned sum = 0;
    for (unsigned i = 0; i < kStreamThreads; i++) {
      const unsigned b = e.bits[k * kStreamThreads + i];
      sum += b;
      if (k == stream && i > part) at += b;
    }
    sizes[k] = sum / 8 + 1;
    stored += sizes[k];
    if (k < stream) start += sizes[k];
  }
  if (stored > n - n / 64) {
    if (tid == 0) *said = make_uint4(KV_PLANE_RAW, n, page.z, 0);
    return;
  }
  unsigned* words = reinterpret_cast<unsigned*>(scratch + place(page, p));
  for (unsigned i = tid; i < (stored + 3) / 4; i += kThreads) words[i] = 0;
  __syncthreads();
  if (tid < e.head + KV_JUMP) {
    unsigned byte = 0;
    if (tid < e.head) {
      byte = e.table[tid];
    } else {
      const unsigned k = tid - e.head;
      byte = (k < 2 ? sizes[0] : k < 4 ? sizes[1] : sizes[2]) >> 8 * (k % 2) & 255;
    }
    atomicOr(&words[tid / 4], byte << 8 * (tid % 4));
  }
  const unsigned bit = 8 * start + at;
  unsigned word = bit / 32, fill = bit % 32;
  kv_u64 pending = 0;
  bool shared = true; // the first word has bits of another thread, and so may the last
  const auto flush = [&]() {
    if (fill < 32) return;
    if (shared)
      atomicOr(&words[word], static_cast<unsigned>(pending));
    else
      words[word] = static_cast<unsigned>(pending);
    shared = false;
    pending >>= 32, fill -= 32, word++;
  };
  for (unsigned i = end; i-- > begin;) {
    const unsigned s = extent[i * element + p];
    pending |= static_cast<kv_u64>(e.code[s]) << fill;
    fill += e.length[s];
    flush();
  }
  if (part == 0) {
    pending |= 1ull << fill++;
    flush();
  }
  if (pending) atomicOr(&words[word], static_cast<unsigned>(pending));
  if (tid == 0) *said = make_uint4(KV_PLANE_HUFFMAN, stored, page.z, 0);
}

// copy writes n bytes, which stand at every step-th place, one after the other, with the whole block.
__device__ __forceinline__ void copy(kv_byte* to, const kv_byte* from, unsigned n, unsigned step) {
  const unsigned head = min(n, static_cast<unsigned>(-reinterpret_cast<kv_u64>(to) & 3)), words = (n - head) / 4;
  if (threadIdx.x < head) to[threadIdx.x] = from[threadIdx.x * step];
#pragma unroll 4
  for (unsigned w = threadIdx.x; w < words; w += kThreads) {
    const kv_byte* f = from + (head + 4 * w) * step;
    reinterpret_cast<unsigned*>(to + head)[w] = f[0] | f[step] << 8 | f[2 * step] << 16 | static_cast<unsigned>(f[3 * step]) << 24;
  }
  const unsigned done = head + 4 * words;
  if (threadIdx.x < n - done) to[done + threadIdx.x] = from[(done + threadIdx.x) * step];
}

// stored_form returns how an extent with these planes is stored: its length and its codec.
__device__ __forceinline__ uint2 stored_form(unsigned element, const uint4* planes) {
  const unsigned n = planes[0].z; // not from its row, which every block would read over the bus
  const unsigned most = n - max(1u, n / 32);
  unsigned stored = element == 2 ? 6 + planes[0].y + planes[1].y : 1 + planes[0].y;
  if (n < element || stored > most || (element == 1 && planes[0].x == KV_PLANE_RAW)) return make_uint2(n, KV_RAW);
  return make_uint2(stored, element == 2 ? KV_PLANES : KV_HUFFMAN);
}

// kvhost_pack writes the extents as they are stored to coded, without gaps, and their rows to stored.
extern "C" __global__ void __launch_bounds__(kThreads)
    kvhost_pack(const kv_byte* window, const kv_byte* scratch, const uint4* planes, const uint4* pages, unsigned count, unsigned element,
                kv_byte* coded, uint4* stored) {
  __shared__ kv_u64 before;
  const unsigned x = blockIdx.x, tid = threadIdx.x;
  if (x >= count) return;
  if (tid == 0) before = 0;
  __syncthreads();
  kv_u64 sum = 0;
  for (unsigned y = tid; y < x; y += kThreads) sum += stored_form(element, &planes[2 * y]).x;
  if (sum) atomicAdd(&before, sum);
  __syncthreads();
  const uint4 page = pages[x];
  const uint2 form = stored_form(element, &planes[2 * x]);
  if (tid == 0) stored[x] = make_uint4(static_cast<unsigned>(before), static_cast<unsigned>(before >> 32), form.x, form.y);
  const kv_byte* extent = window + offset(page);
  kv_byte* to = coded + before;
  if (form.y == KV_RAW) {
    copy(to, extent, page.z, 1);
    return;
  }
  if (tid < element) to[tid] = static_cast<kv_byte>(planes[2 * x + tid].x);
  if (element == 2 && tid < 4) to[2 + tid] = static_cast<kv_byte>(planes[2 * x].y >> 8 * tid);
  to += element == 2 ? 6 : 1;
  for (unsigned p = 0; p < element; p++) {
    const uint4 plane = planes[2 * x + p];
    if (plane.x == KV_PLANE_HUFFMAN)
      copy(to, scratch + place(page, p), plane.y, 1);
    else
      copy(to, extent + p, plane.y, element);
    to += plane.y;
  }
}

// Plane is where a plane of an extent stands among what is stored, and how.
struct Plane {
  const kv_byte* at;
  unsigned stored, method, n;
};

// plane_of finds plane p of an extent of n bytes. It returns false for what no encoder wrote.
__device__ __forceinline__ bool plane_of(const kv_byte* coded, const uint4& row, unsigned n, unsigned p, Plane& out) {
  const kv_byte* at = coded + offset(row);
  if (row.w == KV_HUFFMAN) {
    if (row.z < 1) return false;
    out = Plane{at + 1, row.z - 1, at[0], n};
  } else {
    if (row.w != KV_PLANES || row.z < 6) return false;
    const unsigned first = at[2] | at[3] << 8 | at[4] << 16 | static_cast<unsigned>(at[5]) << 24;
    if (first > row.z - 6) return false;
    out = p ? Plane{at + 6 + first, row.z - 6 - first, at[1], n / 2} : Plane{at + 6, first, at[0], (n + 1) / 2};
  }
  switch (out.method) {
    case KV_PLANE_RAW: return out.stored == out.n;
    case KV_PLANE_REPEATED: return out.stored == 1;
    case KV_PLANE_HUFFMAN: return out.n >= KV_LEAST && out.stored < out.n;
  }
  return false;
}

struct Decoder {
  kv_work work;
  kv_byte table[KV_TABLE];
  kv_u16 entry[KV_CODES]; // by the next bits: the symbol, and the length of its code above it
  uint2 many[KV_CODES];   // likewise: up to four symbols; the bits of all, and from bit 16 on the bits that they are themselves
  unsigned longest, head;
};

// tables reads the table of codes, with one warp, and makes the decoder's of it.
__device__ __forceinline__ bool tables(Decoder& d, const Plane& plane) {
  const unsigned lane = threadIdx.x;
  for (unsigned i = lane; i < KV_TABLE; i += kDecodeThreads) d.table[i] = i < plane.stored ? plane.at[i] : 0;
  __syncwarp();
  if (lane == 0) d.head = kv_get_table(d.table, min(plane.stored, static_cast<unsigned>(KV_TABLE)), &d.work, &d.longest);
  __syncwarp();
  if (!d.head || plane.stored - d.head < KV_JUMP + 4) return false;
  const unsigned longest = d.longest;
  constexpr unsigned kEach = 256 / kDecodeThreads;
  unsigned before[kEach] = {}, own[kEach];
#pragma unroll
  for (unsigned k = 0; k < kEach; k++) own[k] = d.work.weight[k * kDecodeThreads + lane];
  for (unsigned o = 0; o < 256; o++) {
    const unsigned w = d.work.weight[o], size = (1u << w) >> 1;
#pragma unroll
    for (unsigned k = 0; k < kEach; k++)
      if (w < own[k] || (w == own[k] && o < k * kDecodeThreads + lane)) before[k] += size;
  }
#pragma unroll
  for (unsigned k = 0; k < kEach; k++) {
    const unsigned size = (1u << own[k]) >> 1, what = k * kDecodeThreads + lane | (longest + 1 - own[k]) << 8;
    if (size < kDecodeThreads)
      for (unsigned i = 0; i < size; i++) d.entry[before[k] + i] = static_cast<kv_u16>(what);
    for (unsigned long_ones = __ballot_sync(kAll, size >= kDecodeThreads); long_ones; long_ones &= long_ones - 1) { // by all lanes
      const unsigned of = kv_top(long_ones & -long_ones);
      const unsigned at = __shfl_sync(kAll, before[k], of), n = __shfl_sync(kAll, size, of), v = __shfl_sync(kAll, what, of);
      for (unsigned i = lane; i < n; i += kDecodeThreads) d.entry[at + i] = static_cast<kv_u16>(v);
    }
  }
  __syncwarp();
  const unsigned codes = 1u << longest;
  for (unsigned i = lane; i < codes; i += kDecodeThreads) {
    unsigned used = 0, found = 0, symbols = 0;
    while (found < 32) {
      const unsigned e = d.entry[i << used & (codes - 1)];
      if (used + (e >> 8) > longest) break;
      symbols |= (e & 255) << found;
      used += e >> 8, found += 8;
    }
    d.many[i] = make_uint2(symbols, used | found << 16);
  }
  __syncwarp();
  return true;
}

// stream decodes n symbols from a stream of size bytes, from its end to its beginning. Few instructions are all that counts here: each
// waits for the one before.
template <bool Aligned>
__device__ __forceinline__ bool stream(const Decoder& d, const kv_byte* from, unsigned size, kv_byte* to, unsigned n) {
  const unsigned skew = reinterpret_cast<kv_u64>(from) % 4, last = from[size - 1];
  if (!last) return false;
  const unsigned* words = reinterpret_cast<const unsigned*>(from - skew);
  const unsigned shift = 32 - d.longest, end = 8 * (skew + size - 1) + kv_top(last); // the bit that ends the stream
  int word = end / 32; // the next to be read
  const auto read = [&]() { return __ldg(words + max(word--, 0)); };
  unsigned next = 0, hi = 0, lo = 0; // the next bit is hi's highest
  unsigned counts = 32 - end % 32;   // bits used of hi and lo, and from bit 16 on bits of symbols in ready
  unsigned first = read();
  next = read();
  hi = __funnelshift_l(next, first, counts), lo = __funnelshift_l(0, next, counts);
  if (counts == 32) hi = next, lo = 0; // the first word has the end alone: the shift by 32 was one by 0
  next = read();
  unsigned ready = 0, over = 0;
  const auto refill = [&]() {
    if ((counts & 0xffff) < 32) return;
    hi |= __funnelshift_l(next, 0, counts), lo = __funnelshift_l(0, next, counts);
    counts -= 32;
    next = read();
  };
  kv_byte* const stop = to + n - 11;
  while (to <= stop) {
    refill();
#pragma unroll
    for (unsigned k = 0; k < 2; k++) {
      const uint2 m = d.many[hi >> shift];
      hi = __funnelshift_l(lo, hi, m.y), lo = __funnelshift_l(0, lo, m.y);
      const unsigned have = counts >> 16;
      ready |= m.x << have, over = __funnelshift_l(m.x, 0, have);
      counts += m.y;
      if (counts >= 32 << 16) {
        if (Aligned)
          *reinterpret_cast<unsigned*>(to) = ready;
        else
          for (unsigned i = 0; i < 4; i++) to[i] = static_cast<kv_byte>(ready >> 8 * i);
        to += 4, ready = over, counts -= 32 << 16;
      }
    }
  }
  for (; counts >= 8 << 16; counts -= 8 << 16, ready >>= 8) *to++ = static_cast<kv_byte>(ready);
  while (to < stop + 11) {
    refill();
    const unsigned e = d.entry[hi >> shift], used = e >> 8;
    hi = __funnelshift_l(lo, hi, used), lo <<= used, counts += used;
    *to++ = static_cast<kv_byte>(e);
  }
  return 64 - static_cast<int>(counts) + 32 * (word + 2) == 8 * static_cast<int>(skew);
}

// kvhost_decode writes the planes that are stored by Huffman codes to scratch. An extent that no encoder wrote gets a 1 in the last word of
// its row of pages, and shuts the gate: epoch in halted keeps what is launched behind from doing anything.
extern "C" __global__ void __launch_bounds__(kDecodeThreads)
    kvhost_decode(const kv_byte* coded, kv_byte* scratch, uint4* pages, const uint4* stored, unsigned count, unsigned* halted,
                  unsigned epoch) {
  __shared__ Decoder d;
  const unsigned x = blockIdx.x / 2, p = blockIdx.x % 2, lane = threadIdx.x;
  if (x >= count || *reinterpret_cast<volatile unsigned*>(halted) == epoch) return;
  const uint4 page = pages[x], row = stored[x];
  bool good = true;
  if (row.w == KV_RAW) {
    good = row.z == page.z;
  } else if (row.w != KV_HUFFMAN || p == 0) {
    Plane plane;
    good = plane_of(coded, row, page.z, p, plane);
    if (good && plane.method == KV_PLANE_HUFFMAN) {
      good = tables(d, plane);
      if (good && lane < 4) {
        const kv_byte* jump = plane.at + d.head;
        unsigned from = d.head + KV_JUMP, size = 0;
        for (unsigned k = 0; k <= lane && good; k++) {
          from += size;
          size = k < 3 ? jump[2 * k] | jump[2 * k + 1] << 8 : plane.stored - from;
          good = size > 0 && size <= plane.stored - from;
        }
        const unsigned each = (plane.n + 3) / 4;
        kv_byte* to = scratch + place(page, p) + lane * each;
        const unsigned symbols = lane < 3 ? each : plane.n - 3 * each;
        good = good && (each % 4 ? stream<false>(d, plane.at + from, size, to, symbols) : stream<true>(d, plane.at + from, size, to, symbols));
      }
    }
  }
  if (!good) {
    pages[x].w = 1;
    *reinterpret_cast<volatile unsigned*>(halted) = epoch;
  }
}

// kvhost_join writes the extents' page bytes to the window, from what is stored and from the planes in scratch.
extern "C" __global__ void __launch_bounds__(kThreads)
    kvhost_join(const kv_byte* coded, const kv_byte* scratch, kv_byte* window, const uint4* pages, const uint4* stored, unsigned count,
                const unsigned* halted, unsigned epoch) {
  const unsigned x = blockIdx.x, tid = threadIdx.x;
  if (x >= count || *reinterpret_cast<const volatile unsigned*>(halted) == epoch) return;
  const uint4 page = pages[x], row = stored[x];
  kv_byte* to = window + offset(page);
  if (row.w == KV_RAW) {
    copy(to, coded + offset(row), page.z, 1);
    return;
  }
  const kv_byte* from[2];
  unsigned step[2];
  for (unsigned p = 0; p < (row.w == KV_PLANES ? 2 : 1); p++) {
    Plane plane;
    if (!plane_of(coded, row, page.z, p, plane)) return; // kvhost_decode has refused it
    from[p] = plane.method == KV_PLANE_HUFFMAN ? scratch + place(page, p) : plane.at;
    step[p] = plane.method == KV_PLANE_REPEATED ? 0 : 1;
  }
  if (row.w == KV_HUFFMAN) {
    copy(to, from[0], page.z, step[0]);
    return;
  }
  const unsigned words = reinterpret_cast<kv_u64>(to) % 4 ? 0 : page.z / 4;
#pragma unroll 4
  for (unsigned w = tid; w < words; w += kThreads) {
    const kv_byte *lo = from[0] + 2 * w * step[0], *hi = from[1] + 2 * w * step[1];
    reinterpret_cast<unsigned*>(to)[w] = lo[0] | hi[0] << 8 | lo[step[0]] << 16 | static_cast<unsigned>(hi[step[1]]) << 24;
  }
  for (unsigned i = 4 * words + tid; i < page.z; i += kThreads) to[i] = from[i % 2][i / 2 * step[i % 2]];
}
