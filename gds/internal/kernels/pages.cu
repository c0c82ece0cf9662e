// Gather and scatter: scattered pieces of pages on one side, one contiguous buffer on the other, which is a pinned host
// slot or device memory. One kernel does both directions.
//
// Generated to pages.ptx by generate.sh; a test compares the digest that the PTX carries with this file.

// A piece is 16 bytes: where its page bytes stand (two words, low first), their offset in the buffer, their length.
constexpr unsigned kThreads = 512; // of a block; the launcher uses the same number
constexpr unsigned kUnroll = 4;    // independent loads in flight per thread before the first store

// copy moves n words with the whole block.
template <typename Word>
__device__ __forceinline__ void copy(unsigned char* to, const unsigned char* from, unsigned n) {
  Word* t = reinterpret_cast<Word*>(to);
  const Word* f = reinterpret_cast<const Word*>(from);
  for (unsigned k = threadIdx.x; k < n; k += kThreads * kUnroll) {
    Word r[kUnroll];
#pragma unroll
    for (unsigned u = 0; u < kUnroll; u++)
      if (k + u * kThreads < n) r[u] = f[k + u * kThreads];
#pragma unroll
    for (unsigned u = 0; u < kUnroll; u++)
      if (k + u * kThreads < n) t[k + u * kThreads] = r[u];
  }
}

// kvhost_pages moves count pieces. cancel is a word in pinned memory: once it is not 0, each block ends before its next
// piece. Only one thread of the first block reads it, while a piece is being copied, because reads of one address over PCIe
// come one after the other, about 1 us each; it passes the word on in device memory, where halted holds the epoch of the
// launch that is to stop. One whose epoch stands there when it begins moves nothing at all: so the checksum kernel shuts the
// gate before what it found to be wrong.
extern "C" __global__ void __launch_bounds__(kThreads)
    kvhost_pages(unsigned char* buffer, const uint4* pieces, unsigned count, unsigned scatter, const unsigned* cancel,
                 unsigned* halted, unsigned epoch) {
  __shared__ uint4 mine[kThreads];
  __shared__ volatile unsigned stop;
  const unsigned each = (count + gridDim.x - 1) / gridDim.x;
  const unsigned begin = blockIdx.x * each;
  const unsigned end = min(count, begin + each);
  if (threadIdx.x == 0) stop = *reinterpret_cast<const volatile unsigned*>(halted) == epoch;
  for (unsigned base = begin; base < end; base += kThreads) {
    __syncthreads();
    if (base + threadIdx.x < end) mine[threadIdx.x] = pieces[base + threadIdx.x];
    __syncthreads();
    const unsigned n = min(end - base, kThreads);
    for (unsigned i = 0; i < n; i++) {
      if (stop) break;
      unsigned asked = 0, told = 0;
      if (threadIdx.x == 0) {
        if (blockIdx.x == 0)
          asked = *reinterpret_cast<const volatile unsigned*>(cancel);
        else
          told = *reinterpret_cast<const volatile unsigned*>(halted);
      }
      const uint4 piece = mine[i];
      unsigned char* page = reinterpret_cast<unsigned char*>(static_cast<unsigned long long>(piece.y) << 32 | piece.x);
      unsigned char* flat = buffer + piece.z;
      unsigned char* to = scatter ? page : flat;
      const unsigned char* from = scatter ? flat : page;
      const unsigned long long skew =
          reinterpret_cast<unsigned long long>(page) | reinterpret_cast<unsigned long long>(flat) | piece.w;
      if (skew % 16 == 0)
        copy<uint4>(to, from, piece.w / 16);
      else if (skew % 4 == 0)
        copy<unsigned>(to, from, piece.w / 4);
      else
        copy<unsigned char>(to, from, piece.w);
      if (threadIdx.x == 0) {
        if (asked) *reinterpret_cast<volatile unsigned*>(halted) = epoch;
        if (asked || told == epoch) stop = 1;
      }
    }
  }
}
