// A proxy of libcuda or libcufile, for tests on machines with a GPU: the double's fault rules, before the real library. It is
// linked against the real library by its path, so what is not here is the real function; what is here is counted, and fails
// or is changed where a rule says so. Built once with CUDA defined and once without: two libraries, since the loader would
// take the real libcufile, once loaded, for the other. REAL_LIBRARY is the path that it is linked against.
//
//   KVHOST_DOUBLE     the rules, as double.c has them
//   KVHOST_FAULT_LOG  a file that each hit is appended to; optional
//
// A read or write that is to fail moves half of its bytes first. The kernels are counted by their names, as "pages" or "sums".
// cuFile's own calls of libcuda are neither counted nor failed.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
// Names of its own: the double behind a proxy has its rules, too.
#define kvdouble_rules kvproxy_rules
#define kvdouble_calls kvproxy_calls
#include "faults.h"

__attribute__((constructor)) static void begin(void) {
  const char* log = getenv("KVHOST_FAULT_LOG");
  if (log) fault_log = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  kvdouble_rules(getenv("KVHOST_DOUBLE"));
}

static void* find(const char* name) {
  void* library = dlopen(REAL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  void* f = library ? dlsym(library, name) : NULL;
  if (!f) {
    fprintf(stderr, "proxy: %s of " REAL_LIBRARY ": %s\n", name, dlerror());
    abort();
  }
  return f;
}
#define REAL(type, name) static __typeof__(type) real; if (!real) real = (__typeof__(type))find(name)

#ifdef CUDA

// From the libraries themselves: what they call is their own affair.
static int theirs(void* caller) {
  Dl_info info;
  return dladdr(caller, &info) && info.dli_fname && (strstr(info.dli_fname, "libcufile") || strstr(info.dli_fname, "libcuda"));
}
#define PASS(name, params, args) \
  EXPORT int name params { \
    REAL(int (*) params, #name); \
    if (!theirs(__builtin_return_address(0))) { rule r_ = fault(#name); if (r_.code) return (int)r_.code; } \
    return real args; \
  }
PASS(cuMemAlloc_v2, (void** p, size_t n), (p, n))
PASS(cuMemHostRegister_v2, (void* p, size_t n, unsigned f), (p, n, f))
PASS(cuMemcpyAsync, (void* to, const void* from, size_t n, void* s), (to, from, n, s))
PASS(cuMemsetD8Async, (void* p, unsigned char v, size_t n, void* s), (p, v, n, s))
PASS(cuEventSynchronize, (void* e), (e))
// The kernels by their functions.
static struct { void* f; char name[16]; } kernels[64];
static int n_kernels;

EXPORT int cuModuleGetFunction(void** f, void* m, const char* name) {
  REAL(int (*)(void**, void*, const char*), "cuModuleGetFunction");
  int code = real(f, m, name);
  if (!code && !strncmp(name, "kvhost_", 7)) {
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < n_kernels && kernels[i].f != *f) i++;
    if (i == 64) abort();
    kernels[i].f = *f;
    snprintf(kernels[i].name, sizeof kernels[i].name, "%s", name + 7);
    if (i == n_kernels) n_kernels++;
    pthread_mutex_unlock(&lock);
  }
  return code;
}
EXPORT int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* s, void** params, void** extra) {
  REAL(int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**), "cuLaunchKernel");
  if (!theirs(__builtin_return_address(0))) {
    const char* name = "kernel";
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_kernels; i++)
      if (kernels[i].f == f) name = kernels[i].name;
    pthread_mutex_unlock(&lock);
    rule r = fault(name);
    if (r.code) return (int)r.code;
  }
  return real(f, gx, gy, gz, bx, by, bz, shared, s, params, extra);
}

#else

typedef struct { int err, cu; } file_error;
typedef ssize_t (*mover)(void*, void*, size_t, off_t, off_t);

EXPORT file_error cuFileHandleRegister(void** h, void* d) {
  REAL(file_error (*)(void**, void*), "cuFileHandleRegister");
  rule r = fault("cuFileHandleRegister");
  return r.code ? (file_error){(int)r.code, (int)r.err} : real(h, d);
}
EXPORT file_error cuFileBufRegister(const void* p, size_t n, int flags) {
  REAL(file_error (*)(const void*, size_t, int), "cuFileBufRegister");
  rule r = fault("cuFileBufRegister");
  return r.code ? (file_error){(int)r.code, (int)r.err} : real(p, n, flags);
}

#ifndef CUDA_LIBRARY
#define CUDA_LIBRARY "libcuda.so.1"
#endif

// A function of libcuda, which is loaded by now; NULL where it lacks it.
static void* cuda(const char* name) {
  void* library = dlopen(CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  return library ? dlsym(library, name) : NULL;
}

static void flip(char* at) {
  int (*out)(void*, const void*, size_t) = (int (*)(void*, const void*, size_t))cuda("cuMemcpyDtoH_v2");
  int (*in)(void*, const void*, size_t) = (int (*)(void*, const void*, size_t))cuda("cuMemcpyHtoD_v2");
  char byte;
  if (!out || !in || out(&byte, at, 1)) abort();
  byte ^= 1;
  if (in(at, &byte, 1) || out(&byte, at, 1)) abort(); // the way back waits until the way there has ended
}

static size_t half(size_t n) { return n / 2 & ~4095ul; }

static ssize_t move(const char* name, mover real, void* h, char* p, size_t n, off_t off, off_t at, int write) {
  rule r = fault(name);
  if ((r.err || r.code) && half(n)) real(h, p, half(n), off, at);
  if (r.err) { errno = (int)r.err; return -1; }
  if (r.code) return -r.code;
  if (r.shorter >= 0 && (size_t)r.shorter < n) n = (size_t)r.shorter;
  if (!n) return 0;
  ssize_t done = real(h, p, n, off, at);
  if (!write && r.flip >= 0 && r.flip < done) flip(p + at + r.flip);
  return done;
}
EXPORT ssize_t cuFileRead(void* h, void* p, size_t n, off_t off, off_t at) { REAL(mover, "cuFileRead"); return move("cuFileRead", real, h, p, n, off, at, 0); }
EXPORT ssize_t cuFileWrite(void* h, const void* p, size_t n, off_t off, off_t at) { REAL(mover, "cuFileWrite"); return move("cuFileWrite", real, h, (void*)p, n, off, at, 1); }

#endif
