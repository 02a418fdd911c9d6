// The best outputs of a packed linear, row by row, without computing all of them.
//
// An int8 copy of the weights, half of what bfloat16 takes, gives every output up to a known error. The
// k-th highest lower bound is a floor: only panels with an upper bound above it can hold one of the k
// best, and only those are multiplied as `linear` does it. The result is that of choosing among all
// outputs, bit for bit.
//
// Rows are held in sixteen bits, a high and a low byte: their rounding adds little to the weights'.

#pragma once

#include "products.h"

namespace {

constexpr int kMostBest = 8;
constexpr int kMostRows = 4;

// The int8 copy. Outputs are padded to whole panels; a padded one has infinite slack.
struct Screen {
  const uint32_t* weight;  // [P, words, 16], four inputs a word
  const float* scale;      // [16 P]: weights are about scale * int8
  const float* sums;       // [16 P]: sums of the int8
  const float* slack;      // [16 P]: an output is off by at most slack * |row|
  long words;              // of one row: inputs / 4
};

// The `count` highest values, the lowest id first among equals.
struct Best {
  int count;
  float values[kMostBest];
  int64_t ids[kMostBest];
  explicit Best(int count) : count(count) {
    std::fill_n(values, kMostBest, -INFINITY);
    std::fill_n(ids, kMostBest, INT64_MAX);
  }
  float lowest() const { return values[count - 1]; }
  void offer(float value, int64_t id) {
    const auto is_behind = [&](int i) {
      return value > values[i] || (value == values[i] && id < ids[i]);
    };
    if (!is_behind(count - 1)) return;
    int i = count - 1;
    for (; i > 0 && is_behind(i - 1); i--) values[i] = values[i - 1], ids[i] = ids[i - 1];
    values[i] = value, ids[i] = id;
  }
  void merge(const Best& other) {
    for (int i = 0; i < count; i++)
      if (other.ids[i] != INT64_MAX) offer(other.values[i], other.ids[i]);
  }
};

#if defined(__AVX512VNNI__)

// Rows as sixteen-bit numbers: value = step * (256 * (high - 128) + low).
template <class T>
struct Quantised {
  uint32_t *high, *low;  // [rows, words]
  float step[kMostRows], norm[kMostRows];

  Quantised(const T* x, long rows, long inputs, uint32_t* scratch)
      : high(scratch), low(scratch + rows * inputs / 4) {
    auto* high_bytes = (uint8_t*)high;
    auto* low_bytes = (uint8_t*)low;
    for (long row = 0; row < rows; row++) {
      const T* from = x + row * inputs;
      float largest = 0, squares = 0;
      for (long i = 0; i < inputs; i++) {
        const float value = to_float(from[i]);
        largest = std::max(largest, std::fabs(value));
        squares += value * value;
      }
      norm[row] = std::sqrt(squares);
      step[row] = largest / 32767;
      const float per_step = largest > 0 ? 32767 / largest : 0;
      for (long i = 0; i < inputs; i++) {
        const int number = (int)std::nearbyint(to_float(from[i]) * per_step);
        high_bytes[row * inputs + i] = (uint8_t)((number >> 8) + 128);
        low_bytes[row * inputs + i] = (uint8_t)(number & 255);
      }
    }
  }
};

template <int MR, int NV, class T>
void screen_tile(const Screen& screen, const Quantised<T>& x, long p, long ahead, float* about,
                 long padded) {
  const uint32_t* from = screen.weight + p * screen.words * kLanes;
  const long step = screen.words * kLanes;
  __m512i high[MR][NV], low[MR][NV];
#pragma GCC unroll 4
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) high[i][v] = low[i][v] = _mm512_setzero_si512();
  for (long word = 0; word < screen.words; word++) {
    __m512i weights[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      weights[v] = _mm512_loadu_si512(from + v * step + word * kLanes);
      __builtin_prefetch(from + (v + ahead) * step + word * kLanes);
    }
#pragma GCC unroll 4
    for (int i = 0; i < MR; i++) {
      const __m512i up = _mm512_set1_epi32((int)x.high[i * screen.words + word]);
      const __m512i down = _mm512_set1_epi32((int)x.low[i * screen.words + word]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) {
        high[i][v] = _mm512_dpbusd_epi32(high[i][v], up, weights[v]);
        low[i][v] = _mm512_dpbusd_epi32(low[i][v], down, weights[v]);
      }
    }
  }
  for (int i = 0; i < MR; i++)
    for (int v = 0; v < NV; v++) {
      const long at = (p + v) * kLanes;
      const V number = (V)_mm512_cvtepi32_ps(high[i][v]) - load(screen.sums + at) * 128;
      const V sum = number * 256 + (V)_mm512_cvtepi32_ps(low[i][v]);
      store(about + i * padded + at, sum * load(screen.scale + at) * x.step[i]);
    }
}

