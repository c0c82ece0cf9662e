// The codec of extents, as host/internal/codec has it: byte planes, each coded by zstd's Huffman codes in four streams (RFC 8878,
// section 4.2). It is C, so that the kernels (codec.cu) and the double of the driver that tests run on have one arithmetic
// for what is serial: the lengths of the codes, and the table of them that stands before the streams. What is done by many
// threads at a time in a kernel, one does here for the double.
#ifndef KVHOST_HUFFMAN_H
#define KVHOST_HUFFMAN_H

typedef unsigned long long kv_u64;
typedef unsigned int kv_u32;
typedef unsigned short kv_u16;
typedef unsigned char kv_byte;

#ifndef KV_FN
#ifdef __CUDACC__
#define KV_FN static __device__ __forceinline__
#else
#define KV_FN static inline
#endif
#endif

enum { KV_RAW, KV_HUFFMAN, KV_PLANES };                            // codecs, as files number them
enum { KV_PLANE_RAW, KV_PLANE_HUFFMAN, KV_PLANE_REPEATED };        // how a plane is stored
enum { KV_BITS = 11, KV_CODES = 1 << KV_BITS };                    // of the longest code
enum { KV_STATE_BITS = 6, KV_STATES = 1 << KV_STATE_BITS };        // of the code of the table's weights
enum { KV_WEIGHTS = 16, KV_TABLE = 160 };                           // room for what counts weights, and for a table
enum { KV_LEAST = 64, KV_JUMP = 6, KV_RARE = 0xffff };             // the shortest plane; bytes of the sizes of streams; below one state

KV_FN unsigned kv_top(kv_u32 v) { // the number of the highest bit that is set
#ifdef __CUDACC__
  return 31 - __clz(v);
#else
  return 31 - __builtin_clz(v);
#endif
}

// kv_work is the memory of the functions below, which is shared memory in a kernel.
typedef struct {
  kv_u32 sum[256];    // of the nodes that join two others
  kv_u16 parent[512]; // of leaves in order, then of those nodes; in the end each one's depth
  kv_u16 order[256];  // the symbols that occur, the rarest first
  kv_byte weight[256];
  kv_byte state[KV_STATES];
  kv_u16 next[KV_STATES];
  kv_u16 norm[KV_WEIGHTS], at[KV_WEIGHTS];
} kv_work;

// kv_lengths writes the code length of each of the n symbols in w->order, which are two at least, to length. It returns the longest. The
// tree is Huffman's, with two queues; codes that are longer than KV_BITS are cut, and the sum of all is mended.
KV_FN unsigned kv_lengths(const kv_u32* count, unsigned n, kv_work* w, kv_byte* length) {
  unsigned leaf = 0, node = 0;
  for (unsigned k = 0; k + 1 < n; k++) {
    kv_u32 sum = 0;
    for (unsigned side = 0; side < 2; side++) {
      const kv_u32 of_leaf = leaf < n ? count[w->order[leaf]] : 0xffffffff;
      if (node >= k || of_leaf <= w->sum[node]) {
        sum += of_leaf;
        w->parent[leaf++] = (kv_u16)(n + k);
      } else {
        sum += w->sum[node];
        w->parent[n + node++] = (kv_u16)(n + k);
      }
    }
    w->sum[k] = sum;
  }
  w->parent[2 * n - 2] = 0;
  for (unsigned k = 2 * n - 2; k-- > 0;) w->parent[k] = w->parent[w->parent[k]] + 1;
  unsigned used = 0; // of KV_CODES: how much of it the codes take
  for (unsigned k = 0; k < n; k++) {
    const unsigned depth = w->parent[k] < KV_BITS ? w->parent[k] : KV_BITS;
    length[w->order[k]] = (kv_byte)depth;
    used += KV_CODES >> depth;
  }
  for (unsigned k = 0; used > KV_CODES;) { // the rarest of those that may be longer
    kv_byte* of = &length[w->order[k]];
    if (*of == KV_BITS) {
      k++;
      continue;
    }
    ++*of;
    used -= KV_CODES >> *of;
  }
  while (used < KV_CODES)
    for (unsigned k = n; k-- > 0;) { // the most frequent of those that may be shorter
      kv_byte* of = &length[w->order[k]];
      if (*of > 1 && (unsigned)(KV_CODES >> *of) <= KV_CODES - used) {
        used += KV_CODES >> *of;
        --*of;
      }
    }
  unsigned longest = 0;
  for (unsigned k = 0; k < n; k++)
    if (length[w->order[k]] > longest) longest = length[w->order[k]];
  return longest;
}

