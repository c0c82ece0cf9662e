// Runs the kernels of codec.cu and sums.cu on the processor, one block after the other, so that they are tested where there is no GPU. It
// stands in for what CUDA's compiler has built in. It gives no figure.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>

using std::max;
using std::min;

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Index { unsigned x; };
static Index threadIdx, blockIdx, gridDim;
enum { kMost = 256, kWarps = 8, kFew = 8 };

// A kernel's threads take turns, each on a stack of its own and in another order each time. One goes on until it waits for others, so that
// a wait that is missing shows.
static struct Fiber {
  alignas(64) char stack[64 << 10];
  jmp_buf at;
  ucontext_t begin;
  bool begun, ended;
} fibers[kMost];
static jmp_buf home;
static bool moved; // something came to pass in this turn

__attribute__((noinline)) static void yield() {
  if (!_setjmp(fibers[threadIdx.x].at)) _longjmp(home, 1);
}

__attribute__((noinline)) static void resume(unsigned t) {
  threadIdx.x = t;
  if (_setjmp(home)) return;
  Fiber& f = fibers[t];
  if (f.begun) _longjmp(f.at, 1);
  f.begun = true;
  setcontext(&f.begin);
}

struct Barrier {
  unsigned of, arrived, rounds;
  void wait() {
    const unsigned round = rounds;
    if (++arrived == of) {
      arrived = 0, rounds++, moved = true;
      return;
    }
    while (*const_cast<volatile unsigned*>(&rounds) == round) yield();
  }
};
static Barrier barrier, warps[kWarps], few[kWarps]; // of a block, of each warp, and of a warp's first lanes
static unsigned counted;

static void __syncthreads() { barrier.wait(); }
static void __syncwarp(unsigned lanes = 0xffffffff) {
  const unsigned w = threadIdx.x / 32;
  (lanes == 0xffffffff ? warps : few)[w].wait();
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
static void atomicOr(unsigned* at, unsigned v) { *at |= v; }
template <typename T, typename U>
static void atomicAdd(T* at, U v) { *at += v; }

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
  const unsigned w = threadIdx.x / 32;
  lanes[w][threadIdx.x % 32] = v;
  __syncwarp();
  unsigned bits = 0;
  for (unsigned i = 0; i < 32; i++) bits |= static_cast<unsigned>(lanes[w][i]) << i;
  __syncwarp();
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

// A kernel's threads end a block at different places, so that they wait for each other before the next one.
template <typename Kernel>
static const Kernel* launched;
template <typename Kernel>
static void thread() {
  for (unsigned b = 0; b < gridDim.x; b++) {
    blockIdx.x = b;
    (*launched<Kernel>)();
    barrier.wait();
  }
  fibers[threadIdx.x].ended = true;
  yield();
}

template <typename Kernel>
static void launch(unsigned blocks, unsigned threads, Kernel kernel) {
  if (threads > kMost) __builtin_trap();
  gridDim.x = blocks, launched<Kernel> = &kernel, barrier = {threads};
  for (unsigned w = 0; w < kWarps; w++) warps[w] = {32}, few[w] = {kFew};
  for (unsigned t = 0; t < threads; t++) {
    Fiber& f = fibers[t];
    f.begun = f.ended = false;
    getcontext(&f.begin);
    f.begin.uc_stack.ss_sp = f.stack, f.begin.uc_stack.ss_size = sizeof f.stack, f.begin.uc_link = nullptr;
    makecontext(&f.begin, thread<Kernel>, 0);
  }
  unsigned left = threads;
  for (unsigned turn = 0; left > 0; turn++) {
    moved = false;
    for (unsigned i = 0; i < threads; i++) {
      const unsigned t = (5 * i + 101 * turn + 7) % threads; // a power of 2
      if (fibers[t].ended) continue;
      resume(t);
      if (fibers[t].ended) left--, moved = true;
    }
    if (!moved) __builtin_trap(); // all wait
  }
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