template <int MR, class T>
void screen_share(const Screen& screen, const Quantised<T>& x, const Share& share, float* about,
                  long padded) {
  constexpr int kWidth = MR > 2 ? 2 : 4;  // accumulators stay in registers
  long p = share.from;
  for (; p + kWidth <= share.to; p += kWidth) {
    const long ahead = p + 2 * kWidth <= share.to ? kWidth : 0;
    screen_tile<MR, kWidth>(screen, x, p, ahead, about, padded);
  }
  for (; p < share.to; p++) screen_tile<MR, 1>(screen, x, p, 0, about, padded);
}

// ids: [rows, count], best first. scratch: rows * (16 P + inputs / 2) words.
template <class Word, class T>
void best_outputs(const T* x, const uint32_t* weight, const Screen& screen, int64_t* ids, long rows,
                  long inputs, long outputs, int count, uint32_t* scratch) {
  const long panels = panels_of(outputs), padded = panels * kLanes;
  const long words = inputs / Word::kPerWord;
  float* about = (float*)scratch;
  const Quantised<T> quantised(x, rows, inputs, scratch + rows * padded);
  std::vector<Best> floors(rows, Best(count)), found(rows, Best(count));
#pragma omp parallel
  {
    const Share share(panels);
    TilesOf<Word> tiles;
    switch (rows) {
      case 1: screen_share<1>(screen, quantised, share, about, padded); break;
      case 2: screen_share<2>(screen, quantised, share, about, padded); break;
      case 3: screen_share<3>(screen, quantised, share, about, padded); break;
      default: screen_share<4>(screen, quantised, share, about, padded); break;
    }
    for (long row = 0; row < rows; row++) {
      Best lower(count);
      for (long p = share.from; p < share.to; p++) {
        const V slack = load(screen.slack + p * kLanes) * quantised.norm[row];
        const V least = load(about + row * padded + p * kLanes) - slack;
        if (any(least > splat(lower.lowest())))
          for (int lane = 0; lane < kLanes; lane++) lower.offer(least[lane], p * kLanes + lane);
      }
#pragma omp critical
      floors[row].merge(lower);
    }
#pragma omp barrier
    for (long row = 0; row < rows; row++) {
      const float floor = floors[row].lowest();
      // Outputs are compared as they are rounded: what is a little lower may be equal then.
      const V threshold = splat(floor - std::fabs(floor) / 128);
      Best best(count);
      for (long p = share.from; p < share.to; p++) {
        const V slack = load(screen.slack + p * kLanes) * quantised.norm[row];
        if (!any(load(about + row * padded + p * kLanes) + slack >= threshold)) continue;
        const uint32_t* panel = weight + p * words * kLanes;
        alignas(64) float sums[kLanes];
        multiply_panel<Word>((const uint32_t*)x + row * words, panel, words, sums, tiles);
        const V exact = rounded(x, load(sums));
        for (int lane = 0; lane < kLanes && p * kLanes + lane < outputs; lane++)
          best.offer(exact[lane], p * kLanes + lane);
      }
#pragma omp critical
      found[row].merge(best);
    }
  }
  for (long row = 0; row < rows; row++)
    for (int i = 0; i < count; i++) {
      const int64_t id = found[row].ids[i];
      ids[row * count + i] = id == INT64_MAX ? i : id;  // not a number anywhere
    }
}

#else

template <class Word, class T>
void best_outputs(const T*, const uint32_t*, const Screen&, int64_t*, long, long, long, int,
                  uint32_t*) {}

#endif

}  // namespace