// kv_spread divides the states among the weights, as both sides do (RFC 8878, section 4.1.1). A weight that is rarer than one
// state, KV_RARE, has one of the last.
KV_FN void kv_spread(unsigned weights, unsigned bits, kv_work* w) {
  const unsigned states = 1u << bits, step = (states >> 1) + (states >> 3) + 3;
  unsigned end = states;
  for (unsigned s = 0; s < weights; s++)
    if (w->norm[s] == KV_RARE) w->state[--end] = (kv_byte)s;
  for (unsigned s = 0, at = 0; s < weights; s++)
    for (unsigned i = 0; i < w->norm[s] && w->norm[s] != KV_RARE; i++) {
      w->state[at] = (kv_byte)s;
      do at = (at + step) & (states - 1);
      while (at >= end);
    }
}

typedef struct { // writes bits, the lowest first
  kv_byte* to;
  unsigned bytes, fill;
  kv_u64 bits;
} kv_writer;

KV_FN void kv_put(kv_writer* b, kv_u32 value, unsigned n) {
  b->bits |= (kv_u64)(value & ((1u << n) - 1)) << b->fill;
  for (b->fill += n; b->fill >= 8; b->fill -= 8, b->bits >>= 8) b->to[b->bytes++] = (kv_byte)b->bits;
}

KV_FN void kv_flush(kv_writer* b) {
  if (b->fill) b->to[b->bytes++] = (kv_byte)b->bits;
  b->fill = 0, b->bits = 0;
}

// kv_put_plain writes n weights of four bits each.
KV_FN unsigned kv_put_plain(unsigned n, const kv_work* w, kv_byte* to) {
  if (n > 128) return 0;
  to[0] = (kv_byte)(127 + n);
  for (unsigned i = 0; i < n; i += 2) to[1 + i / 2] = (kv_byte)(w->weight[i] << 4 | (i + 1 < n ? w->weight[i + 1] : 0));
  return 1 + (n + 1) / 2;
}

// kv_put_weights writes n weights as one more than n bytes say, and returns how many bytes that took, or 0 if it cannot be.
KV_FN unsigned kv_put_weights(unsigned n, kv_work* w, kv_byte* to) {
  unsigned largest = 0, kinds = 0, all = 0, weights = 0;
  for (unsigned s = 0; s < KV_WEIGHTS; s++) w->at[s] = 0;
  for (unsigned i = 0; i < n; i++) w->at[w->weight[i]]++;
  for (unsigned s = 0; s < KV_WEIGHTS; s++) {
    w->norm[s] = 0;
    if (!w->at[s]) continue;
    const unsigned share = w->at[s] * KV_STATES / n;
    w->norm[s] = (kv_u16)(share ? share : 1);
    all += w->norm[s], kinds++, weights = s + 1;
    if (w->at[s] > w->at[largest]) largest = s;
  }
  const int rest = (int)w->norm[largest] + KV_STATES - (int)all;
  if (n < 3 || kinds < 2 || rest < 1) return kv_put_plain(n, w, to);
  w->norm[largest] = (kv_u16)rest;
  kv_writer b = {to + 1, 0, 0, 0};
  kv_put(&b, KV_STATE_BITS - 5, 4);
  int left = KV_STATES + 1, limit = KV_STATES;
  unsigned bits = KV_STATE_BITS + 1, zeros = 0;
  for (unsigned s = 0; s < weights && left > 1;) {
    if (zeros) {
      const unsigned from = s;
      while (!w->norm[s]) s++;
      unsigned skip = s - from;
      for (; skip >= 3; skip -= 3) kv_put(&b, 3, 2);
      kv_put(&b, skip, 2);
    }
    const int more = 2 * limit - 1 - left;
    int v = w->norm[s++];
    left -= v;
    zeros = v == 0;
    if (++v >= limit) v += more;
    kv_put(&b, (kv_u32)v, bits - (v < more));
    for (; left < limit; limit >>= 1) bits--;
  }
  kv_flush(&b);
  // The encoder of states: at[s] is where the states of weight s begin in next.
  kv_spread(weights, KV_STATE_BITS, w);
  for (unsigned s = 0, at = 0; s < weights; at += w->norm[s++]) w->at[s] = (kv_u16)at;
  for (unsigned i = 0; i < KV_STATES; i++) w->next[w->at[w->state[i]]++] = (kv_u16)(KV_STATES + i);
  for (unsigned s = 0, at = 0; s < weights; at += w->norm[s++]) w->at[s] = (kv_u16)at;
  kv_u32 state[2] = {0, 0};
  for (unsigned i = n; i-- > 0;) {
    const unsigned s = w->weight[i], norm = w->norm[s];
    const unsigned most = norm > 1 ? KV_STATE_BITS - kv_top(norm - 1) : KV_STATE_BITS;
    kv_u32* v = &state[i % 2];
    if (!*v) { // the first that this state stands for: nothing is written
      *v = w->next[w->at[s]];
      continue;
    }
    const unsigned out = *v >= norm << most ? most : most - 1;
    kv_put(&b, *v, out);
    *v = w->next[w->at[s] + ((*v >> out) - norm)];
  }
  kv_put(&b, state[1], KV_STATE_BITS);
  kv_put(&b, state[0], KV_STATE_BITS);
  kv_put(&b, 1, 1);
  kv_flush(&b);
  if (b.bytes > 127 || (n <= 128 && b.bytes > (n + 1) / 2)) return kv_put_plain(n, w, to);
  to[0] = (kv_byte)b.bytes;
  return 1 + b.bytes;
}

