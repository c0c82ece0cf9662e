// A double of libcuda and libcufile over host memory, for tests without a GPU. "Device" memory is anonymous shared memory,
// so that handles work between processes as the real ones do. The copy kernel is done here in C. It injects faults by
// rules, from the environment (KVHOST_DOUBLE) when it is initialised, or at any time by kvdouble_rules:
//
//   rule[,rule...]    rule = function[:nth=N][:from=N][:code=C][:errno=E][:delay=MS][:short=BYTES][:hang]
//
// nth: only the N-th call; from: the N-th call and all later ones; without either every call. code is what the function
// answers (for cuFile's reads and writes -code is; with errno, -1 and that errno). short moves fewer bytes. hang waits until
// the rules change. kvdouble_calls counts a function's calls. No figure is to be had from this.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { INVALID_VALUE = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, REGISTERED = 712, UNREGISTERED = 713 };

// ------------------------------------------------------------------------------------------------------------ faults

typedef struct { char name[48]; long nth, from, code, err, delay, shorter, hang; } rule;
typedef struct { char name[48]; long calls; } count;
static rule rules[64];
static int n_rules;
static count counts[160];
static int n_counts;
static long generation;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

EXPORT void kvdouble_rules(const char* text) {
  pthread_mutex_lock(&lock);
  n_rules = n_counts = 0;
  generation++;
  char copy[4096], *save1, *save2;
  snprintf(copy, sizeof copy, "%s", text ? text : "");
  for (char* r = strtok_r(copy, ",", &save1); r && n_rules < 64; r = strtok_r(NULL, ",", &save1)) {
    rule* to = &rules[n_rules++];
    memset(to, 0, sizeof *to);
    to->shorter = -1;
    char* part = strtok_r(r, ":", &save2);
    snprintf(to->name, sizeof to->name, "%s", part ? part : "");
    while ((part = strtok_r(NULL, ":", &save2))) {
      char* value = strchr(part, '=');
      long v = value ? atol(value + 1) : 1;
      if (!strncmp(part, "nth", 3)) to->nth = v;
      else if (!strncmp(part, "from", 4)) to->from = v;
      else if (!strncmp(part, "code", 4)) to->code = v;
      else if (!strncmp(part, "errno", 5)) to->err = v;
      else if (!strncmp(part, "delay", 5)) to->delay = v;
      else if (!strncmp(part, "short", 5)) to->shorter = v;
      else if (!strncmp(part, "hang", 4)) to->hang = 1;
    }
  }
  pthread_mutex_unlock(&lock);
}

static count* counted(const char* name) {
  for (int i = 0; i < n_counts; i++)
    if (!strcmp(counts[i].name, name)) return &counts[i];
  if (n_counts == 160) abort();
  count* c = &counts[n_counts++];
  snprintf(c->name, sizeof c->name, "%s", name);
  c->calls = 0;
  return c;
}

EXPORT long kvdouble_calls(const char* name) {
  pthread_mutex_lock(&lock);
  long n = counted(name)->calls;
  pthread_mutex_unlock(&lock);
  return n;
}

// fault counts a call, waits if it is to, and gives the rule that it falls under.
static rule fault(const char* name) {
  rule hit = {.shorter = -1};
  pthread_mutex_lock(&lock);
  long call = ++counted(name)->calls, now = generation;
  for (int i = 0; i < n_rules; i++) {
    rule* r = &rules[i];
    if (strcmp(r->name, name) || (r->nth && r->nth != call) || (r->from && call < r->from)) continue;
    hit = *r;
    break;
  }
  pthread_mutex_unlock(&lock);
  struct timespec nap = {hit.delay / 1000, hit.delay % 1000 * 1000000};
  if (hit.delay) nanosleep(&nap, NULL);
  while (hit.hang) {
    struct timespec ms = {0, 1000000};
    nanosleep(&ms, NULL);
    pthread_mutex_lock(&lock);
    hit.hang = generation == now;
    pthread_mutex_unlock(&lock);
  }
  return hit;
}
#define FAULT(name) do { rule r_ = fault(name); if (r_.code) return (int)r_.code; } while (0)

