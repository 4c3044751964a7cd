// Exact CPU kernels with a plain C ABI: no torch, no Python. The normative definitions are the torch functions of
// ops/reference.py and fp8/; docs/numerics.md says why the bits cannot depend on the instruction set.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

inline uint32_t bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }
inline float from_bits(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
inline float bf16(uint16_t h) { return from_bits((uint32_t)h << 16); }
inline uint16_t to_bf16(float f) {  // round to nearest even; NaN stays NaN
  const uint32_t u = bits(f);
  const uint16_t rounded = (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
  return (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0 : rounded;
}
inline double pow2(int e) { uint64_t u = (uint64_t)(int64_t)(e + 1023) << 52; double d; std::memcpy(&d, &u, 8); return d; }
// e with 2^(e-1) <= max(magnitude, 1e-30) < 2^e, for finite normal doubles
inline int exponent(double magnitude) {
  const double m = magnitude < 1e-30 ? 1e-30 : magnitude;
  uint64_t u; std::memcpy(&u, &m, 8);
  return (int)((u >> 52) & 0x7FF) - 1022;
}
// round half to even of |x| < 2^51
inline double nearest(double x) { return (x + 6755399441055744.0) - 6755399441055744.0; }
inline float exp32(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 87.0f ? 87.0f : x;
  const float k = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  x = x - k * 0.693359375f;
  x = x - k * -2.12194440e-4f;
  float y = x * 1.9875691500e-4f;
  y = (y + 1.3981999507e-3f) * x;
  y = (y + 8.3334519073e-3f) * x;
  y = (y + 4.1665795894e-2f) * x;
  y = (y + 1.6666665459e-1f) * x;
  y = (y + 5.0000001201e-1f) * x;
  y = (y * x + x) + 1.0f;
  return y * from_bits((uint32_t)((int32_t)k + 127) << 23);
}
inline double log64(float s) {
  int e;
  double m = std::frexp((double)s, &e);
  if (m < 0.70710678118654752) { m *= 2; e -= 1; }
  const double f = (m - 1) / (m + 1), f2 = f * f;
  double y = 1 / 23.0;
  for (int d = 21; d > 0; d -= 2) y = y * f2 + (1.0 / d);
  return y * f * 2 + e * 0.6931471805599453;
}
// FP8 scale of a group whose largest |x| has the bits `top`; NaN for a non-finite group
inline float scale_of(uint32_t top, int pow2_format) {
  if (top >= 0x7F800000u) return from_bits(0x7FC00000u);
  if (top == 0) return 1.0f;
  const float s = from_bits(top) / 448.0f;
  float scale = s < 0x1p-126f ? 0x1p-126f : s;
  if (pow2_format) scale = from_bits((bits(scale) + 0x7FFFFFu) >> 23 << 23);
  return scale;
}
inline double e4m3_value(int code) {
  const int e = (code >> 3) & 15, f = code & 7;
  double v = e ? pow2(e - 7) * (1.0 + f / 8.0) : f * pow2(-9);
  if ((code & 0x7F) == 0x7F) v = NAN;
  return code & 0x80 ? -v : v;
}
// E4M3 code of |v| <= 448 (round to nearest even)
inline uint8_t e4m3(float v) {
  const uint32_t u = bits(v), sign = (u >> 24) & 0x80u, magnitude = u & 0x7FFFFFFFu;
  const uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);       // 3 mantissa bits
  const uint32_t normal = (rounded >> 20) - ((127u - 7u) << 3);
  const float small = from_bits(magnitude) * 512.0f + 8388608.0f;                 // multiples of 2^-9
  const uint32_t subnormal = bits(small) & 0xFu;
  return (uint8_t)(sign | (magnitude < 0x3C800000u ? subnormal : normal));         // 2^-6
}
// Value of an E4M3 code
inline float e4m3_float(uint8_t code) {
  const uint32_t u = code & 0x7Fu, sign = (uint32_t)(code & 0x80u) << 24;
  const float normal = from_bits((u << 20) + (120u << 23)), small = (float)(int32_t)u * 0x1p-9f;
  const uint32_t magnitude = u < 8 ? bits(small) : u == 0x7F ? 0x7FC00000u : bits(normal);
  return from_bits(sign | magnitude);
}
inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) { return bf16(x); }
inline void from_float(float value, float& out) { out = value; }
inline void from_float(float value, uint16_t& out) { out = to_bf16(value); }

struct Attention {  // see ops/reference.py `attention`; all bf16, pools [slots][groups][dim]
  const uint16_t *q, *k_pool, *v_pool;
  const int32_t* table;
  int64_t table_stride;
  const int64_t *rows, *cu, *kv_len;
  int64_t heads, groups, dim;
  float scale;
  uint16_t* out;
};
template <class T>
struct Quantizers {
  void (*groups)(const T*, int64_t, int64_t, int, uint8_t*, float*);
  void (*columns)(const T*, int64_t, int64_t, int, uint8_t*, float*, int64_t, int64_t);
  void (*encode)(const T*, int64_t, int64_t, const float*, uint8_t*);
  void (*blocks)(const T*, int64_t, int64_t, int, uint8_t*, float*, int64_t, int64_t);
  void (*amax)(const T*, int64_t, int64_t, float*);
  void (*dequantize)(const uint8_t*, const float*, int64_t, int64_t, T*, int64_t, int64_t);
};
struct Kernels {
  Quantizers<float> of_float;
  Quantizers<uint16_t> of_bf16;
  void (*fp8_gemm)(const double*, const float*, const uint16_t*, const float*, float*, uint16_t*, int64_t, int64_t, int64_t,
                   int64_t, int64_t, int64_t);
  void (*grid_gemm)(const double*, const double*, const uint16_t*, const double*, double*, float*, int64_t, int64_t, int64_t,
                    int64_t, int64_t);
  void (*attend)(const Attention&, int64_t, int64_t);
  void (*add)(const uint16_t*, const uint16_t*, uint16_t*, int64_t);
  void (*rmsnorm)(const uint16_t*, const uint16_t*, float, uint16_t*, int64_t);
  void (*swiglu)(const uint16_t*, uint16_t*, int64_t);
  void (*rope)(const uint16_t*, const float*, const float*, uint16_t*, int64_t, int64_t, int64_t);
  void (*combine)(const uint16_t*, const float*, uint16_t*, int64_t, int64_t, int64_t);
  void (*log_sum_exp)(const float*, int64_t, int64_t, float*, double*);
  void (*exp_weights)(const float*, int64_t, int64_t, double*);
};

}  // namespace

