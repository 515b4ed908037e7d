// Rows of float32 times a matrix in panels, whatever its numbers are held in.
#pragma once

#include "native_vectors.h"

namespace {

// ---- weights: each gives the two vectors of one depth of a panel ----

constexpr int AHEAD = 32;  // depths that are fetched before they are due: the processor's own fetching ends at each page

template <class T> struct Plain {
  const T *data;
  int64_t step;  // between depths
  void at(int64_t k, V &a, V &b) const {
    __builtin_prefetch(data + (k + AHEAD) * step);
    a = load(data + k * step);
    b = load(data + k * step + LANES);
  }
};

// One byte a number; a scale for each group of depths and column.
struct Bytes {
  const int8_t *data;
  const float *scales;
  int group;  // as a power of 2
  void at(int64_t k, V &a, V &b) const {
    const float *scale = scales + (k >> group) * PANEL;
    __builtin_prefetch(data + (k + AHEAD) * PANEL);
    a = __builtin_convertvector(load_bytes(data + k * PANEL), V) * load(scale);
    b = __builtin_convertvector(load_bytes(data + k * PANEL + LANES), V) * load(scale + LANES);
  }
};

// Half a byte a number, the first half of the columns low; a scale and the value of 0 for each group and column.
struct Nibbles {
  const uint8_t *data;
  const float *scales;
  const float *zeros;
  int group;  // as a power of 2
  void at(int64_t k, V &a, V &b) const {
    const int64_t at_group = (k >> group) * PANEL;
    __builtin_prefetch(data + (k + AHEAD) * LANES);
    const VI q = load_bytes(data + k * LANES);
    a = __builtin_convertvector(q & 15, V) * load(scales + at_group) + load(zeros + at_group);
    b = __builtin_convertvector(q >> 4, V) * load(scales + at_group + LANES) + load(zeros + at_group + LANES);
  }
};

// ---- products ----

// R rows of x times P panels, added to what `sums` holds.
template <int R, int P, class W>
inline void multiply(const float *x, int64_t stride, const W *w, int64_t depth, V (&sums)[R][P][2]) {
  for (int64_t k = 0; k < depth; ++k) {
    V a, b;
    for (int p = 0; p < P; ++p) {
      w[p].at(k, a, b);
      for (int r = 0; r < R; ++r) {
        sums[r][p][0] += x[r * stride + k] * a;
        sums[r][p][1] += x[r * stride + k] * b;
      }
    }
  }
}

struct Target {
  float *data;
  int64_t stride;
  const float *bias;  // of the first column, or null
  int64_t columns;    // that exist, from the first one on
};

inline void write(V v, float *out, const float *bias, int64_t columns) {
  if (columns >= LANES) {
    store(out, bias ? v + load(bias) : v);
  } else {
    for (int64_t c = 0; c < columns; ++c) out[c] = v[c] + (bias ? bias[c] : 0.0f);
  }
}

template <int R, int P, class W>
void tile(const float *x, int64_t stride, const W *w, int64_t depth, const Target &to) {
  V sums[R][P][2] = {};
  multiply<R, P>(x, stride, w, depth, sums);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < 2 * P; ++c)
      write(sums[r][c / 2][c % 2], to.data + r * to.stride + c * LANES, to.bias ? to.bias + c * LANES : nullptr,
            to.columns - c * LANES);
}

// `rows` of x times P panels; few rows take several panels at once, or their sums would wait for one another.
template <int P, class W>
void few(const float *x, int64_t stride, int64_t rows, const W *w, int64_t depth, const Target &to) {
  switch (rows) {
    case 1: return tile<1, P>(x, stride, w, depth, to);
    case 2: return tile<2, P>(x, stride, w, depth, to);
    case 3: return tile<3, P>(x, stride, w, depth, to);
    default:
      if constexpr (P == 1) {
        if (rows == 4) return tile<4, 1>(x, stride, w, depth, to);
        if (rows == 5) return tile<5, 1>(x, stride, w, depth, to);
        return tile<ROWS, 1>(x, stride, w, depth, to);
      }
  }
}

// All rows times one panel, in tiles of nearly equal height.
template <class W>
void tall(const float *x, int64_t stride, int64_t rows, W w, int64_t depth, Target to) {
  for (int64_t tiles = parts(rows, ROWS); tiles; --tiles) {
    const int64_t height = parts(rows, tiles);
    few<1>(x, stride, height, &w, depth, to);
    x += height * stride;
    to.data += height * to.stride;
    rows -= height;
  }
}

inline float *scratch(int64_t count) {
  static thread_local std::vector<float> memory;
  if (int64_t(memory.size()) < count) memory.resize(count);
  return memory.data();
}

template <class W> void widen(W w, int64_t depth, float *out) {
  for (int64_t k = 0; k < depth; ++k) {
    V a, b;
    w.at(k, a, b);
    store(out + k * PANEL, a);
    store(out + k * PANEL + LANES, b);
  }
}

constexpr bool is_wide(const Plain<float> &) { return true; }
template <class W> constexpr bool is_wide(const W &) { return false; }

template <class Make>
void product(const float *x, int64_t stride, int64_t rows, int64_t depth, int64_t columns, Make panel,
             const float *bias, float *out, int threads) {
  if (!rows) return;
  const int64_t panels = parts(columns, PANEL), at_once = rows <= 2 ? 4 : rows == 3 ? 2 : 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t unit = 0; unit < parts(panels, at_once); ++unit) {
    const int64_t first = unit * at_once, column = first * PANEL;
    const Target to{out + column, columns, bias ? bias + column : nullptr, columns - column};
    const auto one = panel(first);
    if (rows > 2 * ROWS && !is_wide(one)) {
      float *wide = scratch(depth * PANEL);
      widen(one, depth, wide);
      tall(x, stride, rows, Plain<float>{wide, PANEL}, depth, to);
    } else if (at_once == 4 && first + 4 <= panels) {
      const decltype(panel(0)) four[4] = {one, panel(first + 1), panel(first + 2), panel(first + 3)};
      if (rows == 1) tile<1, 4>(x, stride, four, depth, to);
      else tile<2, 4>(x, stride, four, depth, to);
    } else if (at_once == 2 && first + 2 <= panels) {
      const decltype(panel(0)) two[2] = {one, panel(first + 1)};
      tile<3, 2>(x, stride, two, depth, to);
    } else {
      for (int64_t p = first; p < std::min(first + at_once, panels); ++p)
        tall(x, stride, rows, panel(p), depth,
             Target{out + p * PANEL, columns, bias ? bias + p * PANEL : nullptr, columns - p * PANEL});
    }
  }
}

}  // namespace
