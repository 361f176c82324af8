// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
//
// Products of tokens in 16 bit with weights in INT8 or INT4. PyTorch's `_weight_int8pack_mm` sums along an output's inputs,
// and takes longer to add up its vectors than memory takes to deliver the weights; its `_weight_int4pack_mm_for_cpu` widens
// every weight to float32 for every fourth token. Here weights lie in blocks of outputs, [outputs / width, inputs, width], so
// that there is nothing to add up. Where a CPU adds up pairs of bfloat16 products (AVX512-BF16), weights become bfloat16 in
// registers, exactly, and serve several tokens there.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t INT8_BLOCK = 32;

// --- INT8 by float32 -----------------------------------------------------------------------------------------------

constexpr int64_t MOST_TOKENS = 8;

// The product of a number in 16 bit with an INT8 weight is exact in float32, so a fused sum rounds as a plain one does.
template <int64_t tokens>
void multiply_block(const int8_t* __restrict weights, const float* __restrict x, int64_t inputs, float* __restrict sums) {
  constexpr int64_t width = INT8_BLOCK;
  float sum[tokens][width] = {};
  for (int64_t k = 0; k < inputs; k++, weights += width, x += tokens) {
    float wide[width];
    for (int64_t n = 0; n < width; n++) wide[n] = static_cast<float>(weights[n]);
#pragma GCC unroll 8
    for (int64_t m = 0; m < tokens; m++) {
      const float of_token = x[m];
      for (int64_t n = 0; n < width; n++) sum[m][n] = std::fma(of_token, wide[n], sum[m][n]);
    }
  }
  for (int64_t m = 0; m < tokens; m++)
    for (int64_t n = 0; n < width; n++) sums[m * width + n] = sum[m][n];
}

template <size_t... tokens>
constexpr auto blocks_by_tokens(std::index_sequence<tokens...>) {
  return std::array{multiply_block<tokens + 1>...};
}

template <typename scalar_t>
void scaled(const float* sums, const float* scales, scalar_t* out, int64_t tokens, int64_t outputs) {
  for (int64_t m = 0; m < tokens; m++)
    for (int64_t n = 0; n < INT8_BLOCK; n++)
      out[m * outputs + n] = static_cast<scalar_t>(sums[m * INT8_BLOCK + n] * scales[n]);
}

// Return [tokens, outputs] for `x` [tokens, inputs] in its type, 1 to MOST_TOKENS tokens; `scale` is float32 [outputs],
// `weight` int8 [outputs / INT8_BLOCK, inputs, INT8_BLOCK].
at::Tensor few_tokens(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale) {
  const int64_t tokens = x.size(0), inputs = x.size(1), outputs = scale.numel();
  TORCH_CHECK(tokens > 0 && tokens <= MOST_TOKENS && outputs % INT8_BLOCK == 0);
  TORCH_CHECK(weight.numel() == inputs * outputs && weight.is_contiguous() && scale.is_contiguous());
  static constexpr auto multiply = blocks_by_tokens(std::make_index_sequence<MOST_TOKENS>());
  const at::Tensor columns = x.t().to(at::kFloat).contiguous(), out = at::empty({tokens, outputs}, x.options());
  const auto* weights = weight.const_data_ptr<int8_t>();
  const float *numbers = columns.const_data_ptr<float>(), *scales = scale.const_data_ptr<float>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "few_tokens", [&] {
    auto* to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, outputs / INT8_BLOCK, 1, [&](int64_t first, int64_t last) {
      float sums[MOST_TOKENS * INT8_BLOCK];
      for (int64_t n = first * INT8_BLOCK; n < last * INT8_BLOCK; n += INT8_BLOCK) {
        multiply[tokens - 1](weights + n * inputs, numbers, inputs, sums);
        scaled(sums, scales + n, to + n, tokens, outputs);
      }
    });
  });
  return out;
}

// Write the blocks of `weight` [blocks, inputs, INT8_BLOCK] to `out` [inputs, blocks * INT8_BLOCK], which is of another type.
void widen(const at::Tensor& weight, at::Tensor out) {
  const int64_t blocks = weight.size(0), inputs = weight.size(1), outputs = out.size(1);
  TORCH_CHECK(out.size(0) == inputs && outputs == blocks * INT8_BLOCK && weight.is_contiguous() && out.is_contiguous());
  const auto* weights = weight.const_data_ptr<int8_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "widen", [&] {
    auto* to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; b++)
        for (int64_t k = 0; k < inputs; k++)
          for (int64_t n = 0; n < INT8_BLOCK; n++)
            to[k * outputs + b * INT8_BLOCK + n] =
                static_cast<scalar_t>(static_cast<float>(weights[(b * inputs + k) * INT8_BLOCK + n]));
    });
  });
}

