// Products, attention and the steps between them for one CPU, compiled for the machine that runs: see native.py.
//
// Arithmetic is float32; weights may be float32, bfloat16, or integers of 8 or 4 bits with a scale for each group, keys
// and values float32 or bfloat16. A matrix lies in panels of PANEL columns, [panel][depth][PANEL], so that a step of the
// inner loop reads neighbouring numbers. Every sum runs over its depth in order, so a row's product is the same bits
// with any other rows beside it. Vectors are GCC's, not one instruction set's.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int PANEL = 2 * LANES;
constexpr int ROWS = 6;      // of a tile: with two vectors each, 12 sums stay in registers
constexpr int KEYS = 64;     // attended at once
constexpr int QUERIES = 32;  // of a sequence attended by one thread at once
constexpr float INF = std::numeric_limits<float>::infinity();

typedef float V __attribute__((vector_size(LANES * 4)));
typedef int32_t VI __attribute__((vector_size(LANES * 4)));
typedef uint32_t VU __attribute__((vector_size(LANES * 4)));
// The same in memory, at any address.
typedef float MemF __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t MemH __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

struct bf16 {
  uint16_t bits;
};

inline V load(const float *p) { return *reinterpret_cast<const MemF *>(p); }
inline V load(const bf16 *p) {
  return reinterpret_cast<V>(__builtin_convertvector(*reinterpret_cast<const MemH *>(p), VU) << 16);
}
// LANES bytes as numbers. Compilers turn the plain loop into one shuffle a byte, so it is spelt out where that matters.
template <class B> inline VI load_bytes(const B *p) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  return (VI)(std::is_signed_v<B> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
  return (VI)(std::is_signed_v<B> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  VI v;
  for (int i = 0; i < LANES; ++i) v[i] = p[i];
  return v;
#endif
}
inline void store(float *p, V v) { *reinterpret_cast<MemF *>(p) = v; }

inline float widened(float x) { return x; }
inline float widened(bf16 x) {
  union { uint32_t i; float f; } u = {uint32_t(x.bits) << 16};
  return u.f;
}
inline void narrow(float x, float *p) { *p = x; }
inline void narrow(float x, bf16 *p) {  // to nearest, ties to even
  union { float f; uint32_t i; } u = {x};
  p->bits = x != x ? 0x7fc0 : uint16_t((u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16);
}

// e^x to 2 units in the last place (Cephes' polynomial); 0 below -87, the largest power below infinity above 88.
inline V exponential(V x) {
  const V limited = x > 88.0f ? V{} + 88.0f : (x < -87.0f ? V{} - 87.0f : x);
  const V n = (limited * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  const V r = (limited - n * 0.693359375f) + n * 2.12194440e-4f;
  V p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const V y = (p * r * r + r + 1.0f) * reinterpret_cast<V>((__builtin_convertvector(n, VI) + 127) << 23);
  return x < -87.0f ? V{} : y;
}

inline float total(V v) {
  float sums[LANES];
  store(sums, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

inline V larger(V a, V b) { return a > b ? a : b; }

inline float largest(V v) {
  float most = v[0];
  for (int i = 1; i < LANES; ++i) most = std::max(most, v[i]);
  return most;
}

// Sums of neighbouring runs of W lanes: those of a, then those of b.
template <int W, int... I> inline V halves(V a, V b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I / W * 2 * W + I % W)...) +
         __builtin_shufflevector(a, b, (I / W * 2 * W + I % W + W)...);
}

// The total of each of LANES vectors, as one vector.
template <int W = LANES / 2> inline V totals(V *v) {
  for (int i = 0; i < W; ++i) v[i] = halves<W>(v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, LANES>{});
  if constexpr (W > 1) return totals<W / 2>(v);
  return v[0];
}

inline int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

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

// ---- attention ----

struct Attention {
  const float *q;  // [T, heads, head_dim]
  float *out;
  const int64_t *tables, *contexts, *starts;  // starts null: one query a sequence
  int64_t table_stride, sequences, heads, kv_heads, head_dim, block_size, window;  // window 0: none
  float scale;

  int64_t start(int64_t n) const { return starts ? starts[n] : n; }
  int64_t queries(int64_t n) const { return start(n + 1) - start(n); }
};

struct Unit {
  int64_t sequence, begin, end;  // queries of the sequence
  int64_t head, heads;           // KV heads, from the first one on
};

// Scores, weights and sums of a unit's queries, a tile of keys after another. All heads of a tile are read at once, for
// in the cache they are neighbours.
template <class C> class Worker {
 public:
  Worker(const Attention &a, const C *keys, const C *values, int64_t queries, int64_t heads)
      : a_(a), keys_(keys), values_(values), group_(a.heads / a.kv_heads), width_(parts(a.head_dim, PANEL) * PANEL),
        rows_(queries * group_), stride_(heads * width_), q_(heads * rows_ * width_), k_(KEYS * stride_),
        v_(KEYS * stride_), turned_(width_ * KEYS), scores_(rows_ * KEYS), sums_(heads * rows_ * width_),
        peak_(heads * rows_), norm_(heads * rows_) {}

  void attend(const Unit &unit) {
    const int64_t token = a_.start(unit.sequence) + unit.begin, queries = unit.end - unit.begin;
    const int64_t first = a_.contexts[unit.sequence] - a_.queries(unit.sequence) + unit.begin, last = first + queries;
    const int64_t rows = queries * group_, low = a_.window ? std::max<int64_t>(0, first - a_.window + 1) : 0;
    read_queries(unit, token, rows);
    for (int64_t key = low; key < last; key += KEYS) {
      const int64_t count = std::min<int64_t>(KEYS, last - key);
      read(keys_, unit, key, count, k_.data());
      read(values_, unit, key, count, v_.data());
      for (int64_t h = 0; h < unit.heads; ++h) {
        rows > 2 * ROWS ? scores_by_product(h, rows, count) : scores_one_by_one(h, rows, count);
        weigh(h, rows, count, first, key);
        for (int64_t p = 0; p < width_; p += PANEL) add_values(h, rows, count, p);
      }
    }
    write_rows(unit, token, rows);
  }

 private:
  int64_t offset(int64_t token, int64_t head, int64_t row) const {
    return ((token + row / group_) * a_.heads + head * group_ + row % group_) * a_.head_dim;
  }
  float *row(std::vector<float> &x, int64_t head, int64_t r) { return &x[(head * rows_ + r) * width_]; }

  void read_queries(const Unit &unit, int64_t token, int64_t rows) {
    for (int64_t h = 0; h < unit.heads; ++h)
      for (int64_t r = 0; r < rows; ++r) {
        const float *q = a_.q + offset(token, unit.head + h, r);
        float *to = row(q_, h, r);
        for (int64_t d = 0; d < width_; ++d) to[d] = d < a_.head_dim ? q[d] * a_.scale : 0.0f;
      }
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    std::fill(peak_.begin(), peak_.end(), -INF);
    std::fill(norm_.begin(), norm_.end(), 0.0f);
  }

  // [count][heads][width]
  void read(const C *cache, const Unit &unit, int64_t key, int64_t count, float *to) const {
    const int64_t *table = a_.tables + unit.sequence * a_.table_stride;
    int64_t block = key / a_.block_size, place = key % a_.block_size;
    for (int64_t j = 0; j < count; ++j, to += stride_) {
      const int64_t slot = table[block] * a_.block_size + place;
      const C *from = cache + (slot * a_.kv_heads + unit.head) * a_.head_dim;
      for (int64_t h = 0; h < unit.heads; ++h) copy(from + h * a_.head_dim, to + h * width_);
      if (++place == a_.block_size) ++block, place = 0;
    }
  }

  void copy(const C *from, float *to) const {
    int64_t d = 0;
    for (; d + LANES <= a_.head_dim; d += LANES) store(to + d, load(from + d));
    for (; d < a_.head_dim; ++d) to[d] = widened(from[d]);
  }

  void scores_by_product(int64_t h, int64_t rows, int64_t count) {
    for (int64_t j = 0; j < count; ++j)
      for (int64_t d = 0; d < a_.head_dim; ++d) turned_[d * KEYS + j] = k_[j * stride_ + h * width_ + d];
    for (int64_t p = 0; p < count; p += PANEL)
      tall(row(q_, h, 0), width_, rows, Plain<float>{turned_.data() + p, KEYS}, a_.head_dim,
           Target{scores_.data() + p, KEYS, nullptr, PANEL});
  }

  void scores_one_by_one(int64_t h, int64_t rows, int64_t count) {
    for (int64_t j = 0; j < count; j += LANES)
      for (int64_t r = 0; r < rows; ++r) {
        const float *q = row(q_, h, r), *k = &k_[j * stride_ + h * width_];
        V products[LANES] = {};
        for (int64_t d = 0; d < width_; d += LANES)
          for (int i = 0; i < LANES; ++i) products[i] += load(q + d) * load(k + i * stride_ + d);
        store(&scores_[r * KEYS + j], totals(products));
      }
  }

  // Scores to weights, and what was added up so far to the new peak's scale (Milakov and Gimelshein, 2018).
  void weigh(int64_t h, int64_t rows, int64_t count, int64_t first, int64_t key) {
    for (int64_t r = 0; r < rows; ++r) {
      float *s = &scores_[r * KEYS], &old = peak_[h * rows_ + r], &norm = norm_[h * rows_ + r];
      const int64_t position = first + r / group_;
      const int64_t from = a_.window ? std::clamp<int64_t>(position - a_.window + 1 - key, 0, count) : 0;
      const int64_t stop = std::clamp<int64_t>(position + 1 - key, from, count);
      std::fill(s, s + from, -INF);
      std::fill(s + stop, s + KEYS, -INF);
      V peaks = V{} + old;
      for (int j = 0; j < KEYS; j += LANES) peaks = larger(peaks, load(s + j));
      const float peak = largest(peaks), base = peak == -INF ? 0.0f : peak;
      V sum = {};
      for (int j = 0; j < KEYS; j += LANES) {
        const V weights = exponential(load(s + j) - base);
        store(s + j, weights);
        sum += weights;
      }
      const float kept = std::exp(old - base);
      norm = norm * kept + total(sum);
      old = peak;
      float *sums = row(sums_, h, r);
      if (kept != 1.0f)
        for (int64_t d = 0; d < width_; d += LANES) store(sums + d, load(sums + d) * kept);
    }
  }

  void add_values(int64_t h, int64_t rows, int64_t count, int64_t column) {
    const Plain<float> values{&v_[h * width_ + column], stride_};
    for (int64_t r = 0; r < rows;) {
      const float *weights = &scores_[r * KEYS];
      float *to = row(sums_, h, r) + column;
      const int64_t left = rows - r, height = left >= ROWS ? ROWS : left >= 3 ? 3 : 1;
      if (height == ROWS) add_rows<ROWS>(weights, count, values, to);
      else if (height == 3) add_rows<3>(weights, count, values, to);
      else add_rows<1>(weights, count, values, to);
      r += height;
    }
  }

  template <int R> void add_rows(const float *weights, int64_t count, const Plain<float> &values, float *to) {
    V sums[R][1][2];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 2; ++c) sums[r][0][c] = load(to + r * width_ + c * LANES);
    multiply<R, 1>(weights, KEYS, &values, count, sums);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 2; ++c) store(to + r * width_ + c * LANES, sums[r][0][c]);
  }

  void write_rows(const Unit &unit, int64_t token, int64_t rows) {
    for (int64_t h = 0; h < unit.heads; ++h)
      for (int64_t r = 0; r < rows; ++r) {
        float *out = a_.out + offset(token, unit.head + h, r);
        const float *sums = row(sums_, h, r), norm = norm_[h * rows_ + r];
        for (int64_t d = 0; d < a_.head_dim; ++d) out[d] = norm == 0.0f ? 0.0f : sums[d] / norm;
      }
  }

  const Attention &a_;
  const C *keys_, *values_;
  const int64_t group_, width_, rows_, stride_;
  std::vector<float> q_, k_, v_, turned_, scores_, sums_, peak_, norm_;
};

template <class C> void attention(const Attention &a, const C *keys, const C *values, int threads) {
  int64_t tiles = 0, queries = 0;
  for (int64_t n = 0; n < a.sequences; ++n) {
    tiles += parts(a.queries(n), QUERIES);
    queries = std::max(queries, std::min<int64_t>(QUERIES, a.queries(n)));
  }
  const int64_t heads = tiles < threads ? 1 : a.kv_heads;  // too few tiles: let threads share the heads
  std::vector<Unit> units;
  for (int64_t n = 0; n < a.sequences; ++n)
    for (int64_t begin = 0; begin < a.queries(n); begin += QUERIES)
      for (int64_t head = 0; head < a.kv_heads; head += heads)
        units.push_back({n, begin, std::min(begin + QUERIES, a.queries(n)), head, heads});
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Worker<C> worker(a, keys, values, queries, heads);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < int64_t(units.size()); ++i) worker.attend(units[i]);
  }
}