// ------------------------------------------------------------------------------------------------------------ memory

typedef struct { char* at; size_t size; int fd, users; } area;         // device memory
typedef struct { char* at; size_t size; } range;                       // registered host memory
typedef struct { uint64_t magic; size_t size; int fd, users; } share;  // a VMM handle
typedef struct { uint64_t magic; pid_t pid; int fd; uint64_t size, start; char rest[32]; } ipc;
_Static_assert(sizeof(ipc) == 64, "an IPC handle has 64 bytes");
#define MAGIC 0x656c62756f64766bull
static area areas[4096];
static int n_areas;
static range ranges[64];
static int n_ranges;
static __thread void* current;
static char context, module_, kernel;
static int initialised;

static int share_memory(size_t size) {
  int fd = memfd_create("kvdouble", MFD_CLOEXEC);
  if (fd >= 0 && ftruncate(fd, (off_t)size)) { close(fd); fd = -1; }
  return fd;
}

static area* area_of(const void* p) {
  for (int i = 0; i < n_areas; i++)
    if (areas[i].at && (char*)p >= areas[i].at && (char*)p < areas[i].at + areas[i].size) return &areas[i];
  return NULL;
}

static void add_area(void* at, size_t size, int fd) {
  int i = 0;
  while (i < n_areas && areas[i].at) i++;
  if (i == 4096) abort();
  if (i == n_areas) n_areas++;
  areas[i] = (area){at, size, fd, 1};
}

static int known(const void* p, size_t n) { // to the device: its memory, or registered memory
  int ok = 0;
  pthread_mutex_lock(&lock);
  area* a = area_of(p);
  if (a && (char*)p + n <= a->at + a->size) ok = 1;
  for (int i = 0; i < n_ranges && !ok; i++)
    ok = (char*)p >= ranges[i].at && (char*)p + n <= ranges[i].at + ranges[i].size;
  pthread_mutex_unlock(&lock);
  return ok;
}

#define NEED_CONTEXT do { if (!current) return INVALID_CONTEXT; } while (0)

// kvdouble_forget drops what a lost context has left registered.
EXPORT void kvdouble_forget(void) {
  pthread_mutex_lock(&lock);
  n_ranges = 0;
  pthread_mutex_unlock(&lock);
}

// ----------------------------------------------------------------------------------------------------------- libcuda