#ifdef __AVX512BF16__
// --- Pairs of bfloat16 -----------------------------------------------------------------------------------------------

constexpr int64_t REGISTERS = 24;  // which hold sums, of 32
constexpr int64_t AHEAD = 2048;    // bytes from the weights in use to those that are fetched

// Add to `sum` the products of `x`, pairs of bfloat16 [tokens, pairs] whose rows are `stride` pairs apart, with as many pairs
// of weights. `weights.pairs(k, out)` has those of inputs 2 k and 2 k + 1, out[p] of outputs 16 p to 16 p + 15.
template <class Weights, int64_t tokens>
[[gnu::always_inline]] inline void add_products(const Weights& weights, const uint32_t* x, int64_t stride, int64_t pairs,
                                                __m512 (&sum)[tokens][Weights::PARTS]) {
  for (int64_t k = 0; k < pairs; k++) {
    __m512i wide[Weights::PARTS];
    // With fewer tokens the CPU's own prefetching keeps up, and this would only be one more instruction.
    if constexpr (tokens > 2) _mm_prefetch(weights.at(k) + AHEAD, _MM_HINT_T0);
    weights.pairs(k, wide);
#pragma GCC unroll 16
    for (int64_t m = 0; m < tokens; m++) {
      const __m512bh of_token = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(x[m * stride + k]));
      for (int64_t p = 0; p < Weights::PARTS; p++) sum[m][p] = _mm512_dpbf16_ps(sum[m][p], of_token, (__m512bh)wide[p]);
    }
  }
}

// Return Block<1>::multiply, Block<2>::multiply and so on: a function for each number of tokens.
template <template <int64_t> class Block, size_t... tokens>
constexpr auto functions_by_tokens(std::index_sequence<tokens...>) {
  return std::array{Block<tokens + 1>::multiply...};
}

// Call the function of Block for all `tokens`, as many at once as registers hold sums of `parts` registers a token.
template <template <int64_t> class Block, int64_t parts, class Call>
void for_tokens(int64_t tokens, Call call) {
  constexpr int64_t most = REGISTERS / parts;
  static constexpr auto functions = functions_by_tokens<Block>(std::make_index_sequence<most>());
  for (int64_t first = 0, count; first < tokens; first += count) {
    const int64_t left = tokens - first, turns = (left + most - 1) / most;
    count = (left + turns - 1) / turns;
    call(functions[count - 1], first);
  }
}

inline void store(at::BFloat16* out, __m512 numbers) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(numbers));
}

// --- INT8 by bfloat16 ------------------------------------------------------------------------------------------------

struct Int8 {
  static constexpr int64_t PARTS = INT8_BLOCK / 16;
  const int8_t* weights;  // [inputs, INT8_BLOCK]

  const char* at(int64_t k) const { return reinterpret_cast<const char*>(weights + 2 * k * INT8_BLOCK); }

  void pairs(int64_t k, __m512i* out) const {
    const auto wide = [&](int64_t at) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + at));
      return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
    };
    for (int64_t p = 0; p < PARTS; p++) {
      const __m512i even = wide(2 * k * INT8_BLOCK + 16 * p), odd = wide((2 * k + 1) * INT8_BLOCK + 16 * p);
      out[p] = _mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
    }
  }
};

// Write to `out` [tokens, outputs] in bfloat16 INT8_BLOCK outputs of `tokens` tokens.
template <int64_t tokens>
struct Int8Block {
  static void multiply(Int8 weights, const uint32_t* x, int64_t pairs, const float* scales, at::BFloat16* out,
                       int64_t outputs) {
    __m512 sum[tokens][Int8::PARTS] = {};
    add_products(weights, x, pairs, pairs, sum);
    for (int64_t p = 0; p < Int8::PARTS; p++) {
      const __m512 scale = _mm512_loadu_ps(scales + 16 * p);
      for (int64_t m = 0; m < tokens; m++) store(out + m * outputs + 16 * p, _mm512_mul_ps(sum[m][p], scale));
    }
  }
};