#define LEVEL 0
#define NAMESPACE base
#include "kernels.inc"
#undef LEVEL
#undef NAMESPACE
#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define LEVEL 1
#define NAMESPACE avx2
#include "kernels.inc"
#undef LEVEL
#undef NAMESPACE
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#define LEVEL 2
#define NAMESPACE avx512
#include "kernels.inc"
#undef LEVEL
#undef NAMESPACE
#pragma GCC pop_options
#if defined(__linux__) && __GNUC__ >= 11
#define JETRL_AMX
#include <sys/syscall.h>
#include <unistd.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,amx-tile,amx-int8")
#include "amx.inc"
#pragma GCC pop_options
#endif
#endif

namespace {
const Kernels* table_of(int level) {
#if defined(__x86_64__)
  if (level >= 2) return &avx512::TABLE;
  if (level == 1) return &avx2::TABLE;
#endif
  return &base::TABLE;
}
const Kernels* active = &base::TABLE;
int threads = 1, active_level = 0;

#ifdef JETRL_AMX
bool amx_allowed() {  // the CPU has it, and the kernel lets this process use the tiles
  unsigned eax = 7, ebx, ecx = 0, edx;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  const bool present = (edx >> 24 & 1) && (edx >> 25 & 1);  // AMX-TILE, AMX-INT8
  return present && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
}
#endif

// Digits of E4M3 codes: sign-magnitude, base 128, of the value times 2^9
struct Digits { int8_t of[256][3]; };
const Digits& digits() {
  static const Digits table = [] {
    Digits t;
    for (int c = 0; c < 256; c++) {
      const int e = (c >> 3) & 15, f = c & 7, sign = c & 0x80 ? -1 : 1;
      const int magnitude = (c & 0x7F) == 0x7F ? 0 : e ? (8 + f) << (e - 1) : f;
      for (int d = 0; d < 3; d++) t.of[c][d] = (int8_t)(sign * (magnitude >> 7 * d & 127));
    }
    return t;
  }();
  return table;
}

// body(first, last) over [0, count) in equal parts; parts are independent, so their number changes nothing
template <class Body>
void parallel(int64_t count, Body body) {
  const int64_t parts = std::min<int64_t>(threads, count);
  if (parts <= 1) { body(0, count); return; }
  std::vector<std::thread> workers;
  for (int64_t i = 1; i < parts; i++) workers.emplace_back([=] { body(count * i / parts, count * (i + 1) / parts); });
  body(0, count / parts);
  for (auto& w : workers) w.join();
}

template <class Body>
void by_type(const void* x, int64_t is_bf16, Body body) {
  if (is_bf16) body((const uint16_t*)x, active->of_bf16);
  else body((const float*)x, active->of_float);
}

// Row m of y [.][k], quantized, if `codes` is there
void quantize_row(const uint16_t* y, int64_t m, int64_t k, int64_t pow2_format, uint8_t* codes, float* scales) {
  if (codes) active->of_bf16.groups(y + m * k, 1, k, (int)pow2_format, codes + m * k, scales + m * ((k + 127) / 128));
}

void fp8_gemm(const uint8_t* codes, const float* scale_a, const uint16_t* packed, const float* scale_b, float* out32,
              uint16_t* out16, int64_t m, int64_t n, int64_t k, int64_t num_segments) {
  static const auto value = [] {
    std::array<double, 256> v;
    for (int c = 0; c < 256; c++) v[c] = e4m3_value(c);
    return v;
  }();
  const int64_t groups = (k + 127) / 128;
  std::vector<double> a(m * groups * 128, 0.0);
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < k; j++) a[(j / 128 * m + i) * 128 + j % 128] = value[codes[i * k + j]];
  const double* left = a.data();
  parallel((n + 15) / 16, [=](int64_t p0, int64_t p1) {
    active->fp8_gemm(left, scale_a, packed, scale_b, out32, out16, m, n, groups, groups / num_segments, p0, p1);
  });
}
}  // namespace