EXPORT int cuInit(unsigned flags) {
  const char* env = getenv("KVHOST_DOUBLE");
  if (!initialised && env) kvdouble_rules(env);
  initialised = 1;
  FAULT("cuInit");
  return flags ? INVALID_VALUE : 0;
}
EXPORT int cuDriverGetVersion(int* v) { FAULT("cuDriverGetVersion"); *v = 13000; return 0; }
EXPORT int cuDeviceGetCount(int* n) { FAULT("cuDeviceGetCount"); if (!initialised) return NOT_INITIALIZED; *n = 1; return 0; }
EXPORT int cuDeviceGet(int* d, int ordinal) { FAULT("cuDeviceGet"); *d = ordinal; return ordinal ? 101 : 0; }
EXPORT int cuDeviceGetName(char* s, int n, int d) { FAULT("cuDeviceGetName"); snprintf(s, n, "Double of a GPU"); return d; }
EXPORT int cuDeviceGetUuid_v2(unsigned char* u, int d) { FAULT("cuDeviceGetUuid_v2"); for (int i = 0; i < 16; i++) u[i] = i * 17; return d; }
EXPORT int cuDeviceGetPCIBusId(char* s, int n, int d) { FAULT("cuDeviceGetPCIBusId"); snprintf(s, n, "0000:AB:00.0"); return d; }
EXPORT int cuDeviceTotalMem_v2(size_t* n, int d) { FAULT("cuDeviceTotalMem_v2"); *n = 1ull << 30; return d; }
EXPORT int cuDeviceGetAttribute(int* v, int a, int d) {
  FAULT("cuDeviceGetAttribute");
  *v = a == 16 ? 8 : a == 75 ? 9 : a == 76 ? 0 : 1;
  return d;
}
EXPORT int cuDevicePrimaryCtxRetain(void** c, int d) { FAULT("cuDevicePrimaryCtxRetain"); *c = &context; return d; }
EXPORT int cuDevicePrimaryCtxRelease_v2(int d) { FAULT("cuDevicePrimaryCtxRelease_v2"); return d; }
EXPORT int cuCtxSetCurrent(void* c) { FAULT("cuCtxSetCurrent"); current = c; return 0; }
EXPORT int cuStreamCreate(void** s, unsigned f) { FAULT("cuStreamCreate"); NEED_CONTEXT; (void)f; *s = malloc(1); return 0; }
EXPORT int cuStreamDestroy_v2(void* s) { FAULT("cuStreamDestroy_v2"); NEED_CONTEXT; free(s); return 0; }
EXPORT int cuStreamSynchronize(void* s) { FAULT("cuStreamSynchronize"); NEED_CONTEXT; (void)s; return 0; }
EXPORT int cuEventCreate(void** e, unsigned f) { FAULT("cuEventCreate"); NEED_CONTEXT; (void)f; *e = malloc(1); return 0; }
EXPORT int cuEventDestroy_v2(void* e) { FAULT("cuEventDestroy_v2"); NEED_CONTEXT; free(e); return 0; }
EXPORT int cuEventRecord(void* e, void* s) { FAULT("cuEventRecord"); NEED_CONTEXT; return e && s ? 0 : INVALID_HANDLE; }
EXPORT int cuEventSynchronize(void* e) { FAULT("cuEventSynchronize"); NEED_CONTEXT; return e ? 0 : INVALID_HANDLE; }

