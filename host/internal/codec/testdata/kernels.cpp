// Runs the kernels of codec.cu and sums.cu on the processor, one thread a thread and one block after the other, so that they are tested where
// there is no GPU. It stands in for what CUDA's compiler has built in. It gives no figure.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>

using std::max;
using std::min;

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim;
enum { kWarps = 8, kFew = 8 };
static pthread_barrier_t barrier, warps[kWarps], few[kWarps]; // of a block, of each warp, and of a warp's first lanes
static std::mutex sums;
static std::atomic<unsigned> counted;

static void __syncthreads() { pthread_barrier_wait(&barrier); }
static void __syncwarp(unsigned lanes = 0xffffffff) {
  const unsigned w = threadIdx.x / 32;
  pthread_barrier_wait(lanes == 0xffffffff ? &warps[w] : &few[w]);
}
static unsigned __syncthreads_count(bool one) {
  if (threadIdx.x == 0) counted = 0;
  __syncthreads();
  counted += one;
  __syncthreads();
  const unsigned n = counted;
  __syncthreads();
  return n;
}
static void atomicOr(unsigned* at, unsigned v) { __atomic_or_fetch(at, v, __ATOMIC_SEQ_CST); }
template <typename T>
static void atomicAdd(T* at, T v) {
  const std::lock_guard<std::mutex> lock(sums);
  *at += v;
}
static void atomicAdd(unsigned* at, int v) { __atomic_add_fetch(at, v, __ATOMIC_SEQ_CST); }


// A warp's lanes exchange values.
static unsigned long long lanes[kWarps][32];
template <typename T>
static T __shfl_sync(unsigned who, T v, unsigned of) {
  lanes[threadIdx.x / 32][threadIdx.x % 32] = v;
  __syncwarp(who);
  const T got = static_cast<T>(lanes[threadIdx.x / 32][of]);
  __syncwarp(who);
  return got;
}
template <typename T>
static T __shfl_xor_sync(unsigned who, T v, unsigned of) { return __shfl_sync(who, v, threadIdx.x % 32 ^ of); }
static unsigned __ballot_sync(unsigned, bool v) {
  unsigned bits = 0;
  for (unsigned i = 0; i < 32; i++) bits |= __shfl_sync(0xffffffff, static_cast<unsigned>(v), i) << i;
  return bits;
}
static unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
  n %= 32;
  return n ? hi << n | lo >> (32 - n) : hi;
}
static unsigned __ldg(const unsigned* at) { return *at; }

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static
#include "codec.cu"
namespace sums_of {
#include "sums.cu"
}

template <typename Kernel>
struct Launch {
  unsigned blocks, thread;
  Kernel* kernel;
};

// A kernel's threads end a block at different places, so that they wait for each other before the next one.
template <typename Kernel>
static void* thread(void* arg) {
  const auto* l = static_cast<Launch<Kernel>*>(arg);
  threadIdx.x = l->thread;
  for (unsigned b = 0; b < l->blocks; b++) {
    blockIdx.x = b;
    (*l->kernel)();
    pthread_barrier_wait(&barrier);
  }
  return nullptr;
}

template <typename Kernel>
static void launch(unsigned blocks, unsigned threads, Kernel kernel) {
  pthread_t ids[kThreads];
  Launch<Kernel> launches[kThreads];
  gridDim.x = blocks;
  pthread_barrier_init(&barrier, nullptr, threads);
  for (unsigned w = 0; w < kWarps; w++) pthread_barrier_init(&warps[w], nullptr, 32), pthread_barrier_init(&few[w], nullptr, kFew);
  for (unsigned t = 0; t < threads; t++) {
    launches[t] = {blocks, t, &kernel};
    if (pthread_create(&ids[t], nullptr, thread<Kernel>, &launches[t])) __builtin_trap();
  }
  for (unsigned t = 0; t < threads; t++) pthread_join(ids[t], nullptr);
  pthread_barrier_destroy(&barrier);
  for (unsigned w = 0; w < kWarps; w++) pthread_barrier_destroy(&warps[w]), pthread_barrier_destroy(&few[w]);
}

extern "C" void encode(kv_byte* window, kv_byte* scratch, uint4* planes, uint4* pages, unsigned n, unsigned element, kv_byte* coded,
                       uint4* stored) {
  launch(n * element, kThreads, [=] { kvhost_encode(window, scratch, planes, pages, n, element); });
  launch(n, kThreads, [=] { kvhost_pack(window, scratch, planes, pages, n, element, coded, stored); });
}

extern "C" void decode(kv_byte* coded, kv_byte* scratch, kv_byte* window, uint4* pages, uint4* stored, unsigned n, unsigned* halted,
                       unsigned epoch) {
  launch(2 * n, kDecodeThreads, [=] { kvhost_decode(coded, scratch, pages, stored, n, halted, epoch); });
  launch(n, kThreads, [=] { kvhost_join(coded, scratch, window, pages, stored, n, halted, epoch); });
}

extern "C" void sum(kv_byte* buffer, uint4* extents, unsigned n, kv_u64* sums, kv_u64* expected, unsigned* halted, unsigned epoch) {
  launch(min(n, 3u), sums_of::kThreads, [=] { sums_of::kvhost_sums(buffer, extents, n, sums, expected, halted, epoch); });
}
