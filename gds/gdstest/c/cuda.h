// libcuda, but for what shares memory between processes.

EXPORT int cuInit(unsigned flags) {
  const char* env = getenv("KVHOST_DOUBLE");
  if (!initialised && env) kvdouble_rules(env);
  initialised = 1;
  FAULT("cuInit");
  return flags ? INVALID_VALUE : 0;
}
EXPORT int cuDriverGetVersion(int* v) { FAULT("cuDriverGetVersion"); *v = 13000; return 0; }
static int devices = 1;
#define DEVICE(d) do { if ((d) < 0 || (d) >= devices) return 101; } while (0)
EXPORT int cuDeviceGetCount(int* n) {
  rule r = fault("cuDeviceGetCount");
  if (r.code) return (int)r.code;
  if (!initialised) return NOT_INITIALIZED;
  if (r.answer) devices = (int)r.answer;
  *n = devices;
  return 0;
}
EXPORT int cuDeviceGet(int* d, int ordinal) { FAULT("cuDeviceGet"); DEVICE(ordinal); *d = ordinal; return 0; }
EXPORT int cuDeviceGetName(char* s, int n, int d) { FAULT("cuDeviceGetName"); DEVICE(d); snprintf(s, n, "Double of a GPU"); return 0; }
EXPORT int cuDeviceGetUuid_v2(unsigned char* u, int d) { FAULT("cuDeviceGetUuid_v2"); DEVICE(d); for (int i = 0; i < 16; i++) u[i] = i * 17 + d; return 0; }
EXPORT int cuDeviceGetPCIBusId(char* s, int n, int d) { FAULT("cuDeviceGetPCIBusId"); DEVICE(d); snprintf(s, n, "0000:%02X:00.0", 0xAB + d); return 0; }
EXPORT int cuDeviceTotalMem_v2(size_t* n, int d) { FAULT("cuDeviceTotalMem_v2"); DEVICE(d); *n = 1ull << 30; return 0; }
EXPORT int cuDeviceGetAttribute(int* v, int a, int d) {
  FAULT("cuDeviceGetAttribute");
  DEVICE(d);
  *v = a == 16 ? 8 : a == 75 ? 9 : a == 76 ? 0 : 1;
  return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void** c, int d) { FAULT("cuDevicePrimaryCtxRetain"); DEVICE(d); *c = &contexts[d]; return 0; }