extern "C" {
// 0: baseline, 1: AVX2 + FMA, 2: AVX-512, 3: AVX-512 and AMX int8 tiles; what this processor can run at most
int jetrl_best_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
#ifdef JETRL_AMX
    if (amx_allowed()) return 3;
#endif
    return 2;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}
int jetrl_use_level(int level) {
  if (level < 0 || level > jetrl_best_level()) return -1;
  active = table_of(level);
  active_level = level;
  return level;
}
int jetrl_level() { return active_level; }
void jetrl_use_threads(int count) { threads = count < 1 ? 1 : count; }

// x [rows][k] of bf16 (is_bf16) or float; see fp8/quantize.py
void jetrl_quantize(const void* x, int64_t is_bf16, int64_t rows, int64_t k, int64_t pow2_format, uint8_t* codes,
                    float* scales) {
  const int64_t groups = (k + 127) / 128;
  by_type(x, is_bf16, [=](auto* p, const auto& q) {
    parallel(rows, [=](int64_t a, int64_t b) {
      q.groups(p + a * k, b - a, k, (int)pow2_format, codes + a * k, scales + a * groups);
    });
  });
}
void jetrl_quantize_columns(const void* x, int64_t is_bf16, int64_t tokens, int64_t k, int64_t pow2_format, uint8_t* codes,
                            float* scales) {
  by_type(x, is_bf16, [=](auto* p, const auto& q) {
    parallel(k, [=](int64_t a, int64_t b) { q.columns(p, tokens, k, (int)pow2_format, codes, scales, a, b); });
  });
}
void jetrl_quantize_blocks(const void* x, int64_t is_bf16, int64_t rows, int64_t k, int64_t pow2_format, uint8_t* codes,
                           float* scales) {
  by_type(x, is_bf16, [=](auto* p, const auto& q) {
    parallel((rows + 127) / 128, [=](int64_t a, int64_t b) { q.blocks(p, rows, k, (int)pow2_format, codes, scales, a, b); });
  });
}
void jetrl_encode(const void* x, int64_t is_bf16, int64_t rows, int64_t k, const float* scales, uint8_t* codes) {
  const int64_t groups = (k + 127) / 128;
  by_type(x, is_bf16, [=](auto* p, const auto& q) {
    parallel(rows, [=](int64_t a, int64_t b) { q.encode(p + a * k, b - a, k, scales + a * groups, codes + a * k); });
  });
}
void jetrl_amax(const void* x, int64_t is_bf16, int64_t rows, int64_t k, float* amax) {
  const int64_t groups = (k + 127) / 128;
  by_type(x, is_bf16, [=](auto* p, const auto& q) {
    parallel(rows, [=](int64_t a, int64_t b) { q.amax(p + a * k, b - a, k, amax + a * groups); });
  });
}
// E4M3 codes [rows][k] times scales [ceil(rows / rows_per_scale)][groups] -> out [rows][k] of bf16 (is_bf16) or float
void jetrl_dequantize(const uint8_t* codes, const float* scales, int64_t rows_per_scale, int64_t rows, int64_t k,
                      int64_t is_bf16, void* out) {
  parallel(rows, [=](int64_t a, int64_t b) {
    if (is_bf16) active->of_bf16.dequantize(codes, scales, rows_per_scale, k, (uint16_t*)out, a, b);
    else active->of_float.dequantize(codes, scales, rows_per_scale, k, (float*)out, a, b);
  });
}