EXPORT int cuMemAlloc_v2(void** p, size_t n) {
  FAULT("cuMemAlloc_v2");
  NEED_CONTEXT;
  int fd = n ? share_memory(n) : -1;
  if (fd < 0) return n ? NO_MEMORY : INVALID_VALUE;
  void* at = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) { close(fd); return NO_MEMORY; }
  pthread_mutex_lock(&lock);
  add_area(at, n, fd);
  pthread_mutex_unlock(&lock);
  *p = at;
  return 0;
}
static int drop(void* p) {
  int code = INVALID_VALUE;
  pthread_mutex_lock(&lock);
  area* a = area_of(p);
  if (a && a->at == p) {
    munmap(a->at, a->size);
    if (a->fd >= 0) close(a->fd);
    a->at = NULL;
    code = 0;
  }
  pthread_mutex_unlock(&lock);
  return code;
}
EXPORT int cuMemFree_v2(void* p) { FAULT("cuMemFree_v2"); NEED_CONTEXT; return drop(p); }
EXPORT int cuMemGetAddressRange_v2(void** base, size_t* size, void* p) {
  FAULT("cuMemGetAddressRange_v2");
  NEED_CONTEXT;
  pthread_mutex_lock(&lock);
  area* a = area_of(p);
  if (a) { if (base) *base = a->at; if (size) *size = a->size; }
  pthread_mutex_unlock(&lock);
  return a ? 0 : INVALID_VALUE;
}
EXPORT int cuPointerGetAttribute(void* v, int attribute, void* p) {
  FAULT("cuPointerGetAttribute");
  NEED_CONTEXT;
  if (attribute != 9 || !known(p, 1)) return INVALID_VALUE;
  *(int*)v = 0;
  return 0;
}
EXPORT int cuMemHostRegister_v2(void* p, size_t n, unsigned f) {
  FAULT("cuMemHostRegister_v2");
  NEED_CONTEXT;
  if ((f & 3) != 3) return INVALID_VALUE;
  int code = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < n_ranges; i++)
    if ((char*)p < ranges[i].at + ranges[i].size && ranges[i].at < (char*)p + n) code = REGISTERED;
  if (!code && n_ranges == 64) code = NO_MEMORY;
  if (!code) ranges[n_ranges++] = (range){p, n};
  pthread_mutex_unlock(&lock);
  return code;
}
EXPORT int cuMemHostUnregister(void* p) {
  FAULT("cuMemHostUnregister");
  NEED_CONTEXT;
  int code = UNREGISTERED;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < n_ranges; i++)
    if (ranges[i].at == p) { ranges[i] = ranges[--n_ranges]; code = 0; break; }
  pthread_mutex_unlock(&lock);
  return code;
}
EXPORT int cuMemHostGetDevicePointer_v2(void** d, void* p, unsigned f) {
  FAULT("cuMemHostGetDevicePointer_v2");
  NEED_CONTEXT;
  if (f || !known(p, 1)) return INVALID_VALUE;
  *d = p;
  return 0;
}
EXPORT int cuMemcpyAsync(void* to, const void* from, size_t n, void* s) {
  FAULT("cuMemcpyAsync");
  NEED_CONTEXT;
  if (!s || (!known(to, n) && !known(from, n))) return INVALID_VALUE;
  memcpy(to, from, n);
  return 0;
}
static int batch(void** to, void** from, size_t* n, size_t count, const unsigned* attributes, const size_t* index, size_t n_attributes, void* s) {
  if (!s || attributes[0] < 1 || attributes[0] > 3 || index[0] || n_attributes != 1) return INVALID_VALUE;
  for (size_t i = 0; i < count; i++) {
    if (!known(to[i], n[i]) || !known(from[i], n[i])) return INVALID_VALUE;
    memcpy(to[i], from[i], n[i]);
  }
  return 0;
}
EXPORT int cuMemcpyBatchAsync_v2(void** to, void** from, size_t* n, size_t count, const unsigned* a, const size_t* i, size_t na, void* s) {
  FAULT("cuMemcpyBatchAsync_v2");
  NEED_CONTEXT;
  return batch(to, from, n, count, a, i, na, s);
}
EXPORT int cuMemcpyBatchAsync(void** to, void** from, size_t* n, size_t count, const unsigned* a, const size_t* i, size_t na, size_t* failed, void* s) {
  FAULT("cuMemcpyBatchAsync");
  NEED_CONTEXT;
  *failed = 0;
  return batch(to, from, n, count, a, i, na, s);
}
EXPORT int cuMemsetD8Async(void* p, unsigned char v, size_t n, void* s) {
  FAULT("cuMemsetD8Async");
  NEED_CONTEXT;
  if (!s || !known(p, n)) return INVALID_VALUE;
  memset(p, v, n);
  return 0;
}
EXPORT int cuModuleLoadData(void** m, const void* image) {
  FAULT("cuModuleLoadData");
  NEED_CONTEXT;
  if (!strstr(image, ".entry kvhost_pages(")) return 218;
  *m = &module_;
  return 0;
}
EXPORT int cuModuleUnload(void* m) { FAULT("cuModuleUnload"); NEED_CONTEXT; return m == &module_ ? 0 : INVALID_HANDLE; }
EXPORT int cuModuleGetFunction(void** f, void* m, const char* name) {
  FAULT("cuModuleGetFunction");
  NEED_CONTEXT;
  if (m != &module_ || strcmp(name, "kvhost_pages")) return 500;
  *f = &kernel;
  return 0;
}
EXPORT int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* s, void** params, void** extra) {
  FAULT("cuLaunchKernel");
  NEED_CONTEXT;
  if (f != &kernel || !gx || gy != 1 || gz != 1 || bx != 512 || by != 1 || bz != 1 || shared || !s || extra) return INVALID_VALUE;
  char* buffer = *(char**)params[0];
  struct { uint64_t page; uint32_t off, len; } *pieces = *(void**)params[1];
  uint32_t n = *(uint32_t*)params[2], scatter = *(uint32_t*)params[3];
  volatile uint32_t* cancel = *(void**)params[4];
  if (!known(pieces, n * 16ul) || !known((void*)cancel, 4) || !known(*(void**)params[5], 4) || !*(uint32_t*)params[6]) return 700;
  for (uint32_t i = 0; i < n && !*cancel; i++) {
    char *page = (char*)pieces[i].page, *flat = buffer + pieces[i].off;
    if (!known(page, pieces[i].len) || !known(flat, pieces[i].len)) return 700;
    memcpy(scatter ? page : flat, scatter ? flat : page, pieces[i].len);
    fault("page");
  }
  return 0;
}

