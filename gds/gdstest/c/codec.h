// The codec's kernels. Two of them do all the work: what the GPU has in between is not needed here.

typedef struct { uint64_t off; uint32_t len, codec; } row;

#define ARG(type, i) (*(type*)params[i])

static int encode(unsigned blocks, void** params) {
  FAULT("encode");
  row* pages = ARG(row*, 3);
  uint32_t n = ARG(uint32_t, 4), element = ARG(uint32_t, 5);
  if (blocks != n * element || (element != 1 && element != 2) || !known(pages, n * sizeof(row)) || !known(ARG(void*, 2), n * 2 * sizeof(row))) return 700;
  for (uint32_t i = 0; i < n; i++) {
    size_t planes = (2 * pages[i].off + 2 * pages[i].len + 64) & ~7ul;
    if (pages[i].len > 65536 || !known(ARG(char*, 0) + pages[i].off, pages[i].len) || !known(ARG(char*, 1), planes)) return 700;
  }
  return 0;
}

static int pack(unsigned blocks, void** params) {
  rule r = fault("pack");
  if (r.code) return (int)r.code;
  unsigned char *window = ARG(void*, 0), *coded = ARG(void*, 6);
  row *pages = ARG(row*, 3), *stored = ARG(row*, 7);
  uint32_t n = ARG(uint32_t, 4), element = ARG(uint32_t, 5);
  if (blocks != n || !known(pages, n * sizeof(row)) || !known(stored, n * sizeof(row))) return 700;
  unsigned char* out = malloc(2 * 65536 + 2 * KV_TABLE);
  uint64_t at = 0;
  int code = 0;
  for (uint32_t i = 0; i < n && !code; i++) {
    unsigned codec;
    unsigned len = kv_encode_extent(window + pages[i].off, pages[i].len, element, out, &codec);
    if (!known(coded + at, len)) { code = 700; break; }
    memcpy(coded + at, out, len);
    stored[i] = (row){at, len, codec};
    at += len;
  }
  free(out);
  if (!code && r.flip >= 0 && r.flip < stored[0].len) coded[r.flip] ^= 1;
  return code;
}

// decode only judges; join writes what is right.
static int decode(unsigned blocks, void** params) {
  FAULT("decode");
  unsigned char* coded = ARG(void*, 0);
  row *pages = ARG(row*, 2), *stored = ARG(row*, 3);
  uint32_t n = ARG(uint32_t, 4), *halted = ARG(uint32_t*, 5), epoch = ARG(uint32_t, 6);
  if (blocks != 2 * n || !known(pages, n * sizeof(row)) || !known(stored, n * sizeof(row)) || !known(halted, 4) || !epoch) return 700;
  if (*halted == epoch) return 0;
  static __thread unsigned char page[65536];
  for (uint32_t i = 0; i < n; i++) {
    if (pages[i].len > 65536 || !known(coded + stored[i].off, stored[i].len)) return 700;
    if (!kv_decode_extent(coded + stored[i].off, stored[i].len, stored[i].codec, page, pages[i].len)) pages[i].codec = 1, *halted = epoch;
  }
  return 0;
}

static int join(unsigned blocks, void** params) {
  rule r = fault("join");
  if (r.code) return (int)r.code;
  unsigned char *coded = ARG(void*, 0), *window = ARG(void*, 2);
  row *pages = ARG(row*, 3), *stored = ARG(row*, 4);
  uint32_t n = ARG(uint32_t, 5), *halted = ARG(uint32_t*, 6), epoch = ARG(uint32_t, 7);
  if (blocks != n || !known(pages, n * sizeof(row)) || !known(stored, n * sizeof(row)) || !known(halted, 4) || !epoch) return 700;
  if (*halted == epoch) return 0;
  for (uint32_t i = 0; i < n; i++) {
    if (!known(window + pages[i].off, pages[i].len)) return 700;
    kv_decode_extent(coded + stored[i].off, stored[i].len, stored[i].codec, window + pages[i].off, pages[i].len);
  }
  if (r.flip >= 0 && r.flip < pages[0].len) window[pages[0].off + r.flip] ^= 1;
  return 0;
}