// ---- between the products ----

template <class C>
void rotate_and_write(const float *q, const float *k, const float *v, int64_t q_stride, int64_t k_stride,
                      int64_t v_stride, const float *cosines, const float *sines, const int64_t *slots, C *keys,
                      C *values, float *out, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                      int64_t pairs) {
  std::vector<float> turned(dim);
  for (int64_t t = 0; t < tokens; ++t) {
    const float *cosine = cosines + t * pairs, *sine = sines + t * pairs;
    const auto turn = [&](const float *x, float *to) {
      for (int64_t i = 0; i < pairs; ++i) to[i] = x[i] * cosine[i] - x[pairs + i] * sine[i];
      for (int64_t i = 0; i < pairs; ++i) to[pairs + i] = x[pairs + i] * cosine[i] + x[i] * sine[i];
      for (int64_t i = 2 * pairs; i < dim; ++i) to[i] = x[i];
    };
    for (int64_t h = 0; h < heads; ++h) turn(q + t * q_stride + h * dim, out + (t * heads + h) * dim);
    if (slots[t] < 0) continue;
    for (int64_t h = 0; h < kv_heads; ++h) {
      const int64_t at = (slots[t] * kv_heads + h) * dim;
      turn(k + t * k_stride + h * dim, turned.data());
      for (int64_t d = 0; d < dim; ++d) narrow(turned[d], keys + at + d);
      for (int64_t d = 0; d < dim; ++d) narrow(v[t * v_stride + h * dim + d], values + at + d);
    }
  }
}

}  // namespace

