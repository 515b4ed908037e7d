// Products, attention and the steps between them for one CPU, compiled for the machine that runs: see native.py.
//
// Arithmetic is float32; weights may be float32, bfloat16, or integers of 8 or 4 bits with a scale for each group, keys
// and values float32 or bfloat16. A matrix lies in panels of PANEL columns, [panel][depth][PANEL], so that a step of the
// inner loop reads neighbouring numbers. Every sum runs over its depth in order, so a row's product is the same bits
// with any other rows beside it. Vectors are GCC's, not one instruction set's.
#include "native_attention.h"

namespace {

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
