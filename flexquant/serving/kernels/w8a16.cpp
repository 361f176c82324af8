// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
//
// Products of tokens in 16 bit with INT8 weights that have one scale an output. PyTorch's `_weight_int8pack_mm` sums along
// an output's inputs, and takes longer to add up its vectors than memory takes to deliver the weights. Here vectors hold
// several outputs, so that there is nothing to add up: weights lie in blocks, [outputs / WIDTH, inputs, WIDTH].
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

constexpr int64_t WIDTH = 32;
constexpr int64_t MOST_TOKENS = 8;

// The product of a number in 16 bit with an INT8 weight is exact in float32, so a fused sum rounds as a plain one does.
template <int64_t tokens>
void multiply_block(const int8_t* __restrict weights, const float* __restrict x, int64_t inputs, float* __restrict sums) {
  float sum[tokens][WIDTH] = {};
  for (int64_t k = 0; k < inputs; k++, weights += WIDTH, x += tokens) {
    float wide[WIDTH];
    for (int64_t n = 0; n < WIDTH; n++) wide[n] = static_cast<float>(weights[n]);
#pragma GCC unroll 8
    for (int64_t m = 0; m < tokens; m++) {
      const float of_token = x[m];
      for (int64_t n = 0; n < WIDTH; n++) sum[m][n] = std::fma(of_token, wide[n], sum[m][n]);
    }
  }
  for (int64_t m = 0; m < tokens; m++)
    for (int64_t n = 0; n < WIDTH; n++) sums[m * WIDTH + n] = sum[m][n];
}

#ifdef __AVX512BF16__
// Write a block as bfloat16, which holds INT8 exactly: two inputs of an output beside one another, [inputs / 2, WIDTH, 2].
void pair_up(const int8_t* weights, int64_t inputs, uint32_t* pairs) {
  const auto wide = [](const int8_t* from) {
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))));
  };
  for (int64_t k = 0; k < inputs; k += 2, weights += 2 * WIDTH)
    for (int64_t n = 0; n < WIDTH; n += 16, pairs += 16)
      _mm512_storeu_si512(pairs, _mm512_or_si512(_mm512_srli_epi32(wide(weights + n), 16), wide(weights + WIDTH + n)));
}

template <int64_t tokens>
void multiply_pairs(const uint32_t* pairs, const uint32_t* x, int64_t count, float* sums) {
  __m512 sum[tokens][2] = {};
  for (int64_t k = 0; k < count; k++, pairs += WIDTH) {
    const __m512bh low = (__m512bh)_mm512_loadu_si512(pairs), high = (__m512bh)_mm512_loadu_si512(pairs + 16);
#pragma GCC unroll 8
    for (int64_t m = 0; m < tokens; m++) {
      const __m512bh of_token = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(x[m * count + k]));
      sum[m][0] = _mm512_dpbf16_ps(sum[m][0], of_token, low);
      sum[m][1] = _mm512_dpbf16_ps(sum[m][1], of_token, high);
    }
  }
  for (int64_t m = 0; m < tokens; m++)
    for (int64_t h = 0; h < 2; h++) _mm512_storeu_ps(sums + m * WIDTH + h * 16, sum[m][h]);
}
#endif

template <template <int64_t> class Kernel, size_t... tokens>
constexpr auto by_tokens(std::index_sequence<tokens...>) {
  return std::array{Kernel<tokens + 1>::call...};
}
template <int64_t tokens>
struct Block {
  static constexpr auto call = multiply_block<tokens>;
};

template <typename scalar_t>
void scaled(const float* sums, const float* scales, scalar_t* out, int64_t tokens, int64_t outputs) {
  for (int64_t m = 0; m < tokens; m++)
    for (int64_t n = 0; n < WIDTH; n++) out[m * outputs + n] = static_cast<scalar_t>(sums[m * WIDTH + n] * scales[n]);
}

