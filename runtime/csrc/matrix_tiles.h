// Products of bfloat16 in the processor's matrix tiles (AMX), where it has them: sixteen rows cost about
// as much as one. A panel is what a tile of weights has to look like: words of two inputs, sixteen outputs
// wide. Every output is summed over its inputs in order, sixteen words at a time, so a row's bits depend
// neither on the rows beside it nor on how they are cut into tiles.

#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_MATRIX_TILES 1
#endif

namespace {

constexpr long kTileWords = 16;  // contracted by one instruction, 32 bfloat16
constexpr long kMatrixRows = 16;
constexpr long kNearestWords = 288;  // of two panels, 36 KB
constexpr long kRowBlock = 192;      // rows of A that stay in the second-level cache

// Of words that are not multiplied in tiles.
struct NoTiles {
  bool can_multiply(long) const { return false; }
};

#if HAS_MATRIX_TILES

// Linux saves tile registers for processes that have asked for them.
inline bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool is_granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_granted;
}

// A thread's tile registers: 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights. Other libraries find their
// own configuration again afterwards.
class MatrixTiles {
 public:
  MatrixTiles() : is_allowed_(may_use_tiles()) {
    if (is_allowed_) _tile_storeconfig(&before_);
  }
  MatrixTiles(const MatrixTiles&) = delete;
  ~MatrixTiles() {
    if (!upper_) return;
    if (before_.palette)
      configure(before_);
    else
      _tile_release();
  }

  // Whether rows of so many words can be multiplied here.
  bool can_multiply(long words) const { return is_allowed_ && words % kTileWords == 0; }

  // `upper` rows in registers 4, 0 and 1, `lower` in 5, 2 and 3; sums are lost.
  void shape(long upper, long lower) {
    if (upper == upper_ && lower == lower_) return;
    upper_ = upper, lower_ = lower;
    Configuration wanted;
    wanted.palette = 1;
    const long rows[] = {upper, upper, lower, lower, upper, lower, kTileWords, kTileWords};
    for (int i = 0; i < 8; i++) wanted.rows[i] = (uint8_t)rows[i], wanted.row_bytes[i] = 64;
    configure(wanted);
  }

 private:
  struct alignas(64) Configuration {
    uint8_t palette = 0, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  static void configure(const Configuration& wanted) {
    asm volatile("" ::: "memory");  // the intrinsic names its first bytes only
    _tile_loadconfig(&wanted);
  }

