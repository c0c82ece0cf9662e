// libcuda's IPC handles and VMM descriptors.

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
