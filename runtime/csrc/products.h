// Products C[M, 16 * NV] of A[M, K] and columns of B in vectors of sixteen, over 32-bit words, and what
// becomes of a tile's sums. Every output is summed over K in order, whatever M is and however the work
// is cut: a row's results do not depend on the rows beside it.

#pragma once

#include <omp.h>

#include <type_traits>

#include "matrix_tiles.h"

namespace {

constexpr int kTileRows = 6;             // 6 x 4 accumulators of 32 vector registers
constexpr long kSerialProducts = 65536;  // below this, starting threads costs more than it saves
constexpr long kNearWords = 32;          // how far ahead the only pass over weights asks for them

template <class Word>
using TilesOf = std::conditional_t<Word::kPerWord == 2, MatrixTiles, NoTiles>;

// c (+)= a * b for a tile. a: words of row 0, rows `lda` apart; b[v]: the words of vector v, `step`
// apart; c: float32 rows `ldc` apart. kAhead further vectors, `ahead`, are asked for on the way: their
// first words at the end where kIsOnlyPass, and those of b before, so that what is asked for is still in
// the first-level cache when its turn comes; else all along. A call of its own: inlined into what
// becomes of the sums, accumulators would leave their registers.
template <class Word, int MR, int NV, int kAhead, bool kIsOnlyPass = false>
__attribute__((noinline)) void multiply_tile(const uint32_t* a, long lda, const uint32_t* const* b,
                                             long step, long k, float* c, long ldc,
                                             bool accumulate, const uint32_t* const* ahead) {
  const uint32_t* from[NV];
  const uint32_t* soon[NV];
  V acc[MR][NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) from[v] = b[v];
#pragma GCC unroll 4
  for (int v = 0; v < kAhead; v++) soon[v] = ahead[v];
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[i][v] = accumulate ? load(c + i * ldc + v * kLanes) : V{};
  // Words first .. last - 1, asking for those of `source` that are `shift` further.
  const auto run = [&](long first, long last, const uint32_t* const* source,
                       long shift) __attribute__((always_inline)) {
    for (long kk = first; kk < last; kk++) {
      V column[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) column[v] = load((const float*)(from[v] + kk * step));
#pragma GCC unroll 4
      for (int v = 0; v < kAhead; v++) __builtin_prefetch(source[v] + (kk + shift) * step);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        const uint32_t word = a[i * lda + kk];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[i][v] = Word::multiply_add(acc[i][v], word, column[v]);
      }
    }
  };
  if constexpr (kIsOnlyPass) {
    const long near = std::min(kNearWords, k);
    run(0, k - near, from, near);
    run(k - near, k, soon, near - k);
  } else {
    run(0, k, soon, 0);
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) store(c + i * ldc + v * kLanes, acc[i][v]);
}

template <class Word, int NV, int kAhead, bool kIsOnlyPass = false>
void multiply_rows(long rows, const uint32_t* a, long lda, const uint32_t* const* b, long step, long k,
                   float* c, long ldc, bool accumulate, const uint32_t* const* ahead) {
  const auto tile = [&](auto f) { f(a, lda, b, step, k, c, ldc, accumulate, ahead); };
  switch (rows) {
    case 6: tile(multiply_tile<Word, 6, NV, kAhead, kIsOnlyPass>); break;
    case 5: tile(multiply_tile<Word, 5, NV, kAhead, kIsOnlyPass>); break;
    case 4: tile(multiply_tile<Word, 4, NV, kAhead, kIsOnlyPass>); break;
    case 3: tile(multiply_tile<Word, 3, NV, kAhead, kIsOnlyPass>); break;
    case 2: tile(multiply_tile<Word, 2, NV, kAhead, kIsOnlyPass>); break;
    case 1: tile(multiply_tile<Word, 1, NV, kAhead, kIsOnlyPass>); break;
    default: break;
  }
}

// ---------------------------------------------------------------- attention's products

template <class Word, int NV>
void multiply_columns(long m, const uint32_t* a, long lda, const uint32_t* b, long ldb, float* c,
                      long ldc, long k, bool accumulate) {
  const uint32_t* from[NV];
  for (int v = 0; v < NV; v++) from[v] = b + v * kLanes;
  for (long row = 0; row < m; row += kTileRows)
    multiply_rows<Word, NV, 0>(std::min<long>(kTileRows, m - row), a + row * lda, lda, from, ldb,
                               k, c + row * ldc, ldc, accumulate, nullptr);
}

