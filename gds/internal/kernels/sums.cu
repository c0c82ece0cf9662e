// The checksum of extents in device memory: xxh3 of 64 bits, as the processor computes it (xxh3.h).
//
// Generated to sums.ptx by generate.sh; a test compares the digest that the PTX carries with this file and the header.

#include "xxh3.h"

constexpr unsigned kThreads = 256;  // of a block; the launcher uses the same number
constexpr unsigned kExtent = 65536; // the longest extent
constexpr unsigned kUnroll = 8;     // independent loads in flight per thread
constexpr unsigned kBlocks = kExtent / KV_STRIPE / KV_BLOCK_STRIPES;
constexpr unsigned kAll = 0xffffffff;

// word reads eight bytes. Those at any address are in two words, each of which has at least one of them.
template <bool Aligned>
__device__ __forceinline__ kv_u64 word(const kv_byte* p) {
  if (Aligned) return *reinterpret_cast<const kv_u64*>(p);
  const unsigned skew = 8 * (reinterpret_cast<kv_u64>(p) % 8);
  const kv_u64* at = reinterpret_cast<const kv_u64*>(p - skew / 8);
  return at[0] >> skew | (skew ? at[1] << (64 - skew) : 0);
}

// parts sums the stripes of each block apart: a warp takes four stripes, a word a thread, so that all of the block's loads
// stand side by side. What depends on the order, the scrambling between blocks, is left to eight threads.
template <bool Aligned>
__device__ __forceinline__ void parts(const kv_byte* data, unsigned stripes, kv_u64 (*part)[4][8]) {
  const unsigned lane = threadIdx.x % 8;
  const kv_u64 key = kv_key(8 * (threadIdx.x / 8 % KV_BLOCK_STRIPES + lane));
  const unsigned end = (stripes + KV_BLOCK_STRIPES - 1) / KV_BLOCK_STRIPES * KV_BLOCK_STRIPES;
  for (unsigned base = threadIdx.x / 8; base - threadIdx.x / 8 < end; base += kThreads / 8 * kUnroll) {
    kv_u64 in[kUnroll];
#pragma unroll
    for (unsigned u = 0; u < kUnroll; u++) {
      const unsigned s = base + u * (kThreads / 8);
      in[u] = s < stripes ? word<Aligned>(data + s * KV_STRIPE + lane * 8) : 0;
    }
#pragma unroll
    for (unsigned u = 0; u < kUnroll; u++) {
      const unsigned s = base + u * (kThreads / 8);
      kv_u64 sum = s < stripes ? kv_product(in[u], key) : 0;
      sum += __shfl_xor_sync(kAll, in[u], 1);
      sum += __shfl_xor_sync(kAll, sum, 8);
      sum += __shfl_xor_sync(kAll, sum, 16);
      if (threadIdx.x % 32 < 8 && s < end) part[s / KV_BLOCK_STRIPES][s / 4 % 4][lane] = sum;
    }
  }
}

// deliver tells a checksum, and where it is not the expected one writes epoch to halted, which keeps the copy kernel of that
// epoch, launched behind this one, from moving anything. Without expected nothing is compared.
__device__ __forceinline__ void deliver(kv_u64 sum, unsigned x, kv_u64* sums, const kv_u64* expected, unsigned* halted, unsigned epoch) {
  sums[x] = sum;
  if (expected && expected[x] != sum) *reinterpret_cast<volatile unsigned*>(halted) = epoch;
}

// kvhost_sums writes the checksum of each of count extents to sums. An extent is 16 bytes: its offset in the buffer (low
// word, high word), its length, 0.
extern "C" __global__ void __launch_bounds__(kThreads)
    kvhost_sums(const kv_byte* buffer, const uint4* extents, unsigned count, kv_u64* sums, const kv_u64* expected,
                unsigned* halted, unsigned epoch) {
  __shared__ kv_u64 part[kBlocks][4][8];
  __shared__ kv_u64 acc[8];
  for (unsigned x = blockIdx.x; x < count; x += gridDim.x) {
    const uint4 extent = extents[x];
    const kv_byte* data = buffer + (static_cast<kv_u64>(extent.y) << 32 | extent.x);
    const unsigned n = extent.z;
    if (n <= KV_SHORT || n > kExtent) {
      if (threadIdx.x == 0) deliver(n <= KV_SHORT ? kv_short(data, n) : 0, x, sums, expected, halted, epoch);
      continue;
    }
    const unsigned stripes = (n - 1) / KV_STRIPE;
    if (reinterpret_cast<kv_u64>(data) % 8 == 0)
      parts<true>(data, stripes, part);
    else
      parts<false>(data, stripes, part);
    __syncthreads();
    if (threadIdx.x < 8) {
      const unsigned lane = threadIdx.x;
      const kv_u64 key = kv_key(KV_SCRAMBLE_SECRET + 8 * lane);
      kv_u64 a = kv_start(lane);
      for (unsigned b = 0; b * KV_BLOCK_STRIPES < stripes; b++) {
        a += (part[b][0][lane] + part[b][1][lane]) + (part[b][2][lane] + part[b][3][lane]);
        if ((b + 1) * KV_BLOCK_STRIPES <= stripes) a = kv_scramble(a, key);
      }
      const kv_u64 last = kv_read(data + n - KV_STRIPE + 8 * lane, 8);
      a += kv_product(last, kv_key(KV_LAST_SECRET + 8 * lane));
      a += __shfl_xor_sync(0xff, last, 1);
      acc[lane] = a;
      __syncwarp(0xff);
      if (lane == 0) deliver(kv_merge(acc, n), x, sums, expected, halted, epoch);
    }
    __syncthreads();
  }
}