extern "C" {

int schedlab_panel() { return PANEL; }

// x [rows, depth] at a stride, out [rows, columns]; bias may be null.
void schedlab_linear_float(const float *x, int64_t stride, int64_t rows, int64_t depth, int64_t columns,
                           const float *w, const float *bias, float *out, int threads) {
  const auto panel = [=](int64_t p) { return Plain<float>{w + p * depth * PANEL, PANEL}; };
  product(x, stride, rows, depth, columns, panel, bias, out, threads);
}

void schedlab_linear_bf16(const float *x, int64_t stride, int64_t rows, int64_t depth, int64_t columns, const bf16 *w,
                          const float *bias, float *out, int threads) {
  const auto panel = [=](int64_t p) { return Plain<bf16>{w + p * depth * PANEL, PANEL}; };
  product(x, stride, rows, depth, columns, panel, bias, out, threads);
}

// Weights [panel][depth][PANEL], scales (and zeros) [panel][groups][PANEL].
void schedlab_linear_int8(const float *x, int64_t stride, int64_t rows, int64_t depth, int64_t columns,
                          const int8_t *w, const float *scales, int group, const float *bias, float *out,
                          int threads) {
  const int64_t groups = parts(depth, int64_t(1) << group);
  const auto panel = [=](int64_t p) { return Bytes{w + p * depth * PANEL, scales + p * groups * PANEL, group}; };
  product(x, stride, rows, depth, columns, panel, bias, out, threads);
}

void schedlab_linear_int4(const float *x, int64_t stride, int64_t rows, int64_t depth, int64_t columns,
                          const uint8_t *w, const float *scales, const float *zeros, int group, const float *bias,
                          float *out, int threads) {
  const int64_t groups = parts(depth, int64_t(1) << group);
  const auto panel = [=](int64_t p) {
    return Nibbles{w + p * depth * LANES, scales + p * groups * PANEL, zeros + p * groups * PANEL, group};
  };
  product(x, stride, rows, depth, columns, panel, bias, out, threads);
}

void schedlab_attention(const float *q, const void *keys, const void *values, int narrow_cache, const int64_t *tables,
                        int64_t table_stride, const int64_t *contexts, const int64_t *starts, float *out,
                        int64_t sequences, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_size,
                        int64_t window, float scale, int threads) {
  const Attention a{q, out, tables, contexts, starts, table_stride, sequences, heads,
                    kv_heads, head_dim, block_size, window, scale};
  if (narrow_cache) attention(a, static_cast<const bf16 *>(keys), static_cast<const bf16 *>(values), threads);
  else attention(a, static_cast<const float *>(keys), static_cast<const float *>(values), threads);
}

void schedlab_rope_kv_write(const float *q, const float *k, const float *v, int64_t q_stride, int64_t k_stride,
                            int64_t v_stride, const float *cosines, const float *sines, const int64_t *slots,
                            void *keys, void *values, int narrow_cache, float *out, int64_t tokens, int64_t heads,
                            int64_t kv_heads, int64_t dim, int64_t pairs) {
  if (narrow_cache)
    rotate_and_write(q, k, v, q_stride, k_stride, v_stride, cosines, sines, slots, static_cast<bf16 *>(keys),
                     static_cast<bf16 *>(values), out, tokens, heads, kv_heads, dim, pairs);
  else
    rotate_and_write(q, k, v, q_stride, k_stride, v_stride, cosines, sines, slots, static_cast<float *>(keys),
                     static_cast<float *>(values), out, tokens, heads, kv_heads, dim, pairs);
}

// Norm of x, or of x + residual, which then goes to `sum`.
void schedlab_rms_norm(const float *x, const float *residual, const float *weight, float eps, float *sum, float *out,
                       int64_t rows, int64_t size) {
  for (int64_t r = 0; r < rows; ++r, x += size, out += size) {
    const float *row = x;
    if (residual) {
      for (int64_t i = 0; i < size; ++i) sum[i] = x[i] + residual[i];
      row = sum;
      residual += size;
      sum += size;
    }
    V squares[4] = {};
    float rest = 0.0f;
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
      for (int j = 0; j < 4; ++j) squares[j] += load(row + i + j * LANES) * load(row + i + j * LANES);
    for (; i < size; ++i) rest += row[i] * row[i];
    const float mean = (total((squares[0] + squares[1]) + (squares[2] + squares[3])) + rest) / float(size);
    const float by = 1.0f / std::sqrt(mean + eps);
    for (i = 0; i < size; ++i) out[i] = row[i] * by * weight[i];
  }
}

void schedlab_silu_mul(const float *gate_up, float *out, int64_t rows, int64_t size) {
  for (int64_t r = 0; r < rows; ++r, out += size) {
    const float *gate = gate_up + 2 * r * size, *up = gate + size;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      const V g = load(gate + i);
      store(out + i, g / (1.0f + exponential(-g)) * load(up + i));
    }
    for (; i < size; ++i) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
  }
}

}  // extern "C"