EXPORT int cuDevicePrimaryCtxRelease_v2(int d) { FAULT("cuDevicePrimaryCtxRelease_v2"); DEVICE(d); return 0; }
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
  rule r = fault("cuPointerGetAttribute");
  if (r.code) return (int)r.code;
  NEED_CONTEXT;
  if (attribute != 9 || !known(p, 1)) return INVALID_VALUE;
  *(int*)v = r.answer ? (int)r.answer : (int)((char*)current - contexts); // the asking GPU, unless a rule says another
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
  if (!code && n_ranges == 1024) code = NO_MEMORY;
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
  rule r = fault("cuMemcpyAsync");
  if (r.code) return (int)r.code;
  NEED_CONTEXT;
  if (!s || (!known(to, n) && !known(from, n))) return INVALID_VALUE;
  memcpy(to, from, n);
  if (r.flip >= 0 && (size_t)r.flip < n) ((char*)to)[r.flip] ^= 1;
  return 0;
}
EXPORT int cuMemcpyDtoH_v2(void* to, const void* from, size_t n) {
  FAULT("cuMemcpyDtoH_v2");
  NEED_CONTEXT;
  if (!known(from, n)) return INVALID_VALUE;
  memcpy(to, from, n);
  return 0;
}
EXPORT int cuMemcpyHtoD_v2(void* to, const void* from, size_t n) {
  FAULT("cuMemcpyHtoD_v2");
  NEED_CONTEXT;
  if (!known(to, n)) return INVALID_VALUE;
  memcpy(to, from, n);
  return 0;
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
  if (strstr(image, ".entry kvhost_pages(")) *m = &pages_module;
  else if (strstr(image, ".entry kvhost_sums(")) *m = &sums_module;
  else if (strstr(image, ".entry kvhost_encode(")) *m = &codec_module;
  else return 218;
  return 0;
}
EXPORT int cuModuleUnload(void* m) { FAULT("cuModuleUnload"); NEED_CONTEXT; return m == &pages_module || m == &sums_module || m == &codec_module ? 0 : INVALID_HANDLE; }
EXPORT int cuModuleGetFunction(void** f, void* m, const char* name) {
  FAULT("cuModuleGetFunction");
  NEED_CONTEXT;
  if (m == &pages_module && !strcmp(name, "kvhost_pages")) *f = &pages_kernel;
  else if (m == &sums_module && !strcmp(name, "kvhost_sums")) *f = &sums_kernel;
  else if (m == &codec_module && !strcmp(name, "kvhost_encode")) *f = &encode_kernel;
  else if (m == &codec_module && !strcmp(name, "kvhost_pack")) *f = &pack_kernel;
  else if (m == &codec_module && !strcmp(name, "kvhost_decode")) *f = &decode_kernel;
  else if (m == &codec_module && !strcmp(name, "kvhost_join")) *f = &join_kernel;
  else return 500;
  return 0;
}
static int pages(void** params) {
  char* buffer = *(char**)params[0];
  struct { uint64_t page; uint32_t off, len; } *pieces = *(void**)params[1];
  uint32_t n = *(uint32_t*)params[2], scatter = *(uint32_t*)params[3];
  volatile uint32_t* cancel = *(void**)params[4];
  if (!known(pieces, n * 16ul) || !known((void*)cancel, 4) || !known(*(void**)params[5], 4) || !*(uint32_t*)params[6]) return 700;
  if (*(volatile uint32_t*)*(void**)params[5] == *(uint32_t*)params[6]) return 0; // the gate is shut
  uint32_t row = *(uint32_t*)params[7];
  uint32_t stride = *(uint32_t*)params[8]; // as the kernel has it
  for (uint32_t i = 0; i < n && !*cancel; i++) {
    char *page = (char*)pieces[i].page, *flat = buffer + pieces[i].off;
    uint32_t left = pieces[i].len, each = row ? row : left;
    if (!known(flat, left)) return 700;
    for (; left; left -= each, flat += each, page += stride) {
      if (each > left) each = left;
      if (!known(page, each)) return 700;
      memcpy(scatter ? page : flat, scatter ? flat : page, each);
    }
    fault("page");
  }
  return 0;
}
static int sums(void** params) {
  unsigned char* buffer = *(unsigned char**)params[0];
  struct { uint64_t off; uint32_t len, zero; } *extents = *(void**)params[1];
  uint32_t n = *(uint32_t*)params[2];
  unsigned long long* out = *(void**)params[3];
  unsigned long long* expected = *(void**)params[4];
  uint32_t *halted = *(void**)params[5], epoch = *(uint32_t*)params[6];
  if (!known(extents, n * 16ul) || !known(out, n * 8ul)) return 700;
  if (expected && (!known(expected, n * 8ul) || !known(halted, 4) || !epoch)) return 700;
  for (uint32_t i = 0; i < n; i++) {
    unsigned char* at = buffer + extents[i].off;
    if (!known(at, extents[i].len) || extents[i].len > 65536) return 700;
    out[i] = kv_sum(at, extents[i].len);
    if (expected && expected[i] != out[i]) *halted = epoch;
  }
  return 0;
}
EXPORT int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* s, void** params, void** extra) {
  FAULT("cuLaunchKernel");
  NEED_CONTEXT;
  if (!gx || gy != 1 || gz != 1 || by != 1 || bz != 1 || shared || !s || extra) return INVALID_VALUE;
  if (f == &pages_kernel) return bx == 512 ? pages(params) : INVALID_VALUE;
  if (f == &encode_kernel) return bx == 256 ? encode(gx, params) : INVALID_VALUE;
  if (f == &pack_kernel) return bx == 256 ? pack(gx, params) : INVALID_VALUE;
  if (f == &decode_kernel) return bx == 32 ? decode(gx, params) : INVALID_VALUE;
  if (f == &join_kernel) return bx == 256 ? join(gx, params) : INVALID_VALUE;
  if (f != &sums_kernel || bx != 256) return INVALID_VALUE;
  FAULT("sums");
  return sums(params);
}
