// Fused CPU kernels of the decoder block: residual + RMSNorm, rotary embedding, SiLU * up, and paged
// attention. Plain C interface, called through ctypes (runtime/cpu_kernels.py); no torch headers, so
// that compiling takes seconds. Vectors are GCC/Clang vector extensions, so any target works; AVX-512
// BF16 is used for attention products where the compiler targets it.
//
// Elements are float (T = float) or bfloat16 (T = uint16_t); all arithmetic between loads and stores
// is float32. Shapes: N rows, H query heads, G key/value heads, R = H/G, C head width.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
constexpr int kKeyBlock = 64;       // keys handled together by attention
constexpr int kMaxRows = 96;        // query rows (R * positions) of one attention tile
constexpr long kSerialElements = 16384;  // below this, starting threads costs more than it saves

typedef float V __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));

inline V splat(float x) { return V{} + x; }

inline V load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline V load(const uint16_t* p) {
#if defined(__AVX512F__)  // compilers split the generic conversion into halves
  return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  H16 h;
  std::memcpy(&h, p, sizeof h);
  return (V)(__builtin_convertvector(h, U) << 16);
#endif
}

inline void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }

inline U round_bits(V v) {  // round to nearest even; NaN stays NaN
  U u = (U)v;
  U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  I is_nan = v != v;
  return ((U)is_nan & (U{} + 0x7fc0u)) | (~(U)is_nan & rounded);
}

inline void store(uint16_t* p, V v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)round_bits(v)));
#else
  H16 h = __builtin_convertvector(round_bits(v), H16);
  std::memcpy(p, &h, sizeof h);
#endif
}

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}
inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, uint16_t* out) { *out = (uint16_t)round_bits(splat(x))[0]; }

template <class T>
inline V load_tail(const T* p, long count) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, count * sizeof(T));
  return load(buffer);
}

template <class T>
inline void store_tail(T* p, V v, long count) {
  T buffer[kLanes];
  store(buffer, v);
  std::memcpy(p, buffer, count * sizeof(T));
}

inline V select(I mask, V a, V b) { return (V)(((I)a & mask) | ((I)b & ~mask)); }
inline V vmax(V a, V b) { return select(a > b, a, b); }

inline float sum(V v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#endif
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += v[i];
  return total;
}

inline float max(V v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#endif
  float best = v[0];
  for (int i = 1; i < kLanes; i++) best = v[i] > best ? v[i] : best;
  return best;
}

// exp, relative error about 2e-7: 2^n times a degree-6 polynomial on [-ln2/2, ln2/2] (Cephes expf).
inline V vexp(V x) {
  x = select(x < splat(-87.3f), splat(-87.3f), x);
  x = select(x > splat(88.0f), splat(88.0f), x);
  const V magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  V shifted = x * 1.44269504088896341f + magic;
  V n = shifted - magic;
  V r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  V p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  I exponent = ((I)shifted - (I)magic + 127) << 23;
  return p * (V)exponent;
}

// ---------------------------------------------------------------- elementwise

template <class T>
void norm_row(T* x, const T* delta, const float* weight, T* out, long d, float eps) {
  V squares{};
  float tail = 0;
  long c = 0;
  for (; c + kLanes <= d; c += kLanes) {
    V v = load(x + c);
    if (delta) {
      v += load(delta + c);
      store(x + c, v);
      v = load(x + c);  // the rounded residual is what the norm sees
    }
    squares += v * v;
  }
  for (; c < d; c++) {
    float v = to_float(x[c]);
    if (delta) {
      from_float(v + to_float(delta[c]), x + c);
      v = to_float(x[c]);
    }
    tail += v * v;
  }
  float scale = 1.0f / std::sqrt((sum(squares) + tail) / (float)d + eps);
  c = 0;
  for (; c + kLanes <= d; c += kLanes) store(out + c, load(x + c) * scale * load(weight + c));
  for (; c < d; c++) from_float(to_float(x[c]) * scale * weight[c], out + c);
}

