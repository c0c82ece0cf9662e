// XXH3 of 64 bits with seed 0 and the standard secret, as chunk files use it for extents. It is C, so that the checksum
// kernel and the double of the driver that tests run on are one arithmetic. The algorithm is Yann Collet's.
#ifndef KVHOST_XXH3_H
#define KVHOST_XXH3_H

typedef unsigned long long kv_u64;
typedef unsigned int kv_u32;
typedef unsigned char kv_byte;

#ifdef __CUDACC__
#define KV_FN static __device__ __forceinline__
#define KV_TABLE static __constant__
#define KV_HIGH(a, b) __umul64hi(a, b)
#else
#define KV_FN static inline
#define KV_TABLE static const
#define KV_HIGH(a, b) ((kv_u64)(((unsigned __int128)(a) * (b)) >> 64))
#endif

#define KV_PRIME32_1 2654435761ull
#define KV_PRIME32_2 2246822519ull
#define KV_PRIME32_3 3266489917ull
#define KV_PRIME64_1 11400714785074694791ull
#define KV_PRIME64_2 14029467366897019727ull
#define KV_PRIME64_3 1609587929392839161ull
#define KV_PRIME64_4 9650029242287828579ull
#define KV_PRIME64_5 2870177450012600261ull

enum { KV_STRIPE = 64, KV_BLOCK_STRIPES = 16, KV_SHORT = 240, KV_LAST_SECRET = 121, KV_MERGE_SECRET = 11, KV_SCRAMBLE_SECRET = 128 };

KV_TABLE kv_byte kv_secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

KV_FN kv_u64 kv_read(const kv_byte* p, unsigned n) { // n bytes, at any address
  kv_u64 v = 0;
  for (unsigned i = 0; i < n; i++) v |= (kv_u64)p[i] << 8 * i;
  return v;
}
KV_FN kv_u64 kv_key(unsigned at) { return kv_read(kv_secret + at, 8); }
KV_FN kv_u64 kv_fold(kv_u64 a, kv_u64 b) { return a * b ^ KV_HIGH(a, b); }
KV_FN kv_u64 kv_swap(kv_u64 v) {
  kv_u64 r = 0;
  for (int i = 0; i < 8; i++) r = r << 8 | (v >> 8 * i & 255);
  return r;
}
KV_FN kv_u64 kv_avalanche(kv_u64 h) {
  h ^= h >> 37;
  h *= 0x165667919e3779f9ull;
  return h ^ h >> 32;
}
KV_FN kv_u64 kv_mix16(const kv_byte* p, unsigned key) {
  return kv_fold(kv_read(p, 8) ^ kv_key(key), kv_read(p + 8, 8) ^ kv_key(key + 8));
}

// kv_short sums up to KV_SHORT bytes.
KV_FN kv_u64 kv_short(const kv_byte* p, unsigned n) {
  if (n > 128) {
    kv_u64 acc = n * KV_PRIME64_1;
    for (unsigned i = 0; i < 8; i++) acc += kv_mix16(p + 16 * i, 16 * i);
    acc = kv_avalanche(acc);
    for (unsigned i = 8; i < n / 16; i++) acc += kv_mix16(p + 16 * i, 16 * (i - 8) + 3);
    return kv_avalanche(acc + kv_mix16(p + n - 16, 119));
  }
  if (n > 16) {
    kv_u64 acc = n * KV_PRIME64_1;
    for (unsigned i = 0; i <= (n - 1) / 32; i++) acc += kv_mix16(p + 16 * i, 32 * i) + kv_mix16(p + n - 16 * (i + 1), 32 * i + 16);
    return kv_avalanche(acc);
  }
  if (n > 8) {
    kv_u64 lo = kv_read(p, 8) ^ kv_key(24) ^ kv_key(32), hi = kv_read(p + n - 8, 8) ^ kv_key(40) ^ kv_key(48);
    return kv_avalanche(n + kv_swap(lo) + hi + kv_fold(lo, hi));
  }
  if (n > 3) {
    kv_u64 h = (kv_read(p + n - 4, 4) + (kv_read(p, 4) << 32)) ^ kv_key(8) ^ kv_key(16);
    h ^= (h << 49 | h >> 15) ^ (h << 24 | h >> 40);
    h *= 0x9fb21c651e98df25ull;
    h ^= (h >> 35) + n;
    h *= 0x9fb21c651e98df25ull;
    return h ^ h >> 28;
  }
  kv_u64 h = kv_key(56) ^ kv_key(64);
  if (n) h = ((kv_u64)p[0] << 16 | (kv_u64)p[n >> 1] << 24 | p[n - 1] | n << 8) ^ (kv_u64)(kv_u32)(kv_key(0) ^ kv_key(0) >> 32);
  h ^= h >> 33;
  h *= KV_PRIME64_2;
  h ^= h >> 29;
  h *= KV_PRIME64_3;
  return h ^ h >> 32;
}

// The rest is for longer input: eight lanes of 64 bits, which take stripes of eight words. Within a block of 16 stripes the
// lanes only add, so that a block's stripes may be taken in any order and apart.

KV_FN kv_u64 kv_start(unsigned lane) {
  switch (lane) {
    case 0: return KV_PRIME32_3;
    case 1: return KV_PRIME64_1;
    case 2: return KV_PRIME64_2;
    case 3: return KV_PRIME64_3;
    case 4: return KV_PRIME64_4;
    case 5: return KV_PRIME32_2;
    case 6: return KV_PRIME64_5;
    default: return KV_PRIME32_1;
  }
}
// kv_product is what a word adds to its own lane; the word itself is added to the lane beside (lane ^ 1).
KV_FN kv_u64 kv_product(kv_u64 word, kv_u64 key) {
  word ^= key;
  return (kv_u64)(kv_u32)word * (word >> 32);
}
KV_FN kv_u64 kv_scramble(kv_u64 acc, kv_u64 key) { return (acc ^ acc >> 47 ^ key) * KV_PRIME32_1; }
KV_FN kv_u64 kv_merge(const kv_u64* acc, unsigned n) {
  kv_u64 h = n * KV_PRIME64_1;
  for (unsigned i = 0; i < 4; i++)
    h += kv_fold(acc[2 * i] ^ kv_key(KV_MERGE_SECRET + 16 * i), acc[2 * i + 1] ^ kv_key(KV_MERGE_SECRET + 16 * i + 8));
  return kv_avalanche(h);
}

// kv_sum sums in one go, on a processor.
KV_FN kv_u64 kv_sum(const kv_byte* p, unsigned n) {
  if (n <= KV_SHORT) return kv_short(p, n);
  kv_u64 acc[8];
  for (unsigned l = 0; l < 8; l++) acc[l] = kv_start(l);
  unsigned stripes = (n - 1) / KV_STRIPE;
  for (unsigned s = 0; s <= stripes; s++) {
    const kv_byte* stripe = s < stripes ? p + s * KV_STRIPE : p + n - KV_STRIPE;
    unsigned key = s < stripes ? 8 * (s % KV_BLOCK_STRIPES) : KV_LAST_SECRET;
    for (unsigned l = 0; l < 8; l++) {
      kv_u64 word = kv_read(stripe + 8 * l, 8);
      acc[l] += kv_product(word, kv_key(key + 8 * l));
      acc[l ^ 1] += word;
    }
    if (s < stripes && s % KV_BLOCK_STRIPES == KV_BLOCK_STRIPES - 1)
      for (unsigned l = 0; l < 8; l++) acc[l] = kv_scramble(acc[l], kv_key(KV_SCRAMBLE_SECRET + 8 * l));
  }
  return kv_merge(acc, n);
}

#endif