// kv_put_table writes the table of codes to to, which has room for KV_TABLE bytes, and returns its length, or 0 if it cannot be
// written. Length has 0 for symbols that do not occur.
KV_FN unsigned kv_put_table(const kv_byte* length, unsigned longest, kv_work* w, kv_byte* to) {
  unsigned last = 0;
  for (unsigned s = 0; s < 256; s++) {
    w->weight[s] = length[s] ? (kv_byte)(longest + 1 - length[s]) : 0;
    if (length[s]) last = s;
  }
  return last ? kv_put_weights(last, w, to) : 0; // the last one's weight follows from the others
}

// kv_back reads n bits that end before bit *at of src, at most 16, and moves *at there. Bits before the first are 0.
KV_FN kv_u32 kv_back(const kv_byte* src, int* at, unsigned n) {
  const int end = *at;
  *at -= (int)n;
  if (end <= 0) return 0;
  const unsigned cut = *at < 0 ? (unsigned)-*at : 0, from = (unsigned)*at + cut; // cut of the bits stand before the first
  kv_u32 v = 0;
  for (unsigned i = from / 8; 8 * i < (unsigned)end; i++) v |= (kv_u32)src[i] << 8 * (i - from / 8);
  return (v >> from % 8 & ((1u << (n - cut)) - 1)) << cut;
}

// kv_get_weights reads the weights that stand in n bytes, and returns their number, or 0 if that is not what they are.
KV_FN unsigned kv_get_weights(const kv_byte* src, unsigned n, kv_work* w) {
  unsigned at = 0, s = 0, zeros = 0;
#define KV_BYTE(i) (kv_u32)(at / 8 + i < n ? src[at / 8 + i] << 8 * i : 0)
#define KV_TAKE(bits) (KV_BYTE(0) | KV_BYTE(1) | KV_BYTE(2)) >> at % 8 & ((1u << (bits)) - 1)
  const unsigned states_bits = (KV_TAKE(4)) + 5;
  at = 4;
  if (states_bits > KV_STATE_BITS) return 0;
  int left = (1 << states_bits) + 1, limit = 1 << states_bits;
  unsigned bits = states_bits + 1;
  for (unsigned i = 0; i < KV_WEIGHTS; i++) w->norm[i] = 0;
  while (left > 1 && s < KV_WEIGHTS && at < 8 * n) {
    if (zeros) {
      unsigned skip;
      do {
        skip = KV_TAKE(2);
        at += 2, s += skip;
      } while (skip == 3 && at < 8 * n);
      if (s >= KV_WEIGHTS) return 0;
    }
    const int more = 2 * limit - 1 - left;
    int v = (int)(KV_TAKE(bits - 1));
    if (v < more) {
      at += bits - 1;
    } else {
      v = (int)(KV_TAKE(bits));
      if (v >= limit) v -= more;
      at += bits;
    }
    v = v ? v - 1 : KV_RARE;
    left -= v == KV_RARE ? 1 : v;
    w->norm[s++] = (kv_u16)v;
    zeros = v == 0;
    if (left < 1) return 0;
    for (; left < limit; limit >>= 1) bits--;
  }
  const unsigned head = (at + 7) / 8;
  if (left != 1 || head >= n || !src[n - 1]) return 0;
  kv_spread(s, states_bits, w);
  for (unsigned i = 0; i < s; i++) w->at[i] = w->norm[i] == KV_RARE ? 1 : w->norm[i];
  for (unsigned i = 0; i < 1u << states_bits; i++) w->next[i] = w->at[w->state[i]]++;
  int bit = (int)(8 * (n - head) - 8 + kv_top(src[n - 1]));
  src += head;
  unsigned out = 0;
  kv_u32 state[2];
  state[0] = kv_back(src, &bit, states_bits);
  state[1] = kv_back(src, &bit, states_bits);
  for (unsigned turn = 0; bit >= 0; turn ^= 1) {
    if (out >= 255) return 0;
    w->weight[out++] = w->state[state[turn]];
    const unsigned next = w->next[state[turn]], more = states_bits - kv_top(next);
    state[turn] = (next << more) - (1u << states_bits) + kv_back(src, &bit, more);
    if (bit >= 0) continue;
    if (out >= 255) return 0;
    w->weight[out++] = w->state[state[turn ^ 1]];
  }
#undef KV_TAKE
#undef KV_BYTE
  return out;
}