template <class T>
void add_rms_norm(T* x, const T* delta, const float* weight, T* out, long n, long d, float eps) {
#pragma omp parallel for if (n * d > kSerialElements)
  for (long i = 0; i < n; i++)
    norm_row(x + i * d, delta ? delta + i * d : nullptr, weight, out + i * d, d, eps);
}

template <class T>
void rotate(T* x, const T* cos, const T* sin, long angle_stride, long n, long heads, long stride,
            long c) {
  const long half = c / 2;
#pragma omp parallel for if (n * heads * c > kSerialElements)
  for (long i = 0; i < n; i++) {
    const T* co = cos + i * angle_stride;
    const T* si = sin + i * angle_stride;
    for (long h = 0; h < heads; h++) {
      T* a = x + i * stride + h * c;
      T* b = a + half;
      long j = 0;
      for (; j + kLanes <= half; j += kLanes) {
        V va = load(a + j), vb = load(b + j), vc = load(co + j), vs = load(si + j);
        store(a + j, va * vc - vb * vs);
        store(b + j, vb * vc + va * vs);
      }
      for (; j < half; j++) {
        float va = to_float(a[j]), vb = to_float(b[j]), vc = to_float(co[j]), vs = to_float(si[j]);
        from_float(va * vc - vb * vs, a + j);
        from_float(vb * vc + va * vs, b + j);
      }
    }
  }
}

template <class T>
void silu_mul(const T* gate_up, T* out, long n, long inner) {
#pragma omp parallel for if (n * inner > kSerialElements)
  for (long i = 0; i < n; i++) {
    const T* gate = gate_up + i * 2 * inner;
    const T* up = gate + inner;
    T* to = out + i * inner;
    for (long c = 0; c < inner; c += kLanes) {
      long left = inner - c;
      bool is_full = left >= kLanes;
      V g = is_full ? load(gate + c) : load_tail(gate + c, left);
      V u = is_full ? load(up + c) : load_tail(up + c, left);
      V y = g / (1.0f + vexp(-g)) * u;
      if (is_full)
        store(to + c, y);
      else
        store_tail(to + c, y, left);
    }
  }
}

// ---------------------------------------------------------------- attention
// Products are C[M, 16 * NV] (+)= A[M, K] * B[K, 16 * NV] over 32-bit words: a word is one float, or
// a pair of neighbouring bfloat16 of the contracted dimension.

struct Float32 {
  static constexpr int kPerWord = 1;
  static inline V multiply_add(V acc, uint32_t a, const uint32_t* b) {
    float f;
    std::memcpy(&f, &a, sizeof f);
    return acc + f * load((const float*)b);
  }
};

inline void store_pairs(uint16_t* p, V v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  store(p, v);
#endif
}

#if defined(__AVX512BF16__)
struct Bfloat16 {
  static constexpr int kPerWord = 2;
  static inline V multiply_add(V acc, uint32_t a, const uint32_t* b) {
    return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a),
                               (__m512bh)_mm512_loadu_si512(b));
  }
};
#endif

template <class Word, int MR, int NV>
void multiply_tile(const uint32_t* a, long lda, const uint32_t* b, long ldb, float* c, long ldc,
                   long k, bool accumulate) {
  V acc[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[i][v] = accumulate ? load(c + i * ldc + v * kLanes) : V{};
  for (long kk = 0; kk < k; kk++) {
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++)
        acc[i][v] = Word::multiply_add(acc[i][v], a[i * lda + kk], b + kk * ldb + v * kLanes);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) store(c + i * ldc + v * kLanes, acc[i][v]);
}