// ----------------------------------------------------------------------------------------------------------- sharing

EXPORT int cuIpcGetMemHandle(ipc* h, void* p) {
  FAULT("cuIpcGetMemHandle");
  NEED_CONTEXT;
  pthread_mutex_lock(&lock);
  area* a = area_of(p);
  if (a && a->fd >= 0) *h = (ipc){MAGIC, getpid(), a->fd, a->size, (uint64_t)a->at, {0}};
  pthread_mutex_unlock(&lock);
  return a && a->fd >= 0 ? 0 : INVALID_VALUE;
}
EXPORT int cuIpcOpenMemHandle_v2(void** p, ipc h, unsigned flags) {
  FAULT("cuIpcOpenMemHandle_v2");
  NEED_CONTEXT;
  if (flags != 1 || h.magic != MAGIC) return INVALID_VALUE;
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return INVALID_HANDLE;
  void* at = mmap(NULL, h.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) { close(fd); return INVALID_HANDLE; }
  pthread_mutex_lock(&lock);
  add_area(at, h.size, fd);
  pthread_mutex_unlock(&lock);
  *p = at;
  return 0;
}
EXPORT int cuIpcCloseMemHandle(void* p) { FAULT("cuIpcCloseMemHandle"); NEED_CONTEXT; return drop(p); }