// E4M3 codes [n][k] -> packed [ceil(n/16)][groups * 32][16][4] top 16 bits of doubles, zero padded; the 4 are along K
void jetrl_pack_fp8(const uint8_t* codes, int64_t n, int64_t k, uint16_t* packed) {
  uint16_t half[256];
  for (int c = 0; c < 256; c++) {
    const double v = e4m3_value(c);
    uint64_t u; std::memcpy(&u, &v, 8);
    half[c] = (uint16_t)(u >> 48);
  }
  const int64_t depth = (k + 127) / 128 * 128, panels = (n + 15) / 16;
  std::memset(packed, 0, panels * depth * 16 * sizeof(uint16_t));
  for (int64_t row = 0; row < n; row++) {
    uint16_t* target = packed + row / 16 * depth * 16 + row % 16 * 4;
    for (int64_t i = 0; i < k; i++) target[i / 4 * 64 + i % 4] = half[codes[row * k + i]];
  }
}
// codes [m][k] with scales [m][groups], packed weight with scales [groups][n] -> out [m][n] fp32
void jetrl_fp8_gemm(const uint8_t* codes, const float* scale_a, const uint16_t* packed, const float* scale_b, float* out,
                    int64_t m, int64_t n, int64_t k, int64_t num_segments) {
  fp8_gemm(codes, scale_a, packed, scale_b, out, nullptr, m, n, k, num_segments);
}
// The same, rounded to bf16
void jetrl_fp8_linear(const uint8_t* codes, const float* scale_a, const uint16_t* packed, const float* scale_b, uint16_t* out,
                      int64_t m, int64_t n, int64_t k, int64_t num_segments) {
  fp8_gemm(codes, scale_a, packed, scale_b, nullptr, out, m, n, k, num_segments);
}
// The same from bf16 x [m][k], quantized here into codes and scales
void jetrl_quantized_fp8_linear(const uint16_t* x, int64_t pow2_format, const uint16_t* packed, const float* scale_b,
                                uint16_t* out, uint8_t* codes, float* scales, int64_t m, int64_t n, int64_t k,
                                int64_t num_segments) {
  jetrl_quantize(x, 1, m, k, pow2_format, codes, scales);
  fp8_gemm(codes, scales, packed, scale_b, nullptr, out, m, n, k, num_segments);
}

// Level 3 only. Codes [n][k] -> digits [panels][groups][2][3][16][64] of int8, in the layout of B tiles
void jetrl_pack_digits(const uint8_t* codes, int64_t n, int64_t k, int8_t* packed) {
  const int64_t groups = (k + 127) / 128, panels = (n + 15) / 16;
  std::memset(packed, 0, panels * groups * 2 * 3 * 1024);
  for (int64_t row = 0; row < n; row++)
    for (int64_t i = 0; i < k; i++) {
      const int64_t half = (row / 16 * groups + i / 128) * 2 + i % 128 / 64, in = i % 64;
      const int8_t* d = digits().of[codes[row * k + i]];
      for (int p = 0; p < 3; p++) packed[(half * 3 + p) * 1024 + in / 4 * 64 + row % 16 * 4 + in % 4] = d[p];
    }
}
// As jetrl_fp8_gemm, with a weight of jetrl_pack_digits
void jetrl_fp8_gemm_digits(const uint8_t* codes, const float* scale_a, const int8_t* packed, const float* scale_b, float* out,
                           int64_t m, int64_t n, int64_t k, int64_t num_segments) {
#ifdef JETRL_AMX
  const int64_t groups = (k + 127) / 128, rows = (m + 15) / 16 * 16;
  std::vector<int8_t> a(groups * 2 * 3 * rows * 64, 0);
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < k; j++) {
      const int8_t* d = digits().of[codes[i * k + j]];
      int8_t* target = a.data() + ((j / 128 * 2 + j % 128 / 64) * 3 * rows + i) * 64 + j % 64;
      for (int p = 0; p < 3; p++) target[p * rows * 64] = d[p];
    }
  const int8_t* left = a.data();
  parallel((n + 15) / 16, [=](int64_t p0, int64_t p1) {
    amx::fp8_gemm(left, scale_a, packed, scale_b, out, m, rows, n, groups, groups / num_segments, p0, p1);
  });