// Return the same as few_tokens for any number of tokens in bfloat16, and an even number of inputs.
at::Tensor many_tokens(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale) {
  const int64_t tokens = x.size(0), inputs = x.size(1), outputs = scale.numel();
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && inputs % 2 == 0 && outputs % INT8_BLOCK == 0 && scale.is_contiguous());
  TORCH_CHECK(weight.numel() == inputs * outputs && weight.is_contiguous());
  const at::Tensor rows = x.contiguous(), out = at::empty({tokens, outputs}, x.options());
  const auto* weights = weight.const_data_ptr<int8_t>();
  const auto* numbers = static_cast<const uint32_t*>(rows.const_data_ptr());
  const float* scales = scale.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<at::BFloat16>();
  at::parallel_for(0, outputs / INT8_BLOCK, 1, [&](int64_t first, int64_t last) {
    for (int64_t n = first * INT8_BLOCK; n < last * INT8_BLOCK; n += INT8_BLOCK)
      for_tokens<Int8Block, Int8::PARTS>(tokens, [&](auto multiply, int64_t m) {
        multiply({weights + n * inputs}, numbers + m * inputs / 2, inputs / 2, scales + n, to + m * outputs + n, outputs);
      });
  });
  return out;
}
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
// --- INT4 by bfloat16, in the layout of PyTorch's operator -------------------------------------------------------------

constexpr int64_t INT4_BLOCK = 64;

// Where a pair's bytes go, so that the bytes of its two inputs stand beside one another.
inline __m512i order_of_bytes() {
  alignas(64) uint8_t order[64];
  for (int j = 0; j < 64; j++) order[j] = j % 16 / 8 * 16 + j / 16 * 4 + j % 8 / 2 + j % 2 * INT4_BLOCK / 2;
  return _mm512_load_si512(order);
}

struct Int4 {
  static constexpr int64_t PARTS = INT4_BLOCK / 16;
  // pairs() gives value + 16, as which bfloat16 has the value in the first four bits of its fraction. What stands for 0 is 24.
  static constexpr float MIDDLE = 24;
  const uint8_t* packed;  // [inputs, INT4_BLOCK / 2]: a byte holds outputs b and b + INT4_BLOCK / 2
  const __m512i order;

  const char* at(int64_t k) const { return reinterpret_cast<const char*>(packed + k * INT4_BLOCK); }

  void pairs(int64_t k, __m512i* out) const {
    const __m512i bytes = _mm512_permutexvar_epi8(order, _mm512_loadu_si512(at(k)));
    const __m512i upper = _mm512_set1_epi8(0x41), fraction = _mm512_set1_epi8(0x78), one = _mm512_set1_epi8(-0x80);
    const __m512i moved[] = {_mm512_slli_epi16(bytes, 3), _mm512_srli_epi16(bytes, 1)};
    for (int64_t h = 0; h < 2; h++) {
      const __m512i lower = _mm512_ternarylogic_epi32(moved[h], fraction, one, 0xea);  // (moved & fraction) | one
      out[2 * h] = _mm512_unpacklo_epi8(lower, upper);
      out[2 * h + 1] = _mm512_unpackhi_epi8(lower, upper);
    }
  }
};

// Return the sums of each group's inputs, float32 [tokens, groups].
std::vector<float> sums_of_groups(const at::BFloat16* x, int64_t tokens, int64_t groups, int64_t size) {
  std::vector<float> sums(tokens * groups);
  for (int64_t g = 0; g < tokens * groups; g++, x += size) {
    float some[16] = {};
    for (int64_t k = 0; k < size; k++) some[k % 16] += static_cast<float>(x[k]);
    for (const float sum : some) sums[g] += sum;
  }
  return sums;
}

// Numbers that all blocks of a product share. A weight is (value - 8) * scale + zero, both of its group.
struct Int4Product {
  const uint32_t* x;               // pairs of bfloat16 [tokens, pairs]
  const float* of_inputs;          // sums of the inputs of each group [tokens, groups]
  const uint32_t* scale_and_zero;  // pairs of bfloat16 [groups, outputs]
  at::BFloat16* out;               // [tokens, outputs]
  int64_t pairs, groups, outputs;
};