// kv_get_table reads a table of codes: w->weight has each symbol's weight. It returns the table's length in src and the longest
// code's in longest, or 0 if it is no table.
KV_FN unsigned kv_get_table(const kv_byte* src, unsigned n, kv_work* w, unsigned* longest) {
  if (!n) return 0;
  for (unsigned i = 0; i < 256; i++) w->weight[i] = 0;
  unsigned symbols, size = src[0];
  if (size >= 128) {
    symbols = size - 127, size = (symbols + 1) / 2;
    if (1 + size > n) return 0;
    for (unsigned i = 0; i < symbols; i++) w->weight[i] = i % 2 ? src[1 + i / 2] & 15 : src[1 + i / 2] >> 4;
  } else {
    if (1 + size > n || !size || !(symbols = kv_get_weights(src + 1, size, w))) return 0;
  }
  kv_u32 sum = 0;
  for (unsigned i = 0; i < symbols; i++) {
    if (w->weight[i] > KV_BITS) return 0;
    sum += (1u << w->weight[i]) >> 1;
  }
  if (!sum || sum >= KV_CODES) return 0;
  *longest = kv_top(sum) + 1;
  const kv_u32 rest = (1u << *longest) - sum;
  if (rest & (rest - 1)) return 0;
  w->weight[symbols] = (kv_byte)(kv_top(rest) + 1);
  return 1 + size;
}

#ifndef __CUDACC__ // from here on for the double: one thread does all

typedef struct { kv_work w; kv_u32 count[256]; kv_u16 code[256]; kv_byte length[256]; kv_u16 entry[KV_CODES]; } kv_coder;

// kv_encode_plane writes the n bytes that stand at every step-th place of src to dst, which has room for n and KV_TABLE more, and
// returns the stored length and the method.
static unsigned kv_encode_plane(const kv_byte* src, unsigned n, unsigned step, kv_byte* dst, unsigned* method) {
  kv_coder c;
  unsigned symbols = 0;
  for (unsigned s = 0; s < 256; s++) c.count[s] = 0, c.length[s] = 0;
  for (unsigned i = 0; i < n; i++) c.count[src[i * step]]++;
  for (unsigned s = 0; s < 256; s++)
    if (c.count[s]) {
      unsigned at = symbols++;
      for (; at > 0 && c.count[c.w.order[at - 1]] > c.count[s]; at--) c.w.order[at] = c.w.order[at - 1];
      c.w.order[at] = (kv_u16)s;
    }
  *method = KV_PLANE_REPEATED;
  dst[0] = src[0];
  if (symbols == 1) return 1;
  *method = KV_PLANE_RAW;
  for (unsigned i = 0; i < n; i++) dst[i] = src[i * step];
  if (n < KV_LEAST) return n;
  const unsigned longest = kv_lengths(c.count, symbols, &c.w, c.length);
  kv_byte table[KV_TABLE];
  const unsigned head = kv_put_table(c.length, longest, &c.w, table), each = (n + 3) / 4;
  unsigned stored = head + KV_JUMP, size[4];
  for (unsigned k = 0; k < 4; k++) {
    unsigned bits = 0;
    for (unsigned i = k * each; i < n && i < (k + 1) * each; i++) bits += c.length[src[i * step]];
    stored += size[k] = bits / 8 + 1;
  }
  if (!head || stored > n - n / 64) return n;
  for (unsigned s = 0; s < 256; s++) { // the places of the codes in a table of all, by weight and symbol
    unsigned place = 0;
    for (unsigned o = 0; o < 256; o++)
      if (c.length[o] && (c.length[o] > c.length[s] || (c.length[o] == c.length[s] && o < s))) place += 1u << (longest - c.length[o]);
    c.code[s] = (kv_u16)(place >> (longest - c.length[s]));
  }
  for (unsigned i = 0; i < head; i++) dst[i] = table[i];
  kv_writer b = {dst, head, 0, 0};
  for (unsigned k = 0; k < 3; k++) kv_put(&b, size[k], 16);
  for (unsigned k = 0; k < 4; k++) {
    const unsigned from = k * each, to = k == 3 ? n : (k + 1) * each;
    for (unsigned i = to; i-- > from;) kv_put(&b, c.code[src[i * step]], c.length[src[i * step]]);
    kv_put(&b, 1, 1);
    kv_flush(&b);
  }
  *method = KV_PLANE_HUFFMAN;
  return b.bytes;
}

