// Fused CPU kernels of the decoder: residual + RMSNorm, RMSNorm of heads, rotary embedding, SiLU * up, arg-max, paged
// attention, packed linears and their best outputs, and whole decoder blocks. Plain C interface, called through ctypes
// (runtime/cpu_kernels.py); no torch headers, so that compiling takes seconds.
//
// Shapes: N rows, H query heads, G key/value heads, C head width.

#include "block.h"
#include "screen.h"

namespace {

template <class Word, class T>
void blocks(const Block* const* block, long num_blocks, T* x, long n, long d, long inner, const T* cos,
            const T* sin, long angle_stride, const int64_t* write_slots, T* pool_k, T* pool_v,
            long layer_stride, const int64_t* described, long requests, long heads, long kv_heads,
            long c, float scale, T* scratch) {
  const Shape shape{heads, kv_heads, c, padded_width(c), (heads + 2 * kv_heads) * c, scale};
  const Batch batch = make_batch(described, requests, shape);
  run_stack<Word, T>({block, num_blocks, n, d, inner, x, cos, sin, angle_stride, write_slots, pool_k,
                      pool_v, layer_stride, scratch},
                     batch, shape);
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                         \
  void add_rms_norm_##SUFFIX(T* x, const T* delta, const float* weight, T* out, long n, long d,   \
                             float eps) {                                                         \
    add_rms_norm<T>(x, delta, weight, out, n, d, eps);                                            \
  }                                                                                               \
  void norm_heads_##SUFFIX(T* x, const float* weight, long n, long heads, long stride, long c,    \
                           float eps) {                                                           \
    norm_heads<T>(x, weight, n, heads, stride, c, eps);                                           \
  }                                                                                               \
  void rotate_##SUFFIX(T* x, const T* cos, const T* sin, long angle_stride, long n, long heads,   \
                       long stride, long c) {                                                     \
    rotate<T>(x, cos, sin, angle_stride, n, heads, stride, c);                                    \
  }                                                                                               \
  void silu_mul_##SUFFIX(const T* gate_up, T* out, long n, long inner) {                          \
    silu_mul<T>(gate_up, out, n, inner);                                                          \
  }                                                                                               \
  void argmax_##SUFFIX(const T* logits, int64_t* ids, long n, long v) {                           \
    argmax<T>(logits, ids, n, v);                                                                 \
  }                                                                                               \
  void attend_##SUFFIX(const T* q, const T* k, const T* v, long q_stride, long kv_stride,         \
                       const int64_t* write_slots, long n, T* pool_k, T* pool_v,                  \
                       const int64_t* described, long requests, long heads, long kv_heads,        \
                       long c, float scale, T* out) {                                             \
    attend<WordOf_##SUFFIX, T>(q, k, v, q_stride, kv_stride, write_slots, n, pool_k, pool_v,      \
                               described, requests, heads, kv_heads, c, scale, out);              \
  }                                                                                               \
  void linear_##SUFFIX(const T* x, const uint32_t* weight, const float* bias, T* out, long n,     \
                       long inputs, long outputs) {                                               \
    linear<WordOf_##SUFFIX, T>(x, weight, bias, out, n, inputs, outputs);                         \
  }                                                                                               \
  void best_outputs_##SUFFIX(const T* x, const uint32_t* weight, const uint32_t* screen_weight,   \
                             const float* scale, const float* sums, const float* slack,           \
                             int64_t* ids, long rows, long inputs, long outputs, long count,      \
                             uint32_t* scratch) {                                                 \
    best_outputs<WordOf_##SUFFIX, T>(x, weight, {screen_weight, scale, sums, slack, inputs / 4},  \
                                     ids, rows, inputs, outputs, (int)count, scratch);            \
  }                                                                                               \
  void blocks_##SUFFIX(const Block* const* block, long num_blocks, T* x, long n, long d,          \
                       long inner, const T* cos, const T* sin, long angle_stride,                 \
                       const int64_t* write_slots, T* pool_k, T* pool_v, long layer_stride,       \
                       const int64_t* described, long requests, long heads, long kv_heads,        \
                       long c, float scale, T* scratch) {                                         \
    blocks<WordOf_##SUFFIX, T>(block, num_blocks, x, n, d, inner, cos, sin, angle_stride,         \
                               write_slots, pool_k, pool_v, layer_stride, described, requests,    \
                               heads, kv_heads, c, scale, scratch);                               \
  }

extern "C" {
EXPORT(float, f32)
EXPORT(uint16_t, bf16)

void accept_chains(const int64_t* tokens, const int64_t* drafts, long b, long k, int64_t* ids,
                   int64_t* emitted, int64_t* last) {
  accept_chain(tokens, drafts, b, k, ids, emitted, last);
}

void shift_chains(const int64_t* ids, const int64_t* last, const int64_t* emitted, long b, long rows,
                  int64_t* shifted, int64_t* ends) {
  shift_inputs(ids, last, emitted, b, rows, shifted, ends);
}

void walk_trees(const int64_t* tokens, const int64_t* nodes, const int64_t* parents, long b, long n,
                long depth, int64_t* ids, int64_t* drawn, int64_t* path, int64_t* emitted) {
  walk_tree(tokens, nodes, parents, b, n, depth, ids, drawn, path, emitted);
}

// Whether `linear` and `blocks` are at home on this processor: wide vectors, and for bfloat16 its
// products. Elsewhere the system's library is faster.
int has_products_f32() {
#if defined(__AVX512F__)
  return 1;
#else
  return 0;
#endif
}

int has_products_bf16() {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}

int has_screen() {
#if defined(__AVX512VNNI__)
  return 1;
#else
  return 0;
#endif
}
}