// Write INT4_BLOCK outputs from `n` of `tokens` tokens from `first`.
template <int64_t tokens>
struct Int4Block {
  static void multiply(const Int4Product& product, Int4 weights, int64_t n, int64_t first) {
    const int64_t of_group = product.pairs / product.groups, outputs = product.outputs;
    const uint32_t *x = product.x + first * product.pairs, *both = product.scale_and_zero + n;
    const float* of_inputs = product.of_inputs + first * product.groups;
    __m512 total[tokens][Int4::PARTS] = {};
    for (int64_t g = 0; g < product.groups; g++, x += of_group, weights.packed += of_group * INT4_BLOCK, both += outputs) {
      __m512 sum[tokens][Int4::PARTS] = {};
      add_products(weights, x, product.pairs, of_group, sum);
      for (int64_t p = 0; p < Int4::PARTS; p++) {
        const __m512i pair = _mm512_loadu_si512(both + 16 * p);
        const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
        const __m512 stored = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(0xffff0000)));
        const __m512 zero = _mm512_fnmadd_ps(_mm512_set1_ps(Int4::MIDDLE), scale, stored);
        for (int64_t m = 0; m < tokens; m++) {
          const __m512 of_values = _mm512_fmadd_ps(sum[m][p], scale, total[m][p]);
          total[m][p] = _mm512_fmadd_ps(_mm512_set1_ps(of_inputs[m * product.groups + g]), zero, of_values);
        }
      }
    }
    for (int64_t m = 0; m < tokens; m++)
      for (int64_t p = 0; p < Int4::PARTS; p++) store(product.out + (first + m) * outputs + n + 16 * p, total[m][p]);
  }
};

// Return [tokens, outputs] for `x` [tokens, inputs], in bfloat16. `weight` is packed by PyTorch; `scale_and_zero` is bfloat16
// [groups, outputs, 2]: a weight is (value - 8) * scale + zero.
at::Tensor multiply_int4(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale_and_zero) {
  const int64_t tokens = x.size(0), inputs = x.size(1), groups = scale_and_zero.size(0), outputs = scale_and_zero.size(1);
  const int64_t size = inputs / groups;
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && scale_and_zero.scalar_type() == at::kBFloat16);
  TORCH_CHECK(outputs % INT4_BLOCK == 0 && inputs % groups == 0 && size % 16 == 0 && scale_and_zero.is_contiguous());
  TORCH_CHECK(weight.nbytes() * 2 == static_cast<size_t>(inputs * outputs) && weight.is_contiguous());
  const at::Tensor rows = x.contiguous(), out = at::empty({tokens, outputs}, x.options());
  const std::vector<float> of_inputs = sums_of_groups(rows.const_data_ptr<at::BFloat16>(), tokens, groups, size);
  const auto* numbers = static_cast<const uint32_t*>(rows.const_data_ptr());
  const auto* bytes = static_cast<const uint8_t*>(weight.const_data_ptr());
  const auto* scales = static_cast<const uint32_t*>(scale_and_zero.const_data_ptr());
  auto* to = out.mutable_data_ptr<at::BFloat16>();
  const Int4Product product{numbers, of_inputs.data(), scales, to, inputs / 2, groups, outputs};
  at::parallel_for(0, outputs / INT4_BLOCK, 1, [&](int64_t first, int64_t last) {
    const __m512i order = order_of_bytes();
    for (int64_t n = first * INT4_BLOCK; n < last * INT4_BLOCK; n += INT4_BLOCK)
      for_tokens<Int4Block, Int4::PARTS>(
          tokens, [&](auto multiply, int64_t m) { multiply(product, {bytes + n * inputs / 2, order}, n, m); });
  });
  return out;
}
#endif

}  // namespace

TORCH_LIBRARY(flexquant_weight_only, m) {
  m.def("multiply(Tensor x, Tensor weight, Tensor scale) -> Tensor", torch::dispatch(c10::DispatchKey::CPU, few_tokens));
  m.def("widen(Tensor weight, Tensor(a!) out) -> ()", torch::dispatch(c10::DispatchKey::CPU, widen));
#ifdef __AVX512BF16__
  m.def("multiply_many(Tensor x, Tensor weight, Tensor scale) -> Tensor", torch::dispatch(c10::DispatchKey::CPU, many_tokens));
#ifdef __AVX512VBMI__
  m.def("multiply_int4(Tensor x, Tensor weight, Tensor scale_and_zero) -> Tensor",
        torch::dispatch(c10::DispatchKey::CPU, multiply_int4));
#endif
#endif
}
