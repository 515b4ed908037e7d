// Causal attention over paged keys and values.
#pragma once

#include "native_products.h"

namespace {

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

}  // namespace