template <class Word, int NV>
void multiply_columns(long m, const uint32_t* a, long lda, const uint32_t* b, long ldb, float* c,
                      long ldc, long k, bool accumulate) {
  constexpr int kRows = 6;  // 6 x 4 accumulators of 32 vector registers
  for (; m >= kRows; m -= kRows, a += kRows * lda, c += kRows * ldc)
    multiply_tile<Word, kRows, NV>(a, lda, b, ldb, c, ldc, k, accumulate);
  switch (m) {
    case 5: multiply_tile<Word, 5, NV>(a, lda, b, ldb, c, ldc, k, accumulate); break;
    case 4: multiply_tile<Word, 4, NV>(a, lda, b, ldb, c, ldc, k, accumulate); break;
    case 3: multiply_tile<Word, 3, NV>(a, lda, b, ldb, c, ldc, k, accumulate); break;
    case 2: multiply_tile<Word, 2, NV>(a, lda, b, ldb, c, ldc, k, accumulate); break;
    case 1: multiply_tile<Word, 1, NV>(a, lda, b, ldb, c, ldc, k, accumulate); break;
    default: break;
  }
}

template <class Word>
void multiply(long m, long vectors, const uint32_t* a, long lda, const uint32_t* b, long ldb,
              float* c, long ldc, long k, bool accumulate) {
  for (; vectors >= 4; vectors -= 4, b += 4 * kLanes, c += 4 * kLanes)
    multiply_columns<Word, 4>(m, a, lda, b, ldb, c, ldc, k, accumulate);
  switch (vectors) {
    case 3: multiply_columns<Word, 3>(m, a, lda, b, ldb, c, ldc, k, accumulate); break;
    case 2: multiply_columns<Word, 2>(m, a, lda, b, ldb, c, ldc, k, accumulate); break;
    case 1: multiply_columns<Word, 1>(m, a, lda, b, ldb, c, ldc, k, accumulate); break;
    default: break;
  }
}

// to[word][key] = rows[key][word] for kKeyBlock rows of `words` words.
void transpose_words(const uint32_t* const* rows, long words, uint32_t* to) {
#if defined(__AVX512F__)
  for (long w = 0; w < words; w += kLanes) {
    const __mmask16 mask = words - w >= kLanes ? 0xffff : (__mmask16)((1u << (words - w)) - 1);
    for (int key = 0; key < kKeyBlock; key += kLanes) {
      __m512i r[16], t[16];
      for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(mask, rows[key + i] + w);
      for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
      }
      for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
      }
      for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
      }
      for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
      }
      const long count = std::min<long>(kLanes, words - w);
      for (long i = 0; i < count; i++) _mm512_storeu_si512(to + (w + i) * kKeyBlock + key, r[i]);
    }
  }
#else
  for (long w = 0; w < words; w++)
    for (int key = 0; key < kKeyBlock; key++) to[w * kKeyBlock + key] = rows[key][w];
#endif
}