// Return [tokens, outputs] for `x` [tokens, inputs] in its type, 1 to MOST_TOKENS tokens; `scale` is float32 [outputs],
// `weight` int8 [outputs / WIDTH, inputs, WIDTH].
at::Tensor few_tokens(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale) {
  const int64_t tokens = x.size(0), inputs = x.size(1), outputs = scale.numel();
  TORCH_CHECK(tokens > 0 && tokens <= MOST_TOKENS && outputs % WIDTH == 0);
  TORCH_CHECK(weight.numel() == inputs * outputs && weight.is_contiguous() && scale.is_contiguous());
  static constexpr auto multiply = by_tokens<Block>(std::make_index_sequence<MOST_TOKENS>());
  const at::Tensor columns = x.t().to(at::kFloat).contiguous(), out = at::empty({tokens, outputs}, x.options());
  const auto* weights = weight.const_data_ptr<int8_t>();
  const float *numbers = columns.const_data_ptr<float>(), *scales = scale.const_data_ptr<float>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "few_tokens", [&] {
    auto* to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, outputs / WIDTH, 1, [&](int64_t first, int64_t last) {
      float sums[MOST_TOKENS * WIDTH];
      for (int64_t n = first * WIDTH; n < last * WIDTH; n += WIDTH) {
        multiply[tokens - 1](weights + n * inputs, numbers, inputs, sums);
        scaled(sums, scales + n, to + n, tokens, outputs);
      }
    });
  });
  return out;
}

#ifdef __AVX512BF16__
template <int64_t tokens>
struct Pairs {
  static constexpr auto call = multiply_pairs<tokens>;
};

// Return the same for any number of tokens in bfloat16, and an even number of inputs: a block is widened once for all.
at::Tensor many_tokens(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale) {
  const int64_t tokens = x.size(0), inputs = x.size(1), outputs = scale.numel();
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && inputs % 2 == 0 && outputs % WIDTH == 0 && scale.is_contiguous());
  TORCH_CHECK(weight.numel() == inputs * outputs && weight.is_contiguous());
  static constexpr auto multiply = by_tokens<Pairs>(std::make_index_sequence<MOST_TOKENS>());
  const at::Tensor rows = x.contiguous(), out = at::empty({tokens, outputs}, x.options());
  const auto* weights = weight.const_data_ptr<int8_t>();
  const auto* numbers = static_cast<const uint32_t*>(rows.const_data_ptr());
  const float* scales = scale.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<at::BFloat16>();
  at::parallel_for(0, outputs / WIDTH, 1, [&](int64_t first, int64_t last) {
    std::vector<uint32_t> pairs(inputs / 2 * WIDTH);
    float sums[MOST_TOKENS * WIDTH];
    for (int64_t n = first * WIDTH; n < last * WIDTH; n += WIDTH) {
      pair_up(weights + n * inputs, inputs, pairs.data());
      for (int64_t m = 0, some; m < tokens; m += some) {
        some = std::min(tokens - m, MOST_TOKENS);
        multiply[some - 1](pairs.data(), numbers + m * (inputs / 2), inputs / 2, sums);
        scaled(sums, scales + n, to + m * outputs + n, some, outputs);
      }
    }
  });
  return out;
}
#endif

// Write the blocks of `weight` [blocks, inputs, WIDTH] to `out` [inputs, blocks * WIDTH], which is of another type.
void widen(const at::Tensor& weight, at::Tensor out) {
  const int64_t blocks = weight.size(0), inputs = weight.size(1), outputs = out.size(1);
  TORCH_CHECK(out.size(0) == inputs && outputs == blocks * WIDTH && weight.is_contiguous() && out.is_contiguous());
  const auto* weights = weight.const_data_ptr<int8_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "widen", [&] {
    auto* to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; b++)
        for (int64_t k = 0; k < inputs; k++)
          for (int64_t n = 0; n < WIDTH; n++)
            to[k * outputs + b * WIDTH + n] = static_cast<scalar_t>(static_cast<float>(weights[(b * inputs + k) * WIDTH + n]));
    });
  });
}

}  // namespace

TORCH_LIBRARY(flexquant_w8a16, m) {
  m.def("multiply(Tensor x, Tensor weight, Tensor scale) -> Tensor", torch::dispatch(c10::DispatchKey::CPU, few_tokens));
#ifdef __AVX512BF16__
  m.def("multiply_many(Tensor x, Tensor weight, Tensor scale) -> Tensor", torch::dispatch(c10::DispatchKey::CPU, many_tokens));
#endif
  m.def("widen(Tensor weight, Tensor(a!) out) -> ()", torch::dispatch(c10::DispatchKey::CPU, widen));
}