EXPORT int cuMemGetAllocationGranularity(size_t* n, const void* prop, int option) {
  FAULT("cuMemGetAllocationGranularity");
  (void)prop, (void)option;
  *n = 2 << 20;
  return 0;
}
EXPORT int cuMemCreate(share** h, size_t n, const void* prop, uint64_t flags) {
  FAULT("cuMemCreate");
  NEED_CONTEXT;
  (void)prop;
  if (flags || !n || n % (2 << 20)) return INVALID_VALUE;
  int fd = share_memory(n);
  if (fd < 0) return NO_MEMORY;
  *h = malloc(sizeof **h);
  **h = (share){MAGIC, n, fd, 1};
  return 0;
}
EXPORT int cuMemExportToShareableHandle(int* fd, share* h, int type, uint64_t flags) {
  FAULT("cuMemExportToShareableHandle");
  if (type != 1 || flags || h->magic != MAGIC) return INVALID_VALUE;
  *fd = fcntl(h->fd, F_DUPFD_CLOEXEC, 3);
  return *fd < 0 ? 304 : 0;
}
EXPORT int cuMemImportFromShareableHandle(share** h, void* descriptor, int type) {
  FAULT("cuMemImportFromShareableHandle");
  NEED_CONTEXT;
  char path[64], target[64] = "";
  int fd = (int)(intptr_t)descriptor;
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  if (type != 1 || readlink(path, target, sizeof target - 1) < 0 || !strstr(target, "kvdouble")) return INVALID_HANDLE;
  struct stat st;
  if (fstat(fd, &st)) return INVALID_HANDLE;
  *h = malloc(sizeof **h);
  **h = (share){MAGIC, (size_t)st.st_size, fcntl(fd, F_DUPFD_CLOEXEC, 3), 1};
  return 0;
}
EXPORT int cuMemRelease(share* h) {
  FAULT("cuMemRelease");
  if (h->magic != MAGIC) return INVALID_VALUE;
  close(h->fd);
  h->magic = 0;
  free(h);
  return 0;
}
EXPORT int cuMemAddressReserve(void** p, size_t n, size_t align, void* hint, uint64_t flags) {
  FAULT("cuMemAddressReserve");
  NEED_CONTEXT;
  if (align || hint || flags || n % (2 << 20)) return INVALID_VALUE;
  *p = mmap(NULL, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *p == MAP_FAILED ? NO_MEMORY : 0;
}
EXPORT int cuMemAddressFree(void* p, size_t n) { FAULT("cuMemAddressFree"); return munmap(p, n) ? INVALID_VALUE : 0; }
EXPORT int cuMemMap(void* p, size_t n, size_t off, share* h, uint64_t flags) {
  FAULT("cuMemMap");
  if (off || flags || h->magic != MAGIC || n != h->size) return INVALID_VALUE;
  return mmap(p, n, PROT_NONE, MAP_SHARED | MAP_FIXED, h->fd, 0) == MAP_FAILED ? INVALID_VALUE : 0;
}
EXPORT int cuMemSetAccess(void* p, size_t n, const int* access, size_t count) {
  FAULT("cuMemSetAccess");
  if (access[0] != 1 || access[1] || access[2] != 3 || count != 1 || mprotect(p, n, PROT_READ | PROT_WRITE)) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  add_area(p, n, -1);
  pthread_mutex_unlock(&lock);
  return 0;
}
EXPORT int cuMemUnmap(void* p, size_t n) {
  FAULT("cuMemUnmap");
  pthread_mutex_lock(&lock);
  area* a = area_of(p);
  if (a && a->at == p) a->at = NULL;
  pthread_mutex_unlock(&lock);
  return mmap(p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED ? INVALID_VALUE : 0;
}

// ---------------------------------------------------------------------------------------------------------- libcufile

typedef struct { int err, cu; } file_error;
typedef struct { int type, pad; union { int fd; void* handle; } h; const void* ops; } file_descr;
typedef struct { int fd; } file_handle;
static int opened;
static uint64_t done_reads, done_writes;
#define FILE_FAULT(name) do { rule r_ = fault(name); if (r_.code) return (file_error){(int)r_.code, (int)r_.err}; } while (0)
static const file_error fine = {0, 801}; // some systems answer a CUDA code beside success: it means nothing

EXPORT file_error cuFileDriverOpen(void) { FILE_FAULT("cuFileDriverOpen"); opened++; return fine; }
EXPORT file_error cuFileDriverClose_v2(void) { FILE_FAULT("cuFileDriverClose_v2"); opened--; return fine; }
EXPORT long cuFileUseCount(void) { return opened; }
EXPORT file_error cuFileGetVersion(int* v) { FILE_FAULT("cuFileGetVersion"); *v = 1150; return fine; }
EXPORT file_error cuFileDriverGetProperties(unsigned char* p) {
  FILE_FAULT("cuFileDriverGetProperties");
  memset(p, 0, 56);
  unsigned control = 1 << 1, device_cache = 131072, per_buffer = 1024, pinned = 33554432, batch_ = 128, timeout = 5;
  uint64_t direct = 16384;
  memcpy(p + 16, &direct, 8); memcpy(p + 28, &control, 4); memcpy(p + 36, &device_cache, 4); memcpy(p + 40, &per_buffer, 4);
  memcpy(p + 44, &pinned, 4); memcpy(p + 48, &batch_, 4); memcpy(p + 52, &timeout, 4);
  return fine;
}
EXPORT file_error cuFileHandleRegister(file_handle** h, file_descr* d) {
  FILE_FAULT("cuFileHandleRegister");
  if (!opened) return (file_error){5001, 0};
  if (d->type != 1 || fcntl(d->h.fd, F_GETFL) < 0) return (file_error){5022, 0};
  *h = malloc(sizeof **h);
  (*h)->fd = d->h.fd;
  return fine;
}
EXPORT void cuFileHandleDeregister(file_handle* h) { fault("cuFileHandleDeregister"); free(h); }
EXPORT file_error cuFileBufRegister(const void* p, size_t n, int flags) {
  FILE_FAULT("cuFileBufRegister");
  return flags || !known(p, n) ? (file_error){5021, 0} : fine;
}
EXPORT file_error cuFileBufDeregister(const void* p) { FILE_FAULT("cuFileBufDeregister"); (void)p; return fine; }
static ssize_t move(const char* name, int fd, char* p, size_t n, off_t off, off_t at, int write) {
  rule r = fault(name);
  if (r.err) { errno = (int)r.err; return -1; }
  if (r.code) return -r.code;
  if (!known(p + at, n)) return -5021;
  if (r.shorter >= 0 && (size_t)r.shorter < n) n = (size_t)r.shorter;
  size_t done = 0;
  while (done < n) { // O_DIRECT wants an aligned buffer, which the "device" memory is whenever the caller's is
    ssize_t k = write ? pwrite(fd, p + at + done, n - done, off + done) : pread(fd, p + at + done, n - done, off + done);
    if (k < 0) return -1;
    if (k == 0) break;
    done += (size_t)k;
  }
  __atomic_add_fetch(write ? &done_writes : &done_reads, 1, __ATOMIC_RELAXED);
  return (ssize_t)done;
}
EXPORT ssize_t cuFileRead(file_handle* h, void* p, size_t n, off_t off, off_t at) { return move("cuFileRead", h->fd, p, n, off, at, 0); }
EXPORT ssize_t cuFileWrite(file_handle* h, const void* p, size_t n, off_t off, off_t at) { return move("cuFileWrite", h->fd, (void*)p, n, off, at, 1); }
EXPORT file_error cuFileSetParameterSizeT(int k, size_t v) { FILE_FAULT("cuFileSetParameterSizeT"); (void)k, (void)v; return opened ? (file_error){5026, 0} : fine; }
EXPORT file_error cuFileSetParameterBool(int k, uint8_t v) { FILE_FAULT("cuFileSetParameterBool"); (void)k, (void)v; return opened ? (file_error){5026, 0} : fine; }
EXPORT file_error cuFileSetParameterString(int k, const char* v) { FILE_FAULT("cuFileSetParameterString"); (void)k, (void)v; return opened ? (file_error){5026, 0} : fine; }
EXPORT file_error cuFileSetStatsLevel(int n) { FILE_FAULT("cuFileSetStatsLevel"); return n < 0 || n > 3 ? (file_error){5022, 0} : fine; }
EXPORT file_error cuFileStatsStart(void) { FILE_FAULT("cuFileStatsStart"); return fine; }
EXPORT file_error cuFileStatsStop(void) { FILE_FAULT("cuFileStatsStop"); return fine; }
EXPORT file_error cuFileStatsReset(void) { FILE_FAULT("cuFileStatsReset"); done_reads = done_writes = 0; return fine; }
EXPORT file_error cuFileGetStatsL3(unsigned char* s) { // as the compatibility mode counts
  FILE_FAULT("cuFileGetStatsL3");
  memset(s, 0, 5000);
  unsigned one = 1;
  memcpy(s + 1024, &one, 4);
  memcpy(s + 1032 + 40 + 4 * 8, &done_reads, 8);
  memcpy(s + 1032 + 40 + 7 * 8, &done_reads, 8);
  memcpy(s + 1032 + 40 + 17 * 8, &done_writes, 8);
  memcpy(s + 1032 + 40 + 20 * 8, &done_writes, 8);
  return fine;
}