// to[i] = the pair (low[i], high[i]) of two rows, the lower half first.
inline void pair_rows(const uint16_t* low, const uint16_t* high, long count, uint32_t* to) {
  long i = 0;
#if defined(__AVX512BW__)
  alignas(64) static const uint16_t kFirst[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,
                                                  37, 6, 38, 7, 39, 8,  40, 9,  41, 10, 42,
                                                  11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_load_si512(kFirst);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (; i + 32 <= count; i += 32) {
    const __m512i a = _mm512_loadu_si512(low + i), b = _mm512_loadu_si512(high + i);
    _mm512_storeu_si512(to + i, _mm512_permutex2var_epi16(a, first, b));
    _mm512_storeu_si512(to + i + 16, _mm512_permutex2var_epi16(a, second, b));
  }
#endif
  for (; i < count; i++) to[i] = (uint32_t)high[i] << 16 | low[i];
}

inline void pair_rows(const float*, const float*, long, uint32_t*) {}  // float words are no pairs

struct Request {
  long row_start, q_len, kv_len;
  const int64_t* slots;  // of positions 0 .. kv_len - 1
  // Rows of a tree: the last block_len keys are seen where the mask [q_len, block_len] is set, all
  // keys before them by every row. No mask: causal.
  long block_len;
  const uint8_t* mask;
};

struct Task {
  const Request* request;
  long kv_head, q_start, q_count;
};

struct Shape {
  long heads, kv_heads, width, padded_width, q_stride;
  float scale;
};

// Scratch of one thread. Grows to the largest shape seen and is reused.
struct Scratch {
  std::vector<uint32_t> q, k, v, p;
  std::vector<float> scores, out, staged;
  std::vector<char> zeros;
  float highest[kMaxRows], total[kMaxRows];
};

template <class Word, class T>
void attend_tile(const Task& task, const Shape& shape, const T* q, const T* pool_k,
                 const T* pool_v, T* out, Scratch& s) {
  constexpr bool kIsStaged = Word::kPerWord * sizeof(T) != 4;  // bfloat16 computed in float32
  const Request& request = *task.request;
  const long group = shape.heads / shape.kv_heads, c = shape.width, cp = shape.padded_width;
  const long m = group * task.q_count, words = c / Word::kPerWord, kv_stride = shape.kv_heads * c;
  const long key_words = kKeyBlock / Word::kPerWord;
  s.q.resize(kMaxRows * words);
  s.k.resize(words * kKeyBlock);
  if (cp != c)
    s.v.assign(key_words * cp, 0u);  // columns past the width stay zero
  else
    s.v.resize(key_words * cp);
  s.p.resize(kMaxRows * key_words);
  s.scores.resize(kMaxRows * kKeyBlock);
  s.out.resize(kMaxRows * cp);
  s.zeros.resize(c * 4);
  if (kIsStaged) s.staged.resize(kKeyBlock * c);
  // Plain pointers: the compiler cannot know that stores leave the vectors' own fields alone.
  uint32_t *q_words = s.q.data(), *k_words = s.k.data(), *v_words = s.v.data(), *p_words = s.p.data();
  float *scores = s.scores.data(), *sums = s.out.data(), *staged = s.staged.data();
  float *highest_of = s.highest, *total_of = s.total;
  const T* none = (const T*)s.zeros.data();

  for (long i = 0; i < task.q_count; i++)
    for (long r = 0; r < group; r++) {
      const T* from = q + (request.row_start + task.q_start + i) * shape.q_stride +
                      (task.kv_head * group + r) * c;
      uint32_t* to = q_words + (i * group + r) * words;
      if (kIsStaged)
        for (long j = 0; j < c; j++) ((float*)to)[j] = to_float(from[j]);
      else
        std::memcpy(to, from, c * sizeof(T));
    }
  std::fill_n(sums, m * cp, 0.0f);
  std::fill_n(highest_of, m, -INFINITY);
  std::fill_n(total_of, m, 0.0f);

  const long first_position = request.kv_len - request.q_len + task.q_start;
  const bool is_tree = request.mask != nullptr;
  const long prefix_len = request.kv_len - request.block_len;
  // Keys that the tile's rows see, at most.
  const long kv_end = is_tree ? request.kv_len : first_position + task.q_count;
  const V lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (long start = 0; start < kv_end; start += kKeyBlock) {
    const long count = std::min<long>(kKeyBlock, kv_end - start);
    // Rows of one head are short and far apart: without this the block waits for memory.
    for (long j = start + kKeyBlock; j < std::min(start + 2 * kKeyBlock, kv_end); j++) {
      const long at = request.slots[j] * kv_stride + task.kv_head * c;
      for (long i = 0; i < c; i += 64 / (long)sizeof(T)) {
        __builtin_prefetch(pool_k + at + i, 0, 2);
        __builtin_prefetch(pool_v + at + i, 0, 2);
      }
    }
    const T* v_rows[kKeyBlock];
    const uint32_t* k_rows[kKeyBlock];
    for (long j = 0; j < kKeyBlock; j++) {
      const long at = j < count ? request.slots[start + j] * kv_stride + task.kv_head * c : 0;
      const T* k_row = j < count ? pool_k + at : none;
      v_rows[j] = j < count ? pool_v + at : none;
      if (kIsStaged) {
        float* to = staged + j * c;
        for (long i = 0; i < c; i++) to[i] = to_float(k_row[i]);
        k_rows[j] = (const uint32_t*)to;
      } else {
        k_rows[j] = (const uint32_t*)k_row;
      }
    }
    transpose_words(k_rows, words, k_words);
    for (long j = 0; j < key_words; j++) {
      uint32_t* to = v_words + j * cp;
      if (Word::kPerWord == 2) {
        pair_rows(v_rows[2 * j], v_rows[2 * j + 1], c, to);
        continue;
      }
      for (long i = 0; i < c; i += kLanes) {
        const long left = std::min<long>(kLanes, c - i);
        const T* from = v_rows[j] + i;
        store((float*)to + i, left == kLanes ? load(from) : load_tail(from, left));
      }
    }

    multiply<Word>(m, kKeyBlock / kLanes, q_words, words, k_words, kKeyBlock,
                   scores, kKeyBlock, words, false);

    for (long row = 0; row < m; row++) {
      // Keys of this block that the row may see: up to itself (bottom-right causality); of a tree's
      // block those of its mask.
      const long visible = is_tree ? count : first_position + row / group + 1 - start;
      const bool is_masked = is_tree && start + count > prefix_len;
      alignas(64) float hidden[kKeyBlock];
      if (is_masked) {
        const long first = std::max<long>(0, prefix_len - start);  // of the block's keys in here
        const uint8_t* mask = request.mask + (task.q_start + row / group) * request.block_len +
                              (start - prefix_len);
        for (long j = 0; j < kKeyBlock; j++) hidden[j] = 0.0f;
        for (long j = first; j < count; j++) hidden[j] = 1.0f - mask[j];
      }
      float* score = scores + row * kKeyBlock;
      uint32_t* p = p_words + row * key_words;
      if (visible <= 0) {
        std::fill_n(p, key_words, 0u);
        continue;
      }
      V value[kKeyBlock / kLanes];
      V best = splat(-INFINITY);
#pragma GCC unroll 4
      for (int v = 0; v < kKeyBlock / kLanes; v++) {
        value[v] = load(score + v * kLanes) * shape.scale;
        if (visible < kKeyBlock)
          value[v] = select(lane + (float)(v * kLanes) < splat((float)visible), value[v],
                            splat(-INFINITY));
        if (is_masked)
          value[v] = select(load(hidden + v * kLanes) < splat(0.5f), value[v], splat(-INFINITY));
        best = vmax(value[v], best);
      }
      const float highest = std::max(highest_of[row], max(best));
      V total{};
#pragma GCC unroll 4
      for (int v = 0; v < kKeyBlock / kLanes; v++) {
        V e = vexp(value[v] - highest);
        if (visible < kKeyBlock)  // vexp clamps: hidden keys must weigh exactly nothing
          e = select(lane + (float)(v * kLanes) < splat((float)visible), e, V{});
        if (is_masked) e = select(load(hidden + v * kLanes) < splat(0.5f), e, V{});
        total += e;
        if (Word::kPerWord == 1)
          store((float*)p + v * kLanes, e);
        else
          store_pairs((uint16_t*)p + v * kLanes, e);
      }
      if (highest != highest_of[row]) {
        const float decay = std::exp(highest_of[row] - highest);
        total_of[row] *= decay;
        float* o = sums + row * cp;
        for (long i = 0; i < cp; i += kLanes) store(o + i, load(o + i) * decay);
        highest_of[row] = highest;
      }
      total_of[row] += sum(total);
    }
    multiply<Word>(m, cp / kLanes, p_words, key_words, v_words, cp, sums, cp,
                   key_words, true);
  }
  for (long row = 0; row < m; row++) {
    T* to = out + ((request.row_start + task.q_start + row / group) * shape.heads +
                   task.kv_head * group + row % group) * c;
    const float* o = sums + row * cp;
    const float scale = 1.0f / total_of[row];
    for (long i = 0; i < c; i += kLanes) {
      const long left = std::min<long>(kLanes, c - i);
      if (left == kLanes)
        store(to + i, load(o + i) * scale);
      else
        store_tail(to + i, load(o + i) * scale, left);
    }
  }
}

template <class Word, class T>
void attend(const T* q, const T* k, const T* v, long q_stride, long kv_stride,
            const int64_t* write_slots, long n, T* pool_k, T* pool_v, const int64_t* described, long requests, long heads,
            long kv_heads, long c, float scale, T* out) {
  const Shape shape{heads, kv_heads, c, (c + kLanes - 1) / kLanes * kLanes, q_stride, scale};
  const long positions = std::max<long>(1, kMaxRows / (heads / kv_heads));
  std::vector<Request> request(requests);
  std::vector<Task> tasks;
  for (long b = 0; b < requests; b++) {
    const int64_t* d = described + 6 * b;
    request[b] = {(long)d[0], (long)d[1], (long)d[2], (const int64_t*)d[3],
                  (long)d[4], (const uint8_t*)d[5]};
    // Last rows first: they see the most keys, so the short tasks fill up the end.
    for (long end = d[1]; end > 0; end -= positions)
      for (long g = 0; g < kv_heads; g++) {
        const long start = std::max<long>(0, end - positions);
        tasks.push_back({&request[b], g, start, end - start});
      }
  }
  const long kv_width = kv_heads * c, num_tasks = (long)tasks.size();
#pragma omp parallel
  {
#pragma omp for
    for (long i = 0; i < n; i++) {
      std::memcpy(pool_k + write_slots[i] * kv_width, k + i * kv_stride, kv_width * sizeof(T));
      std::memcpy(pool_v + write_slots[i] * kv_width, v + i * kv_stride, kv_width * sizeof(T));
    }
    static thread_local Scratch scratch_of_thread;
    Scratch& scratch = scratch_of_thread;
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < num_tasks; i++)
      attend_tile<Word, T>(tasks[i], shape, q, pool_k, pool_v, out, scratch);
  }
}