// b: [k, 16 * vectors] words, rows `ldb` apart. `matrix_tiles`: null unless they can multiply k words.
template <class Word>
void multiply(long m, long vectors, const uint32_t* a, long lda, const uint32_t* b, long ldb,
              float* c, long ldc, long k, bool accumulate, TilesOf<Word>* matrix_tiles) {
#if HAS_MATRIX_TILES
  if constexpr (std::is_same_v<TilesOf<Word>, MatrixTiles>)
    if (matrix_tiles)
      return multiply_in_matrix_tiles(m, vectors, a, lda, b, ldb, c, ldc, k, accumulate, *matrix_tiles);
#endif
  for (; vectors >= 4; vectors -= 4, b += 4 * kLanes, c += 4 * kLanes)
    multiply_columns<Word, 4>(m, a, lda, b, ldb, c, ldc, k, accumulate);
  switch (vectors) {
    case 3: multiply_columns<Word, 3>(m, a, lda, b, ldb, c, ldc, k, accumulate); break;
    case 2: multiply_columns<Word, 2>(m, a, lda, b, ldb, c, ldc, k, accumulate); break;
    case 1: multiply_columns<Word, 1>(m, a, lda, b, ldb, c, ldc, k, accumulate); break;
    default: break;
  }
}

// ---------------------------------------------------------------- packed linears
// Weights [O, I] lie in panels of sixteen outputs, [O / 16, I / per word, 16] words, zeros behind the
// last output. A sink says which panels make a tile and what becomes of its sums.

template <class T>
struct PanelSink {
  const uint32_t* weight;
  long words;         // of one row: inputs / per word
  const float* bias;  // may be null
  T* out;
  long outputs;       // columns of `out`

  void panels(long p, int vectors, const uint32_t** b) const {
    for (int v = 0; v < vectors; v++) b[v] = weight + (p + v) * words * kLanes;
  }
  V with_bias(V sum, long panel) const {
    if (!bias) return sum;
    const long left = outputs - panel * kLanes;
    return sum + (left >= kLanes ? load(bias + panel * kLanes) : load_tail(bias + panel * kLanes, left));
  }
};

// out = sums.
template <class T>
struct Store : PanelSink<T> {
  static constexpr int kVectorsPerPanel = 1;
  void take(long row, long p, int vectors, const float* sums) const {
    for (int v = 0; v < vectors; v++) {
      T* to = this->out + row * this->outputs + (p + v) * kLanes;
      const long left = this->outputs - (p + v) * kLanes;
      const V sum = this->with_bias(load(sums + v * kLanes), p + v);
      if (left >= kLanes)
        store(to, sum);
      else
        store_tail(to, sum, left);
    }
  }
};

// out += sums, each rounded to T first; outputs are a multiple of sixteen.
template <class T>
struct AddTo : PanelSink<T> {
  static constexpr int kVectorsPerPanel = 1;
  void take(long row, long p, int vectors, const float* sums) const {
    for (int v = 0; v < vectors; v++) {
      T* to = this->out + row * this->outputs + (p + v) * kLanes;
      const V sum = this->with_bias(load(sums + v * kLanes), p + v);
      store(to, load(to) + rounded(to, sum));
    }
  }
};

// out = silu(gate) * up, both rounded to T first. Gate and up are the two halves of the panels, each a
// whole number of them; half of a tile's vectors are of the one, half of the other.
template <class T>
struct SiluMul : PanelSink<T> {
  static constexpr int kVectorsPerPanel = 2;
  void panels(long p, int vectors, const uint32_t** b) const {
    const long up = this->outputs / kLanes;
    for (int v = 0; v < vectors / 2; v++) {
      b[v] = this->weight + (p + v) * this->words * kLanes;
      b[v + vectors / 2] = b[v] + up * this->words * kLanes;
    }
  }
  void take(long row, long p, int vectors, const float* sums) const {
    const T* as = this->out;
    for (int v = 0; v < vectors / 2; v++) {
      const long column = (p + v) * kLanes;
      V gate = load(sums + v * kLanes), up = load(sums + (v + vectors / 2) * kLanes);
      if (this->bias) {
        gate += load(this->bias + column);
        up += load(this->bias + this->outputs + column);
      }
      store(this->out + row * this->outputs + column, silu_times(rounded(as, gate), rounded(as, up)));
    }
  }
};