#endif
}

// max |x| of every bf16 row
void jetrl_row_max(const uint16_t* x, int64_t rows, int64_t k, double* top) {
  for (int64_t m = 0; m < rows; m++) {
    uint16_t t = 0;
    for (int64_t i = 0; i < k; i++) { const uint16_t a = x[m * k + i] & 0x7FFF; t = a > t ? a : t; }
    top[m] = (double)bf16(t);
  }
}
// bf16 weight [n][k] -> integers of the rows' 20-bit grids as bf16, packed [ceil(n/16)][k][16], and their scales [n]
void jetrl_pack_grid(const uint16_t* w, const double* row_max, int64_t n, int64_t k, int64_t stride, uint16_t* packed,
                     double* scale) {
  std::memset(packed, 0, (n + 15) / 16 * k * 16 * sizeof(uint16_t));
  for (int64_t row = 0; row < n; row++) {
    const int e = exponent(row_max[row]);
    const double up = pow2(20 - e);
    scale[row] = pow2(e - 20);
    uint16_t* target = packed + row / 16 * k * 16 + row % 16;
    for (int64_t i = 0; i < k; i++) target[i * 16] = to_bf16((float)nearest((double)bf16(w[row * stride + i]) * up));
  }
}
// x bf16 [m][k] (row stride `stride`) times a packed grid weight; exactly one of out64, out32 is not null
void jetrl_grid_gemm(const uint16_t* x, const double* row_max, const uint16_t* packed, const double* column_scale,
                     double* out64, float* out32, int64_t m, int64_t n, int64_t k, int64_t stride) {
  std::vector<double> a(m * k), scale(m);
  for (int64_t i = 0; i < m; i++) {
    const int e = exponent(row_max[i]);
    const double up = pow2(20 - e);
    scale[i] = pow2(e - 20);
    for (int64_t k0 = 0; k0 < k; k0 += 256) {
      const int64_t width = std::min<int64_t>(256, k - k0);
      double* target = a.data() + k0 * m + i * width;
      for (int64_t j = 0; j < width; j++) target[j] = nearest((double)bf16(x[i * stride + k0 + j]) * up);
    }
  }
  const double *left = a.data(), *rows = scale.data();
  parallel((n + 15) / 16, [=](int64_t p0, int64_t p1) {
    active->grid_gemm(left, rows, packed, column_scale, out64, out32, m, n, k, p0, p1);
  });
}

// Level 3 only. Panels of jetrl_pack_grid [panels][k][16] -> digits [panels][ceil(k/64)][3][16][64] of int8
void jetrl_grid_digits(const uint16_t* panels, int64_t n, int64_t k, int8_t* packed) {
  const int64_t slices = (k + 63) / 64, count = (n + 15) / 16;
  std::memset(packed, 0, count * slices * 3 * 1024);
  for (int64_t panel = 0; panel < count; panel++)
    for (int64_t i = 0; i < k; i++)
      for (int64_t j = 0; j < 16; j++) {
        const int value = (int)bf16(panels[(panel * k + i) * 16 + j]), magnitude = value < 0 ? -value : value;
        int8_t* target = packed + (panel * slices + i / 64) * 3 * 1024 + i % 64 / 4 * 64 + j * 4 + i % 4;
        for (int d = 0; d < 3; d++)
          target[d * 1024] = (int8_t)((value < 0 ? -1 : 1) * (magnitude >> 7 * d & 127));
      }
}
// As jetrl_grid_gemm, with a weight of jetrl_grid_digits
void jetrl_grid_gemm_digits(const uint16_t* x, const double* row_max, const int8_t* packed, const double* column_scale,
                            double* out64, float* out32, int64_t m, int64_t n, int64_t k, int64_t stride) {
#ifdef JETRL_AMX
  const int64_t slices = (k + 63) / 64, rows = (m + 15) / 16 * 16;
  std::vector<int8_t> a(slices * 3 * rows * 64, 0);
  std::vector<double> scale(m);
  for (int64_t i = 0; i < m; i++) {
    const int e = exponent(row_max[i]);
    const double up = pow2(20 - e);
    scale[i] = pow2(e - 20);
    for (int64_t j = 0; j < k; j++) {
      const int value = (int)nearest((double)bf16(x[i * stride + j]) * up), magnitude = value < 0 ? -value : value;
      int8_t* target = a.data() + (j / 64 * 3 * rows + i) * 64 + j % 64;
      for (int d = 0; d < 3; d++) target[d * rows * 64] = (int8_t)((value < 0 ? -1 : 1) * (magnitude >> 7 * d & 127));
    }
  }
  const int8_t* left = a.data();
  const double* row_scale = scale.data();
  parallel((n + 15) / 16, [=](int64_t p0, int64_t p1) {
    amx::grid_gemm(left, row_scale, packed, column_scale, out64, out32, m, rows, n, slices, p0, p1);
  });
#endif
}