#if defined(__AVX512BF16__)
typedef Bfloat16 WordOfBfloat16;
#else
typedef Float32 WordOfBfloat16;
#endif

}  // namespace

#define EXPORT_ELEMENTWISE(T, SUFFIX)                                                             \
  void add_rms_norm_##SUFFIX(T* x, const T* delta, const float* weight, T* out, long n, long d,   \
                             float eps) {                                                         \
    add_rms_norm<T>(x, delta, weight, out, n, d, eps);                                            \
  }                                                                                               \
  void rotate_##SUFFIX(T* x, const T* cos, const T* sin, long angle_stride, long n, long heads,   \
                       long stride, long c) {                                                     \
    rotate<T>(x, cos, sin, angle_stride, n, heads, stride, c);                                    \
  }                                                                                               \
  void silu_mul_##SUFFIX(const T* gate_up, T* out, long n, long inner) {                          \
    silu_mul<T>(gate_up, out, n, inner);                                                          \
  }                                                                                               \
  void attend_##SUFFIX(const T* q, const T* k, const T* v, long q_stride, long kv_stride,         \
                       const int64_t* write_slots, long n, T* pool_k, T* pool_v,                  \
                       const int64_t* described, long requests, long heads, long kv_heads,        \
                       long c, float scale, T* out) {                                             \
    attend<WordOf_##SUFFIX, T>(q, k, v, q_stride, kv_stride, write_slots, n, pool_k, pool_v, described,        \
                               requests, heads, kv_heads, c, scale, out);                         \
  }

typedef Float32 WordOf_f32;
typedef WordOfBfloat16 WordOf_bf16;

extern "C" {
EXPORT_ELEMENTWISE(float, f32)
EXPORT_ELEMENTWISE(uint16_t, bf16)
}
