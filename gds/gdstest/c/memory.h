// Memory: what the device may touch.

typedef struct { char* at; size_t size; int fd, users; } area;         // device memory
typedef struct { char* at; size_t size; } range;                       // registered host memory
typedef struct { uint64_t magic; pid_t pid; int fd; uint64_t size, start; char rest[32]; } ipc;
_Static_assert(sizeof(ipc) == 64, "an IPC handle has 64 bytes");
#define MAGIC 0x656c62756f64766bull
static area areas[4096];
static int n_areas;
static range ranges[1024];
static int n_ranges;
static __thread void* current;
static char contexts[16], pages_module, sums_module, codec_module;
static char pages_kernel, sums_kernel, encode_kernel, pack_kernel, decode_kernel, join_kernel;
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

static int opened; // how often cuFile's driver is open

// kvdouble_forget drops what a lost context has left registered and open.
EXPORT void kvdouble_forget(void) {
  pthread_mutex_lock(&lock);
  n_ranges = opened = 0;
  pthread_mutex_unlock(&lock);
}