// Rows first .. last - 1 of one tile of panels. Weights are read once: what is read next, `ahead`, is
// asked for meanwhile.
template <class Word, int NV, class Sink>
void linear_tiles(const uint32_t* x, long first, long last, long p, const uint32_t* const* ahead,
                  const Sink& sink, TilesOf<Word>& matrix_tiles) {
#if HAS_MATRIX_TILES
  if constexpr (std::is_same_v<TilesOf<Word>, MatrixTiles>)
    if (matrix_tiles.can_multiply(sink.words))
      return linear_in_matrix_tiles<NV>(x, first, last, p, ahead, sink, matrix_tiles);
#endif
  const uint32_t* b[NV];
  alignas(64) float sums[kTileRows * NV * kLanes];
  sink.panels(p, NV, b);
  constexpr int kShare = (NV + 1) / 2;
  const long tiles = (last - first + kTileRows - 1) / kTileRows;
  const long size = (last - first + tiles - 1) / tiles;  // of a tile: all about as many rows
  for (long row = first; row < last; row += size) {
    const long rows = std::min(size, last - row), done = (row - first) / size;
    const uint32_t* from = x + row * sink.words;
    if (tiles == 1)
      multiply_rows<Word, NV, NV, true>(rows, from, sink.words, b, kLanes, sink.words, sums,
                                        NV * kLanes, false, ahead);
    else if (done < 2 && done * kShare + kShare <= NV)  // half of them each
      multiply_rows<Word, NV, kShare>(rows, from, sink.words, b, kLanes, sink.words, sums,
                                      NV * kLanes, false, ahead + done * kShare);
    else
      multiply_rows<Word, NV, 0>(rows, from, sink.words, b, kLanes, sink.words, sums, NV * kLanes,
                                 false, nullptr);
    for (long i = 0; i < rows; i++) sink.take(row + i, p, NV, sums + i * NV * kLanes);
  }
}

// The sixteen outputs of one panel for one row, with the bits that linear_tiles gives them.
template <class Word>
void multiply_panel(const uint32_t* row, const uint32_t* panel, long words, float* sums,
                    TilesOf<Word>& matrix_tiles) {
#if HAS_MATRIX_TILES
  if constexpr (std::is_same_v<TilesOf<Word>, MatrixTiles>)
    if (matrix_tiles.can_multiply(words)) {
      matrix_tiles.shape(1, 1);
      return multiply_upper<1, 0>(row, words, &panel, kLanes, words, sums, kLanes, false, nullptr);
    }
#endif
  multiply_tile<Word, 1, 1, 0>(row, words, &panel, kLanes, words, sums, kLanes, false, nullptr);
}

// The panels of one thread.
struct Share {
  long from, to;
  explicit Share(long panels) {
    const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
    from = panels * thread / threads;
    to = panels * (thread + 1) / threads;
  }
};

// What a linear of this sink reads first, in this thread.
struct Ahead {
  const uint32_t* panels[4] = {};
  Ahead() {}
  template <class Sink>
  Ahead(const Sink& sink, long panels) {
    const Share share(panels);
    if (share.to - share.from >= 4 / Sink::kVectorsPerPanel) sink.panels(share.from, 4, this->panels);
  }
};

// This thread's share of a linear over n rows x: neighbouring panels of all rows. `after`: what the
// thread reads afterwards.
template <class Word, class Sink>
void linear_share(const uint32_t* x, long n, long panels, const Sink& sink, TilesOf<Word>& tiles,
                  const Ahead& after = {}) {
  constexpr int kPer = Sink::kVectorsPerPanel;
  const Share share(panels);
  const uint32_t* ahead[4];
  for (long first = 0; first < n; first += kRowBlock) {
    const long last = std::min(n, first + kRowBlock);
    long p = share.from;
    const auto look_ahead = [&](int width) {
      if (p + 2 * width / kPer <= share.to) return sink.panels(p + width / kPer, width, ahead);
      if (after.panels[0]) return (void)std::copy_n(after.panels, width, ahead);
      sink.panels(p, width, ahead);
    };
    for (; p + 4 / kPer <= share.to; p += 4 / kPer) {
      look_ahead(4);
      linear_tiles<Word, 4>(x, first, last, p, ahead, sink, tiles);
    }
    for (; p + 2 / kPer <= share.to; p += 2 / kPer) {
      look_ahead(2);
      linear_tiles<Word, 2>(x, first, last, p, ahead, sink, tiles);
    }
    if constexpr (kPer == 1)
      if (p < share.to) {
        look_ahead(1);
        linear_tiles<Word, 1>(x, first, last, p, ahead, sink, tiles);
      }
  }
}

inline long panels_of(long outputs) { return (outputs + kLanes - 1) / kLanes; }

template <class Word, class T>
void linear(const T* x, const uint32_t* weight, const float* bias, T* out, long n, long inputs,
            long outputs) {
  const Store<T> sink{{weight, inputs / Word::kPerWord, bias, out, outputs}};
#pragma omp parallel if (n * inputs * outputs > kSerialProducts)
  {
    TilesOf<Word> tiles;
    linear_share<Word>((const uint32_t*)x, n, panels_of(outputs), sink, tiles);
  }
}

}  // namespace
