// libcuda's IPC handles.

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