  Configuration before_;
  bool is_allowed_;
  long upper_ = 0, lower_ = 0;
};

// Asks for one tile of weights of each of kAhead panels.
template <int kAhead>
inline void ask_for(const uint32_t* const* panels, long word) {
#pragma GCC unroll 4
  for (int v = 0; v < kAhead; v++)
    for (long i = 0; i < kTileWords; i++) __builtin_prefetch(panels[v] + (word + i) * kLanes);
}

// sums[rows, 16 NV] (+)= a * b for at most sixteen rows, which the tiles are shaped for; arguments as of
// multiply_tile. kAhead further panels are asked for on the way.
template <int NV, int kAhead>
void multiply_upper(const uint32_t* a, long lda, const uint32_t* const* b, long step, long words,
                    float* sums, long stride, bool accumulate, const uint32_t* const* ahead) {
  constexpr long kNear = 2 * kTileWords;
  const long row = lda * 4, column = step * 4, sums_row = stride * 4;  // bytes
  asm volatile("" ::: "memory");
  if (accumulate) {
    _tile_loadd(0, sums, sums_row);
    if constexpr (NV > 1) _tile_loadd(1, sums + kLanes, sums_row);
    if constexpr (NV > 2) _tile_loadd(2, sums + 2 * kLanes, sums_row);
    if constexpr (NV > 3) _tile_loadd(3, sums + 3 * kLanes, sums_row);
  } else {
    _tile_zero(0);
    if constexpr (NV > 1) _tile_zero(1);
    if constexpr (NV > 2) _tile_zero(2);
    if constexpr (NV > 3) _tile_zero(3);
  }
  for (long word = 0; word < words; word += kTileWords) {
    if constexpr (kAhead > 0) {
      if (word + kNear < words)
        ask_for<NV>(b, word + kNear);
      else
        ask_for<kAhead>(ahead, std::max(0L, word + kNear - words));
    }
    _tile_loadd(4, a + word, row);
    _tile_loadd(6, b[0] + word * step, column);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (NV > 1) {
      _tile_loadd(7, b[1] + word * step, column);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (NV > 2) {
      _tile_loadd(6, b[2] + word * step, column);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (NV > 3) {
      _tile_loadd(7, b[3] + word * step, column);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, sums_row);
  if constexpr (NV > 1) _tile_stored(1, sums + kLanes, sums_row);
  if constexpr (NV > 2) _tile_stored(2, sums + 2 * kLanes, sums_row);
  if constexpr (NV > 3) _tile_stored(3, sums + 3 * kLanes, sums_row);
}

// The same for sixteen rows and those below them, over words first .. last - 1; further ones add to the
// sums. kAhead panels are asked for all along.
template <int NV, int kAhead>
void multiply_both(const uint32_t* a, long lda, const uint32_t* const* b, long first, long last,
                   float* sums, long stride, const uint32_t* const* ahead) {
  static_assert(NV <= 2, "two registers for each column of sums");
  const long row = lda * 4, sums_row = stride * 4;  // bytes
  const uint32_t* lower = a + kMatrixRows * lda;
  float* below = sums + kMatrixRows * stride;
  asm volatile("" ::: "memory");
  if (first) {
    _tile_loadd(0, sums, sums_row);
    _tile_loadd(2, below, sums_row);
    if constexpr (NV > 1) {
      _tile_loadd(1, sums + kLanes, sums_row);
      _tile_loadd(3, below + kLanes, sums_row);
    }
  } else {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (NV > 1) {
      _tile_zero(1);
      _tile_zero(3);
    }
  }
  for (long word = first; word < last; word += kTileWords) {
    if constexpr (kAhead > 0) ask_for<kAhead>(ahead, word);
    _tile_loadd(4, a + word, row);
    _tile_loadd(6, b[0] + word * kLanes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, lower + word, row);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (NV > 1) {
      _tile_loadd(7, b[1] + word * kLanes, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, sums_row);
  _tile_stored(2, below, sums_row);
  if constexpr (NV > 1) {
    _tile_stored(1, sums + kLanes, sums_row);
    _tile_stored(3, below + kLanes, sums_row);
  }
}

// Words first .. last - 1 of up to thirty-two rows. `ahead` may be null.
template <int NV>
void multiply_pair(const uint32_t* a, long rows, long lda, const uint32_t* const* b, long first, long last,
                   float* sums, long stride, const uint32_t* const* ahead, MatrixTiles& tiles) {
  if (rows > kMatrixRows) {
    tiles.shape(kMatrixRows, rows - kMatrixRows);
    if (ahead) return multiply_both<NV, NV>(a, lda, b, first, last, sums, stride, ahead);
    return multiply_both<NV, 0>(a, lda, b, first, last, sums, stride, nullptr);
  }
  const uint32_t* columns[NV];
  for (int v = 0; v < NV; v++) columns[v] = b[v] + first * kLanes;
  tiles.shape(rows, rows);
  multiply_upper<NV, 0>(a + first, lda, columns, kLanes, last - first, sums, stride, first > 0, nullptr);
}

// As multiply of products.h.
inline void multiply_in_matrix_tiles(long m, long vectors, const uint32_t* a, long lda, const uint32_t* b,
                                     long ldb, float* c, long ldc, long k, bool accumulate,
                                     MatrixTiles& tiles) {
  for (long row = 0; row < m; row += kMatrixRows) {
    const long rows = std::min(kMatrixRows, m - row);
    const uint32_t* from = a + row * lda;
    tiles.shape(rows, rows);
    for (long v = 0; v < vectors; v += 4) {
      const uint32_t* columns[4];
      for (int i = 0; i < 4; i++) columns[i] = b + (v + i) * kLanes;
      float* to = c + row * ldc + v * kLanes;
      const auto run = [&](auto f) { f(from, lda, columns, ldb, k, to, ldc, accumulate, nullptr); };
      switch (vectors - v) {
        case 1: run(multiply_upper<1, 0>); break;
        case 2: run(multiply_upper<2, 0>); break;
        case 3: run(multiply_upper<3, 0>); break;
        default: run(multiply_upper<4, 0>); break;
      }
    }
  }
}

// Rows first .. last - 1 of one tile of panels, as linear_tiles of products.h does it in vectors.
template <int NV, class Sink>
void linear_in_matrix_tiles(const uint32_t* x, long first, long last, long p,
                            const uint32_t* const* ahead, const Sink& sink, MatrixTiles& tiles) {
  constexpr int kPair = NV < 2 ? 1 : 2;
  constexpr long kStride = NV * kLanes;
  const uint32_t* b[NV];
  alignas(64) float sums[kRowBlock * kStride];
  sink.panels(p, NV, b);
  const long rows = last - first, words = sink.words;
  const uint32_t* from = x + first * words;
  if (rows <= kMatrixRows) {
    tiles.shape(rows, rows);
    multiply_upper<NV, NV>(from, words, b, kLanes, words, sums, kStride, false, ahead);
  } else {
    // Two panels at a time, and no more of them than stay in the first-level cache for all rows.
    for (int v = 0; v < NV; v += kPair)
      for (long word = 0; word < words; word += kNearestWords)
        for (long row = 0; row < rows; row += 2 * kMatrixRows)
          multiply_pair<kPair>(from + row * words, std::min(2 * kMatrixRows, rows - row), words, b + v,
                               word, std::min(words, word + kNearestWords),
                               sums + row * kStride + v * kLanes, kStride, row ? nullptr : ahead + v,
                               tiles);
  }
  for (long i = 0; i < rows; i++) sink.take(first + i, p, NV, sums + i * kStride);
}

#else
using MatrixTiles = NoTiles;
#endif

}  // namespace
