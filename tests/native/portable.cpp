// Runs every kernel on integers from a fixed generator and prints a checksum of all outputs: equal on every processor.
#include "../../jetrl_megatron/native/kernels.cpp"
#include <cstdio>

static uint64_t state = 1;
static uint32_t draw() { return (uint32_t)((state = state * 6364136223846793005ull + 1442695040888963407ull) >> 33); }
// bf16 of both signs over about 2^-12 .. 2^4, so that every sum needs its order or its exactness
static uint16_t draw_bf16() { return (uint16_t)((draw() & 1) << 15 | (115 + draw() % 16) << 7 | (draw() & 127)); }
static std::vector<uint16_t> bf16s(int64_t n) { std::vector<uint16_t> v(n); for (auto& x : v) x = draw_bf16(); return v; }
static uint64_t digest = 14695981039346656037ull;
template <class T>
static void add(const std::vector<T>& v) {
  const unsigned char* p = (const unsigned char*)v.data();
  for (size_t i = 0; i < v.size() * sizeof(T); i++) digest = (digest ^ p[i]) * 1099511628211ull;
}

int main(int argc, char** argv) {
  const int level = argc > 1 ? argv[1][0] - '0' : jetrl_best_level();
  if (jetrl_use_level(level) != level) return 1;
  for (const int64_t m : {1, 5, 37}) {
    const int64_t n = 50, k = 300, groups = 3;
    const auto x = bf16s(m * k), w = bf16s(n * k);
    std::vector<uint8_t> codes(m * k), weight(n * k), columns(m * k);
    std::vector<float> scales(m * groups), row_scales(n * groups), scale_b(groups * n), column_scales(k * ((m + 127) / 128));
    std::vector<uint16_t> packed(4 * groups * 128 * 16), out(m * n);
    jetrl_quantize_blocks(w.data(), 1, n, k, 0, weight.data(), row_scales.data());
    for (int64_t i = 0; i < n; i++) for (int64_t g = 0; g < groups; g++) scale_b[g * n + i] = row_scales[i * groups + g];
    jetrl_pack_fp8(weight.data(), n, k, packed.data());
    jetrl_quantized_fp8_linear(x.data(), 0, packed.data(), scale_b.data(), out.data(), codes.data(), scales.data(), m, n, k, 1);
    jetrl_quantize_columns(x.data(), 1, m, k, 1, columns.data(), column_scales.data());
    std::vector<float> wide(m * k);
    jetrl_dequantize(codes.data(), scales.data(), 1, m, k, 0, wide.data());
    add(wide); add(weight); add(row_scales); add(codes); add(scales); add(out); add(columns); add(column_scales);
    std::vector<double> x_max(m), w_max(n), grid_scale(n);
    std::vector<uint16_t> grid(4 * k * 16);
    std::vector<float> logits(m * n), top(m);
    jetrl_row_max(x.data(), m, k, x_max.data());
    jetrl_row_max(w.data(), n, k, w_max.data());
    jetrl_pack_grid(w.data(), w_max.data(), n, k, k, grid.data(), grid_scale.data());
    jetrl_grid_gemm(x.data(), x_max.data(), grid.data(), grid_scale.data(), nullptr, logits.data(), m, n, k, k);
    std::vector<double> log_sum(m), weights(m * n);
    jetrl_log_sum_exp(logits.data(), m, n, top.data(), log_sum.data());
    jetrl_exp_weights(logits.data(), m, n, weights.data());
    add(logits); add(top); add(log_sum); add(weights);
    std::vector<uint16_t> normed(m * k), gated(m * k / 2), rotated(m * k), combined(m * k / 3);
    jetrl_moe_combine(x.data(), logits.data(), combined.data(), m, 3, k / 3);
    std::vector<uint16_t> total(m * k);
    std::vector<uint8_t> normed_codes(m * k), gated_codes(m * k / 2);
    std::vector<float> normed_scales(m * groups), gated_scales(m * 2);
    jetrl_rmsnorm(x.data(), nullptr, w.data(), 1e-6f, nullptr, normed.data(), 0, nullptr, nullptr, m, k);
    add(normed);
    jetrl_rmsnorm(x.data(), normed.data(), w.data(), 1e-6f, total.data(), normed.data(), 1, normed_codes.data(),
                  normed_scales.data(), m, k);
    jetrl_swiglu(x.data(), gated.data(), 0, gated_codes.data(), gated_scales.data(), m, k / 2);
    add(total); add(normed_codes); add(normed_scales); add(gated_codes); add(gated_scales);
    std::vector<float> cosine(m * 50), sine(m * 50);
    for (auto& c : cosine) c = bf16(draw_bf16());
    for (auto& s : sine) s = bf16(draw_bf16());
    jetrl_rope(x.data(), cosine.data(), sine.data(), rotated.data(), m, 3, 50);
    add(normed); add(gated); add(rotated); add(combined);
    for (const int64_t dim : {64, 70}) {  // m queries at the end of a sequence of 100 tokens: decode, or a chunk of prefill
      const auto q = bf16s(m * 6 * dim), keys = bf16s(100 * 2 * dim), values = bf16s(100 * 2 * dim);
      std::vector<int32_t> table(200);  // the sequence's row is the second
      std::vector<int64_t> rows{1}, cu{0, m}, kv_len(m);
      for (int i = 0; i < 100; i++) table[100 + i] = (i * 37) % 100;
      for (int64_t i = 0; i < m; i++) kv_len[i] = 100 - m + i + 1;
      std::vector<uint16_t> attended(m * 6 * dim);
      jetrl_attention(q.data(), keys.data(), values.data(), table.data(), 100, rows.data(), cu.data(), 1, kv_len.data(), 6,
                      2, dim, 0.125f, attended.data());
      add(attended);
    }
  }
  std::printf("%016llx\n", (unsigned long long)digest);
}
