// libcufile.

typedef struct { int err, cu; } file_error;
typedef struct { int type, pad; union { int fd; void* handle; } h; const void* ops; } file_descr;
typedef struct { int fd; } file_handle;
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
  if (!current) return (file_error){5011, INVALID_CONTEXT};
  int flags = fcntl(d->h.fd, F_GETFL);
  if (d->type != 1 || flags < 0) return (file_error){5022, 0};
  if (flags & O_NONBLOCK) return (file_error){5019, 0}; // as the real one answers
  *h = malloc(sizeof **h);
  (*h)->fd = d->h.fd;
  return fine;
}
EXPORT void cuFileHandleDeregister(file_handle* h) { fault("cuFileHandleDeregister"); h->fd = -1; free(h); }
EXPORT file_error cuFileBufRegister(const void* p, size_t n, int flags) {
  FILE_FAULT("cuFileBufRegister");
  return flags || !known(p, n) ? (file_error){5021, 0} : fine;
}
EXPORT file_error cuFileBufDeregister(const void* p) { FILE_FAULT("cuFileBufDeregister"); (void)p; return fine; }
static ssize_t move(const char* name, int fd, char* p, size_t n, off_t off, off_t at, int write) {
  rule r = fault(name);
  if (r.err) { errno = (int)r.err; return -1; }
  if (r.code) return -r.code;
  if (!current) return -5047;
  if (!known(p + at, n)) return -5021;
  if (r.shorter >= 0 && (size_t)r.shorter < n) n = (size_t)r.shorter;
  size_t done = 0;
  while (done < n) { // O_DIRECT wants an aligned buffer, which the "device" memory is whenever the caller's is
    ssize_t k = write ? pwrite(fd, p + at + done, n - done, off + done) : pread(fd, p + at + done, n - done, off + done);
    if (k < 0) return -1;
    if (k == 0) break;
    done += (size_t)k;
  }
  if (r.flip >= 0 && (size_t)r.flip < done && !write) p[at + r.flip] ^= 1;
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
  memcpy(s + 1032 + 48, &done_reads, 8);  // in all
  memcpy(s + 1032 + 72, &done_reads, 8);  // by POSIX calls
  memcpy(s + 1032 + 152, &done_writes, 8);
  memcpy(s + 1032 + 176, &done_writes, 8);
  return fine;
}
