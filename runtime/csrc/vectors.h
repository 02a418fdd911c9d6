// Vectors of sixteen floats, what is done to them, and the words that products contract.
//
// GCC/Clang vector extensions, so any target works; AVX-512 intrinsics where compilers split the
// generic form. Elements are float (T = float) or bfloat16 (T = uint16_t); all arithmetic between loads
// and stores is float32.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;

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
#if defined(__AVX512BF16__)  // what is too small for a normal float becomes zero
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#elif defined(__AVX512F__)
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
inline void from_float(float x, uint16_t* out) {
  uint16_t bits[kLanes];
  store(bits, splat(x));
  *out = bits[0];
}

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

// a * b + c in one rounding, where the processor can. Spelled out, and compiled without contraction
// (runtime/kernel_library.py), so that inlined code gives the same bits everywhere.
inline V fma(V a, V b, V c) {
#if defined(__AVX512F__)
  return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  __m256 x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof x);
  std::memcpy(y, &b, sizeof y);
  std::memcpy(z, &c, sizeof z);
  for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
  std::memcpy(&c, z, sizeof c);
  return c;
#else
  return a * b + c;
#endif
}

inline bool any(I mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < kLanes; i++) found |= mask[i];
  return found != 0;
#endif
}

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

// 2^x, relative error about 2e-7 (Cephes exp2f); exactly zero far below the smallest float.
inline V vexp2(V x) {
#if defined(__AVX512F__)
  const V n = (V)_mm512_roundscale_ps((__m512)x, 0);
#else
  x = select(x > splat(127.0f), splat(127.0f), x);
  const I is_zero = x < splat(-126.0f);
  x = select(is_zero, V{}, x);
  const V magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const V shifted = x + magic, n = shifted - magic;
#endif
  const V r = x - n;
  V p = splat(1.535336188319500e-4f);
  p = fma(p, r, splat(1.339887440266574e-3f));
  p = fma(p, r, splat(9.618437357674640e-3f));
  p = fma(p, r, splat(5.550332471162809e-2f));
  p = fma(p, r, splat(2.402264791363012e-1f));
  p = fma(p, r, splat(6.931472028550421e-1f));
  p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
  return (V)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return select(is_zero, V{}, p * (V)(((I)shifted - (I)magic + 127) << 23));
#endif
}

inline V reciprocal(V x) {
#if defined(__AVX512F__)
  const V r = (V)_mm512_rcp14_ps((__m512)x);
  return r * fma(-x, r, splat(2.0f));
#else
  return 1.0f / x;
#endif
}

constexpr float kLog2E = 1.44269504088896341f;

inline V silu_times(V gate, V up) {
  const V exponent = gate * -kLog2E;
  return gate * reciprocal(1.0f + vexp2(select(exponent > splat(126.0f), splat(126.0f), exponent))) * up;
}

// What storing v as T and loading it again gives.
inline V rounded(const float*, V v) { return v; }
inline V rounded(const uint16_t*, V v) {
  uint16_t bits[kLanes];
  store(bits, v);
  return load(bits);
}

// Words: 32 bits, one float, or a pair of neighbouring bfloat16 of the contracted dimension.

struct Float32 {
  static constexpr int kPerWord = 1;
  static inline V multiply_add(V acc, uint32_t a, V b) {
    float f;
    std::memcpy(&f, &a, sizeof f);
    return fma(splat(f), b, acc);
  }
};

#if defined(__AVX512BF16__)
struct Bfloat16 {
  static constexpr int kPerWord = 2;
  static inline V multiply_add(V acc, uint32_t a, V b) {
    return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
  }
};
typedef Bfloat16 WordOf_bf16;
#else
typedef Float32 WordOf_bf16;
#endif
typedef Float32 WordOf_f32;

}  // namespace
