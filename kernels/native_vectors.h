// Vectors of float32 as wide as this processor's, in GCC's own terms: loads that widen, e^x, totals.
#pragma once

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

}  // namespace
