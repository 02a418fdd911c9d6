// Decoder blocks as a whole: every row through all layers inside of one parallel region, so that a step
// of few rows is not a thousand small calls. Arithmetic and rounding are those of the single kernels.

#pragma once

#include "attention.h"
#include "elementwise.h"

namespace {

// One block's weights; mirrored by runtime/cpu_kernels.py. Norms and biases may be null.
struct Block {
  const float *input_norm, *post_norm, *q_norm, *k_norm;
  const uint32_t *qkv, *out, *gate_up, *down;
  const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias;
  float eps;
};

template <class T>
struct Stack {
  const Block* const* blocks;
  long num_blocks, n, d, inner;
  T* x;  // [n, d], the residual stream, updated in place
  const T *cos, *sin;
  long angle_stride;
  const int64_t* write_slots;
  T *pool_k, *pool_v;  // of the first layer; layers are `layer_stride` elements apart
  long layer_stride;
  T* scratch;  // n * (d + (H + 2 G) C + H C + inner) elements
};

template <class Word, class T>
void run_stack(const Stack<T>& stack, const Batch& batch, const Shape& shape) {
  const long n = stack.n, d = stack.d, c = shape.width;
  const long q_width = shape.heads * c, kv_width = shape.kv_heads * c;
  const long qkv_width = q_width + 2 * kv_width;
  T* normed = stack.scratch;
  T* qkv = normed + n * d;
  T* attended = qkv + n * qkv_width;
  T* activated = attended + n * q_width;
  const auto words = [](long width) { return width / Word::kPerWord; };

  const auto norm = [&](const float* weight, float eps) -> const uint32_t* {
    if (!weight) return (const uint32_t*)stack.x;
#pragma omp for
    for (long i = 0; i < n; i++)
      norm_row<T>(stack.x + i * d, nullptr, weight, normed + i * d, d, eps);
    return (const uint32_t*)normed;
  };

#pragma omp parallel
  {
    const TaskRange tasks(batch);
    TilesOf<Word> tiles;
    for (long layer = 0; layer < stack.num_blocks; layer++) {
      const Block& block = *stack.blocks[layer];
      T* pool_k = stack.pool_k + layer * stack.layer_stride;
      T* pool_v = stack.pool_v + layer * stack.layer_stride;
      const Store<T> to_qkv{{block.qkv, words(d), block.qkv_bias, qkv, qkv_width}};
      const AddTo<T> add_out{{block.out, words(q_width), block.out_bias, stack.x, d}};
      const SiluMul<T> to_activated{
          {block.gate_up, words(d), block.gate_up_bias, activated, stack.inner}};
      const AddTo<T> add_down{{block.down, words(stack.inner), block.down_bias, stack.x, d}};

      prefetch_first(batch, tasks, shape, pool_k, pool_v);
      const uint32_t* rows = norm(block.input_norm, block.eps);
      linear_share<Word>(rows, n, panels_of(qkv_width), to_qkv, tiles, Ahead(add_out, panels_of(d)));
#pragma omp barrier
#pragma omp for
      for (long i = 0; i < n; i++) {
        T* row = qkv + i * qkv_width;
        if (block.q_norm) norm_heads_row<T>(row, block.q_norm, shape.heads, c, block.eps);
        if (block.k_norm)
          norm_heads_row<T>(row + q_width, block.k_norm, shape.kv_heads, c, block.eps);
        rotate_row(row, stack.cos + i * stack.angle_stride, stack.sin + i * stack.angle_stride,
                   shape.heads + shape.kv_heads, c);
        const long to = stack.write_slots[i] * kv_width;
        std::memcpy(pool_k + to, row + q_width, kv_width * sizeof(T));
        std::memcpy(pool_v + to, row + q_width + kv_width, kv_width * sizeof(T));
      }
      attend_tasks<Word, T>(batch, tasks, shape, qkv, pool_k, pool_v, attended, tiles);
      linear_share<Word>((const uint32_t*)attended, n, panels_of(d), add_out, tiles,
                         Ahead(to_activated, panels_of(stack.inner)));
#pragma omp barrier

      rows = norm(block.post_norm, block.eps);
      linear_share<Word>(rows, n, panels_of(stack.inner), to_activated, tiles,
                         Ahead(add_down, panels_of(d)));
#pragma omp barrier
      Ahead next_layer;
      if (layer + 1 < stack.num_blocks) {
        const Block& next = *stack.blocks[layer + 1];
        next_layer = Ahead(Store<T>{{next.qkv, words(d), nullptr, nullptr, qkv_width}},
                           panels_of(qkv_width));
      }
      linear_share<Word>((const uint32_t*)activated, n, panels_of(d), add_down, tiles, next_layer);
#pragma omp barrier
    }
  }
}

}  // namespace