// kv_decode_plane writes the n bytes of a plane to every step-th place of dst. It returns 0 for what no encoder wrote.
static int kv_decode_plane(const kv_byte* src, unsigned stored, unsigned method, kv_byte* dst, unsigned n, unsigned step) {
  kv_coder c;
  if (method == KV_PLANE_RAW || method == KV_PLANE_REPEATED) {
    if (stored != (method == KV_PLANE_RAW ? n : 1)) return 0;
    for (unsigned i = 0; i < n; i++) dst[i * step] = src[method == KV_PLANE_RAW ? i : 0];
    return 1;
  }
  unsigned longest, at = 0;
  if (method != KV_PLANE_HUFFMAN || n < KV_LEAST || stored >= n) return 0;
  const unsigned head = kv_get_table(src, stored, &c.w, &longest), each = (n + 3) / 4;
  if (!head || stored - head < KV_JUMP + 4) return 0;
  for (unsigned weight = 1; weight <= KV_BITS; weight++)
    for (unsigned s = 0; s < 256; s++)
      if (c.w.weight[s] == weight)
        for (unsigned i = 0; i < 1u << (weight - 1); i++) c.entry[at++] = (kv_u16)(s | (longest + 1 - weight) << 8);
  const kv_byte* jump = src + head;
  unsigned from = head + KV_JUMP;
  for (unsigned k = 0; k < 4; k++) {
    const unsigned size = k < 3 ? (unsigned)(jump[2 * k] | jump[2 * k + 1] << 8) : stored - from;
    if (!size || from + size > stored || !src[from + size - 1]) return 0;
    int bit = (int)(8 * size - 8 + kv_top(src[from + size - 1]));
    for (unsigned i = k * each; i < n && i < (k + 1) * each; i++) {
      int probe = bit;
      const kv_u16 e = c.entry[kv_back(src + from, &probe, longest)];
      dst[i * step] = (kv_byte)e;
      bit -= e >> 8;
    }
    if (bit) return 0;
    from += size;
  }
  return 1;
}

// kv_encode_extent writes the stored form of an extent of n bytes to dst, which has room for 2*n+2*KV_TABLE, and returns its length.
static unsigned kv_encode_extent(const kv_byte* src, unsigned n, unsigned element, kv_byte* dst, unsigned* codec) {
  const unsigned most = n - (n / 32 > 1 ? n / 32 : 1), head = element == 2 ? 6 : 1;
  unsigned method = KV_PLANE_RAW, stored = head;
  if (n >= element)
    for (unsigned p = 0; p < element; p++) {
      const unsigned plane = kv_encode_plane(src + p, (n + element - 1 - p) / element, element, dst + stored, &method);
      dst[p] = (kv_byte)method;
      if (element == 2 && !p)
        for (unsigned i = 0; i < 4; i++) dst[2 + i] = (kv_byte)(plane >> 8 * i);
      stored += plane;
    }
  *codec = element == 2 ? KV_PLANES : KV_HUFFMAN;
  if (n >= element && stored <= most && (element == 2 || method != KV_PLANE_RAW)) return stored;
  for (unsigned i = 0; i < n; i++) dst[i] = src[i];
  *codec = KV_RAW;
  return n;
}

// kv_decode_extent writes an extent of n bytes to dst. It returns 0 for what no encoder wrote.
static int kv_decode_extent(const kv_byte* src, unsigned stored, unsigned codec, kv_byte* dst, unsigned n) {
  if (codec == KV_HUFFMAN) return stored > 0 && kv_decode_plane(src + 1, stored - 1, src[0], dst, n, 1);
  if (codec == KV_PLANES) {
    if (stored < 6) return 0;
    const kv_u32 first = src[2] | src[3] << 8 | src[4] << 16 | (kv_u32)src[5] << 24;
    return first <= stored - 6 && kv_decode_plane(src + 6, first, src[0], dst, (n + 1) / 2, 2) &&
           kv_decode_plane(src + 6 + first, stored - 6 - first, src[1], dst + 1, n / 2, 2);
  }
  if (codec != KV_RAW || stored != n) return 0;
  for (unsigned i = 0; i < n; i++) dst[i] = src[i];
  return 1;
}
#endif
#endif
