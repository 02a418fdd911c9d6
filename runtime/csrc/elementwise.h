// Residual + RMSNorm, RMSNorm of heads, rotary embedding, SiLU * up and arg-max, row by row.

#pragma once

#include "vectors.h"

namespace {

constexpr long kSerialElements = 16384;  // below this, starting threads costs more than it saves

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
    squares = fma(v, v, squares);
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

// Every head of one row, in place.
template <class T>
void norm_heads_row(T* x, const float* weight, long heads, long c, float eps) {
  for (long h = 0; h < heads; h++) norm_row<T>(x + h * c, nullptr, weight, x + h * c, c, eps);
}

template <class T>
void norm_heads(T* x, const float* weight, long n, long heads, long stride, long c, float eps) {
#pragma omp parallel for if (n * heads * c > kSerialElements)
  for (long i = 0; i < n; i++) norm_heads_row(x + i * stride, weight, heads, c, eps);
}

// One row of `heads` heads of c elements: element j is paired with j + c/2.
template <class T>
void rotate_row(T* x, const T* cos, const T* sin, long heads, long c) {
  const long half = c / 2;
  for (long h = 0; h < heads; h++) {
    T* a = x + h * c;
    T* b = a + half;
    long j = 0;
    for (; j + kLanes <= half; j += kLanes) {
      V va = load(a + j), vb = load(b + j), vc = load(cos + j), vs = load(sin + j);
      store(a + j, fma(va, vc, -(vb * vs)));
      store(b + j, fma(vb, vc, va * vs));
    }
    for (; j < half; j++) {
      float va = to_float(a[j]), vb = to_float(b[j]), vc = to_float(cos[j]), vs = to_float(sin[j]);
      from_float(va * vc - vb * vs, a + j);
      from_float(vb * vc + va * vs, b + j);
    }
  }
}

template <class T>
void rotate(T* x, const T* cos, const T* sin, long angle_stride, long n, long heads, long stride,
            long c) {
#pragma omp parallel for if (n * heads * c > kSerialElements)
  for (long i = 0; i < n; i++)
    rotate_row(x + i * stride, cos + i * angle_stride, sin + i * angle_stride, heads, c);
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
      V y = silu_times(g, u);
      if (is_full)
        store(to + c, y);
      else
        store_tail(to + c, y, left);
    }
  }
}

// The first column of the highest value; NaN is never higher.
template <class T>
int64_t argmax_row(const T* x, long v) {
  constexpr int kChains = 4;  // a comparison waits for the one before it
  V best[kChains];
  I where[kChains] = {};  // where a lane's best begins
  for (int i = 0; i < kChains; i++) best[i] = splat(-INFINITY);
  long c = 0;
  for (; c + kChains * kLanes <= v; c += kChains * kLanes)
#pragma GCC unroll 4
    for (int i = 0; i < kChains; i++) {
      const V value = load(x + c + i * kLanes);
      const I is_higher = value > best[i];
      best[i] = select(is_higher, value, best[i]);
      where[i] = (where[i] & ~is_higher) | ((I{} + (int32_t)(c + i * kLanes)) & is_higher);
    }
  float highest = -INFINITY;
  int64_t found = 0;
  const auto offer = [&](float value, int64_t at) {
    if (value > highest || (value == highest && at < found)) highest = value, found = at;
  };
  for (int i = 0; i < kChains; i++)
    for (int lane = 0; lane < kLanes; lane++) offer(best[i][lane], where[i][lane] + lane);
  for (; c < v; c++) offer(to_float(x[c]), c);
  return found;
}

// Of each request the target's tokens [b, k + 1] up to the first that was not drafted [b, k], this one
// included; -1 behind it.
inline void accept_chain(const int64_t* tokens, const int64_t* drafts, long b, long k, int64_t* ids,
                         int64_t* emitted, int64_t* last) {
  for (; b > 0; b--, tokens += k + 1, ids += k + 1, drafts += k) {
    long count = 0;
    while (count < k && drafts[count] == tokens[count]) count++;
    std::copy_n(tokens, count + 1, ids);
    std::fill_n(ids + count + 1, k - count, -1);
    *last++ = tokens[count];
    *emitted++ = count + 1;
  }
}

// Of each request the target's inputs [b, rows], each row that of the next one, and in row emitted - 1
// the token that the target added; and that row's number among all.
inline void shift_inputs(const int64_t* ids, const int64_t* last, const int64_t* emitted, long b,
                         long rows, int64_t* shifted, int64_t* ends) {
  for (long i = 0; i < b; i++) {
    int64_t* to = shifted + i * rows;
    for (long j = 0; j < rows; j++) to[j] = ids[i * rows + std::min(j + 1, rows - 1)];
    to[emitted[i] - 1] = last[i];
    ends[i] = i * rows + emitted[i] - 1;
  }
}

// Of each request the rows' tokens [b, n + 1] along the path from row 0 down through nodes [b, n] that
// are the tokens: `drawn`, which repeats its last one, `ids` with -1 there, and the path's rows, past
// its end row j itself; all [b, depth + 1].
inline void walk_tree(const int64_t* tokens, const int64_t* nodes, const int64_t* parents, long b,
                      long n, long depth, int64_t* ids, int64_t* drawn, int64_t* path,
                      int64_t* emitted) {
  for (; b > 0; b--, tokens += n + 1, nodes += n, parents += n) {
    long row = 0, accepted = 0;
    for (long j = 0; j <= depth; j++) {
      const bool is_past = accepted < j;
      *drawn++ = tokens[row];
      *ids++ = is_past ? -1 : tokens[row];
      *path++ = is_past ? j : row;
      if (is_past) continue;
      long node = 0;
      while (node < n && !(parents[node] == row && nodes[node] == tokens[row])) node++;
      if (node < n) row = node + 1, accepted++;
    }
    *emitted++ = accepted + 1;
  }
}

template <class T>
void argmax(const T* x, int64_t* ids, long n, long v) {
#pragma omp parallel for if (n > 1 && n * v > kSerialElements)
  for (long i = 0; i < n; i++) ids[i] = argmax_row(x + i * v, v);
}

}  // namespace
