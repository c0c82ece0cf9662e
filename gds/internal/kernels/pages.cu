// Gather and scatter: scattered pieces of pages on one side, one contiguous buffer on the other, which is a pinned host
// slot or device memory. One kernel does both directions.
//
// Generated to pages.ptx by generate.sh; a test compares the digest that the PTX carries with this file.

// A piece is 16 bytes: where its page bytes stand (two words, low first), their offset in the buffer, their length. If row is not
// 0, a piece is rows of that many bytes, which lie stride bytes apart in the page and side by side in the buffer; its last row can
// be a part of one.
constexpr unsigned kThreads = 512; // of a block; the launcher uses the same number
constexpr unsigned kUnroll = 4;    // independent loads in flight per thread before the first store
constexpr unsigned kWarps = kThreads / 32;
constexpr unsigned kSmall = 8192;  // a piece of at most so many bytes keeps a warp busy, and a block would wait for it

// Ends are the two ends of a piece.
struct Ends {
  unsigned char *page, *flat;
  unsigned row; // in words
  unsigned long long stride;
};

// copy moves n words with lanes threads, of which this is one.
template <typename Word, bool kRows, bool kScatter>
__device__ __forceinline__ void copy(const Ends& e, unsigned n, unsigned lane, unsigned lanes) {
  const auto page = [&](unsigned k) {
    return kRows ? reinterpret_cast<Word*>(e.page + k / e.row * e.stride) + k % e.row : reinterpret_cast<Word*>(e.page) + k;
  };
  Word* const flat = reinterpret_cast<Word*>(e.flat);
  for (unsigned k = lane; k < n; k += lanes * kUnroll) {
    Word r[kUnroll];
#pragma unroll
    for (unsigned u = 0; u < kUnroll; u++)
      if (const unsigned w = k + u * lanes; w < n) r[u] = kScatter ? flat[w] : *page(w);
#pragma unroll
    for (unsigned u = 0; u < kUnroll; u++)
      if (const unsigned w = k + u * lanes; w < n) *(kScatter ? page(w) : flat + w) = r[u];
  }
}

// move copies a piece with lanes threads, in the widest words that its ends allow.
template <bool kRows, bool kScatter>
__device__ __forceinline__ void move(unsigned char* buffer, const uint4& piece, unsigned row, unsigned stride, unsigned lane, unsigned lanes) {
  Ends e{reinterpret_cast<unsigned char*>(static_cast<unsigned long long>(piece.y) << 32 | piece.x), buffer + piece.z, row, stride};
  const unsigned long long skew = reinterpret_cast<unsigned long long>(e.page) | reinterpret_cast<unsigned long long>(e.flat) | piece.w |
                                  (kRows ? row | stride : 0);
  if (skew % 16 == 0) {
    e.row /= 16;
    copy<uint4, kRows, kScatter>(e, piece.w / 16, lane, lanes);
  } else if (skew % 4 == 0) {
    e.row /= 4;
    copy<unsigned, kRows, kScatter>(e, piece.w / 4, lane, lanes);
  } else {
    copy<unsigned char, kRows, kScatter>(e, piece.w, lane, lanes);
  }
}

// kvhost_pages moves count pieces, large ones by a block each and small ones by a warp each. cancel is a word in pinned memory: once
// it is not 0, each block ends before its next pieces. Only one thread of the first block reads it, while pieces are being copied,
// because reads of one address over PCIe come one after the other, about 1 us each; it passes the word on in device memory, where
// halted holds the epoch of the launch that is to stop. One whose epoch stands there when it begins moves nothing at all: so the
// checksum kernel shuts the gate before what it found to be wrong.
extern "C" __global__ void __launch_bounds__(kThreads)
    kvhost_pages(unsigned char* buffer, const uint4* pieces, unsigned count, unsigned scatter, const unsigned* cancel,
                 unsigned* halted, unsigned epoch, unsigned row, unsigned stride) {
  __shared__ uint4 mine[kThreads];
  __shared__ volatile unsigned stop;
  const unsigned each = (count + gridDim.x - 1) / gridDim.x;
  const unsigned begin = blockIdx.x * each;
  const unsigned end = min(count, begin + each);
  const unsigned warp = threadIdx.x / 32;
  if (threadIdx.x == 0) stop = *reinterpret_cast<const volatile unsigned*>(halted) == epoch;
  for (unsigned base = begin; base < end; base += kThreads) {
    __syncthreads();
    if (base + threadIdx.x < end) mine[threadIdx.x] = pieces[base + threadIdx.x];
    __syncthreads();
    const unsigned n = min(end - base, kThreads);
    for (unsigned i = 0, together; i < n; i += together) {
      if (stop) break;
      unsigned asked = 0, told = 0;
      if (threadIdx.x == 0) {
        if (blockIdx.x == 0)
          asked = *reinterpret_cast<const volatile unsigned*>(cancel);
        else
          told = *reinterpret_cast<const volatile unsigned*>(halted);
      }
      for (together = 0; together < kWarps && i + together < n && mine[i + together].w <= kSmall;) together++;
      const bool alone = together < 2;
      if (alone) together = 1;
      if (alone || warp < together) {
        const uint4 piece = mine[alone ? i : i + warp];
        const unsigned lane = alone ? threadIdx.x : threadIdx.x % 32, lanes = alone ? kThreads : 32;
        if (row && scatter)
          move<true, true>(buffer, piece, row, stride, lane, lanes);
        else if (row)
          move<true, false>(buffer, piece, row, stride, lane, lanes);
        else if (scatter)
          move<false, true>(buffer, piece, row, stride, lane, lanes);
        else
          move<false, false>(buffer, piece, row, stride, lane, lanes);
      }
      if (threadIdx.x == 0) {
        if (asked) *reinterpret_cast<volatile unsigned*>(halted) = epoch;
        if (asked || told == epoch) stop = 1;
      }
    }
  }
}