void jetrl_attention(const uint16_t* q, const uint16_t* k_pool, const uint16_t* v_pool, const int32_t* table,
                     int64_t table_stride, const int64_t* rows, const int64_t* cu, int64_t sequences,
                     const int64_t* kv_len, int64_t heads, int64_t groups, int64_t dim, float scale, uint16_t* out) {
  const Attention a{q, k_pool, v_pool, table, table_stride, rows, cu, kv_len, heads, groups, dim, scale, out};
  parallel(sequences * groups, [a](int64_t first, int64_t last) { active->attend(a, first, last); });
}

// Norm y of x [rows][h]. With `residual`: of total = x + residual (bf16), which is written too. With `codes`: also y
// quantized, codes [rows][h] and scales [rows][groups].
void jetrl_rmsnorm(const uint16_t* x, const uint16_t* residual, const uint16_t* w, float eps, uint16_t* total, uint16_t* y,
                   int64_t pow2_format, uint8_t* codes, float* scales, int64_t rows, int64_t h) {
  parallel(rows, [=](int64_t a, int64_t b) {
    for (int64_t m = a; m < b; m++) {
      const uint16_t* row = x + m * h;
      if (residual) {
        active->add(row, residual + m * h, total + m * h, h);
        row = total + m * h;
      }
      active->rmsnorm(row, w, eps, y + m * h, h);
      quantize_row(y, m, h, pow2_format, codes, scales);
    }
  });
}
// x [rows][2f] -> y [rows][f]; with `codes` also y quantized
void jetrl_swiglu(const uint16_t* x, uint16_t* y, int64_t pow2_format, uint8_t* codes, float* scales, int64_t rows, int64_t f) {
  parallel(rows, [=](int64_t a, int64_t b) {
    for (int64_t m = a; m < b; m++) {
      active->swiglu(x + m * 2 * f, y + m * f, f);
      quantize_row(y, m, f, pow2_format, codes, scales);
    }
  });
}
void jetrl_rope(const uint16_t* x, const float* c, const float* s, uint16_t* y, int64_t tokens, int64_t heads, int64_t half) {
  parallel(tokens, [=](int64_t a, int64_t b) {
    active->rope(x + a * heads * 2 * half, c + a * half, s + a * half, y + a * heads * 2 * half, b - a, heads, half);
  });
}
// y bf16 [tokens][k][h] times weights [tokens][k], added left to right over k -> out bf16 [tokens][h]
void jetrl_moe_combine(const uint16_t* y, const float* weights, uint16_t* out, int64_t tokens, int64_t k, int64_t h) {
  parallel(tokens, [=](int64_t a, int64_t b) { active->combine(y + a * k * h, weights + a * k, out + a * h, b - a, k, h); });
}
void jetrl_log_sum_exp(const float* z, int64_t rows, int64_t v, float* top, double* log_sum) {
  parallel(rows, [=](int64_t a, int64_t b) { active->log_sum_exp(z + a * v, b - a, v, top + a, log_sum + a); });
}
void jetrl_exp_weights(const float* z, int64_t rows, int64_t v, double* w) {
  parallel(rows, [=](int64_t a, int64_t b) { active->exp_weights(z + a * v, b - a, v, w + a * v); });
}
}
