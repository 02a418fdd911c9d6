// Paged attention: keys and values are read where they lie, by slot, in blocks with a running softmax.
//
// Shapes: N rows, H query heads, G key/value heads, R = H/G, C head width.

#pragma once

#include <type_traits>
#include <vector>

#include <omp.h>

#include "products.h"

namespace {

constexpr int kKeyBlock = 64;  // keys handled together
constexpr int kMaxRows = 96;   // query rows (R * positions) of one tile
constexpr float kHidden = -1e30f;  // score of a key that a row does not see
constexpr float kSlack = 8.0f;  // by this much exponents may exceed zero before sums are scaled anew

// to[word][key] = rows[key][word] for the first `keys` of kKeyBlock rows of `words` words; `keys` is a
// multiple of sixteen.
void transpose_words(const uint32_t* const* rows, long words, long keys, uint32_t* to) {
#if defined(__AVX512F__)
  for (long w = 0; w < words; w += kLanes) {
    const __mmask16 mask = words - w >= kLanes ? 0xffff : (__mmask16)((1u << (words - w)) - 1);
    for (long key = 0; key < keys; key += kLanes) {
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
    for (long key = 0; key < keys; key++) to[w * kKeyBlock + key] = rows[key][w];
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

  // Keys that its rows see, at most.
  long num_keys() const {
    return request->mask ? request->kv_len : request->kv_len - request->q_len + q_start + q_count;
  }
};

struct Shape {
  long heads, kv_heads, width, padded_width, q_stride;
  float scale;
};

inline long padded_width(long c) { return (c + kLanes - 1) / kLanes * kLanes; }

// Scratch of one thread. Grows to the largest shape seen and is reused.
struct Scratch {
  std::vector<uint32_t> q, k, v, p;
  std::vector<float> scores, out, staged;
  std::vector<char> zeros;
  // Of each row: what its exponents are taken less, near the highest so far; its weights' sum by lane.
  float base[kMaxRows];
  alignas(64) float total[kMaxRows * kLanes];
};

// Rows of one head are short and far apart: without this the block that reads them waits for memory.
// Inlined, for GCC drops calls of functions that do nothing but prefetch.
template <class T>
inline __attribute__((always_inline)) void prefetch_keys(const Task& task, const Shape& shape, const T* pool_k, const T* pool_v, long first,
                   long last) {
  for (long j = first; j < last; j++) {
    const long at = (task.request->slots[j] * shape.kv_heads + task.kv_head) * shape.width;
    for (long i = 0; i < shape.width; i += 64 / (long)sizeof(T)) {
      __builtin_prefetch(pool_k + at + i);
      __builtin_prefetch(pool_v + at + i);
    }
  }
}

// `next`: what this thread does afterwards, or null.
template <class Word, class T>
void attend_tile(const Task& task, const Task* next, const Shape& shape, const T* q, const T* pool_k,
                 const T* pool_v, T* out, Scratch& s, TilesOf<Word>& tiles) {
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
  float *base_of = s.base, *total_of = s.total;
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
  std::fill_n(base_of, m, kHidden);
  std::fill_n(total_of, m * kLanes, 0.0f);

  const long first_position = request.kv_len - request.q_len + task.q_start;
  const bool is_tree = request.mask != nullptr;
  const long prefix_len = request.kv_len - request.block_len;
  const long kv_end = task.num_keys();
  // The weights of a block are whole tiles, hidden keys among them, where its scores are.
  TilesOf<Word>* used_tiles = tiles.can_multiply(words) ? &tiles : nullptr;
  const long key_vectors = used_tiles ? kTileWords * Word::kPerWord / kLanes : 1;
  const float scale = shape.scale * kLog2E;  // exponents are those of two
  const V lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (long start = 0; start < kv_end; start += kKeyBlock) {
    const long count = std::min<long>(kKeyBlock, kv_end - start);
    const long parts = (count + key_vectors * kLanes - 1) / (key_vectors * kLanes);
    const long vectors = parts * key_vectors;  // of keys; the last may have hidden ones
    const long num_keys = vectors * kLanes, num_words = num_keys / Word::kPerWord;
    // The keys that are needed next are asked for in four parts, between what keeps the core busy.
    const bool is_last = start + kKeyBlock >= kv_end;
    const Task* soon = is_last ? next : &task;
    const long soon_first = is_last ? 0 : start + kKeyBlock;
    const long soon_count = soon ? std::min<long>(kKeyBlock, soon->num_keys() - soon_first) : 0;
    const auto prefetch_part = [&](long part) __attribute__((always_inline)) {
      prefetch_keys(*soon, shape, pool_k, pool_v, soon_first + soon_count * part / 4,
                    soon_first + soon_count * (part + 1) / 4);
    };
    if (soon_count) prefetch_part(0);
    const T* v_rows[kKeyBlock];
    const uint32_t* k_rows[kKeyBlock];
    for (long j = 0; j < num_keys; j++) {
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
    transpose_words(k_rows, words, num_keys, k_words);
    if (soon_count) prefetch_part(1);
    for (long j = 0; j < num_words; j++) {
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

    if (soon_count) prefetch_part(2);
    multiply<Word>(m, vectors, q_words, words, k_words, kKeyBlock, scores, kKeyBlock, words, false,
                   used_tiles);
    if (soon_count) prefetch_part(3);

    // Scores to weights, row by row; full blocks with a constant length, so that loops are unrolled.
    const auto weigh = [&](const long row, const auto vectors) {
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
        std::fill_n(p, num_words, 0u);
        return;
      }
      V value[kKeyBlock / kLanes];
      V best = splat(kHidden);
#pragma GCC unroll 4
      for (long v = 0; v < vectors; v++) {
        value[v] = load(score + v * kLanes);
        if (visible < num_keys)
          value[v] = select(lane + (float)(v * kLanes) < splat((float)visible), value[v],
                            splat(kHidden));
        if (is_masked)
          value[v] = select(load(hidden + v * kLanes) < splat(0.5f), value[v], splat(kHidden));
        best = vmax(value[v], best);
      }
      if (is_masked && max(best) == kHidden) {  // sees nothing of this block
        std::fill_n(p, num_words, 0u);
        return;
      }
      float* total = total_of + row * kLanes;
      if (any(best * scale > splat(base_of[row] + kSlack))) {
        const float base = max(best) * scale;
        const V decay = vexp2(splat(base_of[row] - base));
        store(total, load(total) * decay);
        float* o = sums + row * cp;
        for (long i = 0; i < cp; i += kLanes) store(o + i, load(o + i) * decay);
        base_of[row] = base;
      }
      const float base = base_of[row];
      V here{};
#pragma GCC unroll 4
      for (long v = 0; v < vectors; v++) {
        const V e = vexp2(value[v] * scale - base);  // exactly zero for hidden keys
        here += e;
        if (Word::kPerWord == 1)
          store((float*)p + v * kLanes, e);
        else
          store((uint16_t*)p + v * kLanes, e);
      }
      store(total, load(total) + here);
    };
    for (long row = 0; row < m; row++)
      if (vectors == kKeyBlock / kLanes)
        weigh(row, std::integral_constant<long, kKeyBlock / kLanes>{});
      else
        weigh(row, vectors);
    multiply<Word>(m, cp / kLanes, p_words, key_words, v_words, cp, sums, cp, num_words, true,
                   used_tiles);
  }
  for (long row = 0; row < m; row++) {
    T* to = out + ((request.row_start + task.q_start + row / group) * shape.heads +
                   task.kv_head * group + row % group) * c;
    const float* o = sums + row * cp;
    const float scale = 1.0f / sum(load(total_of + row * kLanes));
    for (long i = 0; i < c; i += kLanes) {
      const long left = std::min<long>(kLanes, c - i);
      if (left == kLanes)
        store(to + i, load(o + i) * scale);
      else
        store_tail(to + i, load(o + i) * scale, left);
    }
  }
}

// The tiles of one batch: which rows of which request go with which key/value head.
struct Batch {
  std::vector<Request> requests;
  std::vector<Task> tasks;
  std::vector<double> costs;  // of the tasks up to each one, this included
};

// The first tile of a thread: tiles are dealt out in order, about as much work to each thread.
inline long first_task(const std::vector<double>& costs, long thread, long threads) {
  const double share = costs.empty() ? 0 : costs.back() / threads;
  return std::lower_bound(costs.begin(), costs.end(), share * thread + share / 1e6) - costs.begin();
}

inline std::vector<double> add_up(const std::vector<Task>& tasks, long group) {
  std::vector<double> costs;
  double cost = 0;
  for (const Task& task : tasks) {
    // Laying out 64 keys takes as long as eight rows take with them.
    cost += (double)(task.num_keys() + kKeyBlock) * (8 + group * task.q_count);
    costs.push_back(cost);
  }
  return costs;
}

// What the thread with the most work has to do.
inline double most_work(const std::vector<double>& costs, long threads) {
  double most = 0;
  for (long thread = 0; thread < threads; thread++) {
    const long first = first_task(costs, thread, threads);
    const long last = thread + 1 == threads ? (long)costs.size() : first_task(costs, thread + 1, threads);
    if (last > first) most = std::max(most, costs[last - 1] - (first ? costs[first - 1] : 0));
  }
  return most;
}

// Tiles whose rows are cut where a thread's share of the work ends: a few heads on more threads, or
// three on two. A row's result does not depend on the rows beside it.
inline std::vector<Task> cut_at_shares(const std::vector<Task>& tasks, const std::vector<double>& costs,
                                       long threads) {
  std::vector<Task> cut;
  for (size_t i = 0; i < tasks.size(); i++) {
    const double before = i ? costs[i - 1] : 0;
    Task task = tasks[i];
    long taken = 0;
    for (long thread = 1; thread < threads; thread++) {
      const double part = (costs.back() * thread / threads - before) / (costs[i] - before);
      const long rows = part > 0 && part < 1 ? std::lround(part * tasks[i].q_count) - taken : 0;
      if (rows <= 0 || rows >= task.q_count) continue;
      cut.push_back({task.request, task.kv_head, task.q_start, rows});
      task.q_start += rows, task.q_count -= rows, taken += rows;
    }
    cut.push_back(task);
  }
  return cut;
}

// `described`: six numbers per request, as runtime/cpu_kernels.py says.
Batch make_batch(const int64_t* described, long num_requests, const Shape& shape) {
  const long group = shape.heads / shape.kv_heads, threads = omp_get_max_threads();
  const long positions = std::max<long>(1, kMaxRows / group);
  Batch batch;
  batch.requests.resize(num_requests);
  for (long b = 0; b < num_requests; b++) {
    const int64_t* d = described + 6 * b;
    batch.requests[b] = {(long)d[0], (long)d[1], (long)d[2], (const int64_t*)d[3],
                         (long)d[4], (const uint8_t*)d[5]};
    for (long start = 0; start < d[1]; start += positions)
      for (long g = 0; g < shape.kv_heads; g++) {
        batch.tasks.push_back({&batch.requests[b], g, start, std::min<long>(positions, d[1] - start)});
      }
  }
  batch.costs = add_up(batch.tasks, group);
  if (threads > 1 && (long)batch.tasks.size() < 8 * threads) {
    std::vector<Task> cut = cut_at_shares(batch.tasks, batch.costs, threads);
    std::vector<double> costs = add_up(cut, group);
    if (most_work(costs, threads) < most_work(batch.costs, threads)) {
      batch.tasks = std::move(cut);
      batch.costs = std::move(costs);
    }
  }
  return batch;
}

// The tiles of one thread: neighbours, about as much work as every other thread has.
struct TaskRange {
  long first, last;
  explicit TaskRange(const Batch& batch) {
    const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
    first = first_task(batch.costs, thread, threads);
    last = thread + 1 == threads ? (long)batch.tasks.size() : first_task(batch.costs, thread + 1, threads);
  }
};

// Ask for what this thread's first tile reads first.
template <class T>
inline __attribute__((always_inline)) void prefetch_first(const Batch& batch, const TaskRange& range,
                                                          const Shape& shape, const T* pool_k,
                                                          const T* pool_v) {
  if (range.first == range.last) return;
  const Task& task = batch.tasks[range.first];
  prefetch_keys(task, shape, pool_k, pool_v, 0, std::min<long>(kKeyBlock, task.num_keys()));
}

// Inside of a parallel region, by all of its threads; returns when all are done.
template <class Word, class T>
void attend_tasks(const Batch& batch, const TaskRange& range, const Shape& shape, const T* q,
                  const T* pool_k, const T* pool_v, T* out, TilesOf<Word>& tiles) {
  static thread_local Scratch scratch_of_thread;
  for (long i = range.first; i < range.last; i++)
    attend_tile<Word, T>(batch.tasks[i], i + 1 < range.last ? &batch.tasks[i + 1] : nullptr, shape, q,
                         pool_k, pool_v, out, scratch_of_thread, tiles);
#pragma omp barrier
}

template <class Word, class T>
void attend(const T* q, const T* k, const T* v, long q_stride, long kv_stride,
            const int64_t* write_slots, long n, T* pool_k, T* pool_v, const int64_t* described,
            long requests, long heads, long kv_heads, long c, float scale, T* out) {
  const Shape shape{heads, kv_heads, c, padded_width(c), q_stride, scale};
  const Batch batch = make_batch(described, requests, shape);
  const long kv_width = kv_heads * c;
#pragma omp parallel
  {
#pragma omp for
    for (long i = 0; i < n; i++) {
      std::memcpy(pool_k + write_slots[i] * kv_width, k + i * kv_stride, kv_width * sizeof(T));
      std::memcpy(pool_v + write_slots[i] * kv_width, v + i * kv_stride, kv_width * sizeof(T));
    }
    TilesOf<Word> tiles;
    attend_tasks<Word, T>(batch, TaskRange(batch), shape, q, pool_k, pool_v, out, tiles);
  }
}

}  // namespace
