// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
//
// What PyTorch has no operator for, between INT4 weights as kernels keep them and its INT8 product: INT4 to INT8
// weights, and INT32 sums to an output. Loops run on PyTorch's own threads.
#include <ATen/Dispatch.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <vector>

#ifdef __AMX_INT8__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t INPUTS_AT_ONCE = 32;
constexpr int64_t WIDEST = 64;

// Call work(first, count) for consecutive rows of `tensor`, side by side.
void for_rows(const at::Tensor& tensor, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
  const char* start = static_cast<const char*>(tensor.data_ptr());
  const int64_t row_bytes = tensor.stride(0) * tensor.element_size();
  at::Tensor rows = tensor.select(1, 0);
  auto iterator = at::TensorIteratorConfig()
                      .add_output(rows)
                      .check_all_same_dtype(false)
                      .resize_outputs(false)
                      .build();
  iterator.for_each(
      [&](char** data, const int64_t*, int64_t count) { work((data[0] - start) / row_bytes, count); }, grain);
}

// The 4-bit values of a block, [inputs, width]. A byte holds outputs b and b + width / 2, or 2 b and 2 b + 1.
void unpack(const uint8_t* __restrict packed, uint8_t* __restrict values, int64_t inputs, int64_t width,
            bool in_halves) {
  const int64_t half = width / 2;
  if (!in_halves) {
    for (int64_t b = 0; b < inputs * half; b++) {
      values[2 * b] = packed[b] & 15;
      values[2 * b + 1] = packed[b] >> 4;
    }
    return;
  }
  for (int64_t k = 0; k < inputs; k++, packed += half, values += width) {
    for (int64_t b = 0; b < half; b++) values[b] = packed[b] & 15;
    for (int64_t b = 0; b < half; b++) values[half + b] = packed[b] >> 4;
  }
}

// Nested weights have a factor for each input, and a difference of 4 bits, 8 of which stands for 0.
template <int64_t width, bool is_nested>
void rescale(const uint8_t* __restrict values, const float* __restrict ratio, const float* __restrict zero,
             const float* __restrict column, const uint8_t* __restrict difference, int8_t* __restrict out,
             int64_t outputs, int64_t inputs) {
  for (int64_t k = 0; k < inputs; k++, values += width, difference += width, out += outputs)
    for (int64_t n = 0; n < width; n++) {
      const float exact = (static_cast<float>(values[n]) - zero[n]) * ratio[n];
      if constexpr (is_nested)
        out[n] = static_cast<int8_t>(static_cast<int32_t>(std::nearbyint(exact * column[k])) + difference[n] - 8);
      else
        out[n] = static_cast<int8_t>(std::nearbyint(exact));
    }
}

template <bool is_nested>
auto rescale_of(int64_t width) {
  if (width == 64) return rescale<64, is_nested>;
  if (width == 48) return rescale<48, is_nested>;
  return width == 32 ? rescale<32, is_nested> : rescale<16, is_nested>;
}

// The tensors of nested weights; without these, a difference that is read by none, and no exceptions.
struct Nested {
  const float* column;
  const uint8_t* difference;
  const int32_t* places;
  const int8_t* exceptions;
  int64_t of_output;
};

Nested read_nested(at::TensorList nested, const at::Tensor& packed, int64_t inputs, int64_t outputs) {
  if (nested.empty()) return {nullptr, static_cast<const uint8_t*>(packed.data_ptr()), nullptr, nullptr, 0};
  TORCH_CHECK(nested.size() == 4 && nested[0].numel() == inputs && nested[1].nbytes() == packed.nbytes());
  TORCH_CHECK(nested[2].size(0) == outputs && nested[2].sizes() == nested[3].sizes());
  for (const at::Tensor& part : nested) TORCH_CHECK(part.is_contiguous());
  return {nested[0].data_ptr<float>(), static_cast<const uint8_t*>(nested[1].data_ptr()), nested[2].data_ptr<int32_t>(),
          nested[3].data_ptr<int8_t>(), nested[2].size(1)};
}

// Write INT8 weights `out` [inputs, some outputs], those from `from` on: (value - zero) * (scale * row), to the
// nearest, ties to even.
// `packed` holds blocks of `block` outputs one after another, and the last block may be narrower; `scale` is float32
// [groups, outputs], `row` [outputs]; `zero` int32 [groups, outputs / 8], in nibbles, the first output in the lowest,
// or 8 without it. Nested weights have four tensors more: `column`, float32 [inputs], and `difference`, packed as the
// weights, make them (value - zero) * (scale * row) * column, to the nearest, and the difference; then `places`, int32,
// and `values`, int8, both [outputs, exceptions], are the inputs (-1 for none) and the weights of exceptions.
void int4_to_int8(const at::Tensor& packed, const at::Tensor& scale, const std::optional<at::Tensor>& zero,
                  const at::Tensor& row, at::TensorList nested, int64_t block, bool in_halves, int64_t from,
                  at::Tensor out) {
  const int64_t inputs = out.size(0), some = out.size(1), outputs = scale.size(1), groups = scale.size(0);
  const int64_t group = inputs / groups;
  TORCH_CHECK(block <= WIDEST && outputs % 16 == 0 && some % 16 == 0 && inputs % groups == 0);
  TORCH_CHECK(from % block == 0 && (some % block == 0 || from + some == outputs) && from + some <= outputs);
  TORCH_CHECK(packed.nbytes() * 2 == static_cast<size_t>(inputs * outputs) && row.numel() == outputs);
  TORCH_CHECK(packed.is_contiguous() && scale.is_contiguous() && row.is_contiguous() && out.is_contiguous());
  TORCH_CHECK(!zero || (zero->is_contiguous() && zero->numel() * 8 == scale.numel()));
  const Nested own = read_nested(nested, packed, inputs, outputs);
  const bool is_nested = !nested.empty();
  const auto* bytes = static_cast<const uint8_t*>(packed.data_ptr());
  const float *scales = scale.data_ptr<float>(), *rows = row.data_ptr<float>();
  const int32_t* zeros = zero ? zero->data_ptr<int32_t>() : nullptr;
  int8_t* weights = out.data_ptr<int8_t>();
  for_rows(out, INPUTS_AT_ONCE, [&](int64_t first, int64_t count) {
    uint8_t values[INPUTS_AT_ONCE * WIDEST], beside[INPUTS_AT_ONCE * WIDEST];
    float ratio[WIDEST], middle[WIDEST];
    for (int64_t k = first, next; k < first + count; k = next) {
      next = std::min({k + INPUTS_AT_ONCE, first + count, (k / group + 1) * group});
      for (int64_t n = from; n < from + some; n += block) {
        const int64_t width = std::min(block, outputs - n), of_group = k / group * outputs + n;
        const int64_t place = (n * inputs + k * width) / 2;
        const bool halves = in_halves && width == block;
        for (int64_t b = 0; b < width; b++) ratio[b] = scales[of_group + b] * rows[n + b];
        for (int64_t b = 0; b < width; b++) middle[b] = zeros ? zeros[(of_group + b) / 8] >> 4 * (b % 8) & 15 : 8;
        unpack(bytes + place, values, next - k, width, halves);
        if (is_nested) unpack(own.difference + place, beside, next - k, width, halves);
        const auto rescale_block = is_nested ? rescale_of<true>(width) : rescale_of<false>(width);
        rescale_block(values, ratio, middle, own.column + k, beside, weights + k * some + n - from, some, next - k);
      }
    }
    for (int64_t n = 0; n < some; n++)
      for (int64_t e = (from + n) * own.of_output; e < (from + n + 1) * own.of_output; e++)
        if (own.places[e] >= first && own.places[e] < first + count) weights[own.places[e] * some + n] = own.exceptions[e];
  });
}

#ifdef __AMX_INT8__
enum Place { LOW, HIGH, PAIRS };

// Sixteen 4-bit values in the lowest bits of 16 words: the low or the high halves of 16 bytes, or both of 8 bytes.
template <Place place>
__m512i sixteen(const uint8_t* packed) {
  const auto* bytes = reinterpret_cast<const __m128i*>(packed);
  if constexpr (place == LOW) return _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes));
  if constexpr (place == HIGH) return _mm512_srli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes)), 4);
  const __m512i pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64(bytes));
  return _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28));
}

// Sixteen scales of group `g` from output `n` on; those in 16 bit may lie 2 apart, as PyTorch keeps zero points between.
__m512 sixteen_scales(const at::Tensor& scale, int64_t g, int64_t n) {
  const int64_t step = scale.stride(1), first = g * scale.stride(0) + n * step;
  if (scale.scalar_type() == at::kFloat) return _mm512_loadu_ps(static_cast<const float*>(scale.data_ptr()) + first);
  const auto* halves = static_cast<const uint16_t*>(scale.data_ptr()) + first;
  const __m512i words = step == 2 ? _mm512_loadu_si512(halves)
                                  : _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
  if (scale.scalar_type() == at::kHalf) return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

// Write 16 outputs' weights of INPUTS_AT_ONCE inputs, 4 inputs of an output beside one another; return their sums.
template <Place place, bool is_nested>
__m512i write_fours(const uint8_t* packed, const uint8_t* difference, int64_t row_bytes, __m512 ratio, __m512 zero,
                    const float* column, int8_t* out) {
  const __m512i numbers = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i differences = _mm512_sub_epi32(numbers, _mm512_set1_epi32(8)), byte = _mm512_set1_epi32(0xff);
  const __m512 values = _mm512_cvtepi32_ps(numbers);
  const auto either = [](__m512i where, __m512i a, __m512i b) { return _mm512_ternarylogic_epi32(where, a, b, 0xca); };
  __m512i sums = _mm512_setzero_si512();
  for (int64_t k = 0; k < INPUTS_AT_ONCE; k += 4, out += 128) {
    __m512i weights[4];
    for (int64_t j = 0; j < 4; j++, packed += row_bytes, difference += row_bytes) {
      __m512 exact = _mm512_permutexvar_ps(sixteen<place>(packed), values);
      exact = _mm512_mul_ps(_mm512_sub_ps(exact, zero), ratio);
      if constexpr (is_nested) exact = _mm512_mul_ps(exact, _mm512_set1_ps(column[k + j]));
      weights[j] = _mm512_cvtps_epi32(exact);
      if constexpr (is_nested)
        weights[j] = _mm512_add_epi32(weights[j], _mm512_permutexvar_epi32(sixteen<place>(difference), differences));
    }
    const __m512i first = either(byte, weights[0], _mm512_slli_epi32(weights[1], 8));
    const __m512i last = either(byte, weights[2], _mm512_slli_epi32(weights[3], 8));
    const __m512i four = either(_mm512_set1_epi32(0xffff), first, _mm512_slli_epi32(last, 16));
    sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), four);
    _mm512_storeu_si512(out, four);
  }
  return sums;
}

// Write the same weights as vLLM's INT8 product for AMX keeps them: `out` [some outputs, inputs + 4], int8, holds blocks
// of 32 outputs one after another. A block has, for every 4 inputs, 4 weights of each output, and in the end 128 times the
// sum of each output's weights, int32. `from` and the number of outputs are multiples of 64, `inputs` of 32. `scale` may
// also be float16 or bfloat16.
void int4_to_amx(const at::Tensor& packed, const at::Tensor& scale, const std::optional<at::Tensor>& zero,
                 const at::Tensor& row, at::TensorList nested, int64_t block, bool in_halves, int64_t from,
                 at::Tensor out) {
  const int64_t inputs = out.size(1) - 4, some = out.size(0), outputs = scale.size(1), group = inputs / scale.size(0);
  TORCH_CHECK(WIDEST % block == 0 && from % WIDEST == 0 && some % WIDEST == 0 && from + some <= outputs);
  TORCH_CHECK(inputs % INPUTS_AT_ONCE == 0 && group % INPUTS_AT_ONCE == 0 && row.numel() == outputs);
  TORCH_CHECK(packed.nbytes() * 2 == static_cast<size_t>(inputs * outputs) && packed.is_contiguous());
  TORCH_CHECK(row.is_contiguous() && out.is_contiguous());
  TORCH_CHECK(scale.is_floating_point() && scale.element_size() == (scale.scalar_type() == at::kFloat ? 4 : 2));
  TORCH_CHECK(scale.stride(1) == 1 || (scale.stride(1) == 2 && scale.element_size() == 2));
  TORCH_CHECK(!zero || (zero->is_contiguous() && zero->numel() * 8 == scale.numel()));
  const Nested own = read_nested(nested, packed, inputs, outputs);
  const bool is_nested = !nested.empty();
  const auto* bytes = static_cast<const uint8_t*>(packed.data_ptr());
  const float* rows = row.data_ptr<float>();
  const auto* zeros = zero ? static_cast<const uint8_t*>(zero->data_ptr()) : nullptr;
  int8_t* weights = out.data_ptr<int8_t>();
  const auto in_pairs = is_nested ? write_fours<PAIRS, true> : write_fours<PAIRS, false>;
  const auto in_low = is_nested ? write_fours<LOW, true> : write_fours<LOW, false>;
  const auto in_high = is_nested ? write_fours<HIGH, true> : write_fours<HIGH, false>;
  for_rows(out.view({some / WIDEST, -1}), 1, [&](int64_t first, int64_t count) {
    for (int64_t part = first; part < first + count; part++) {
      const int64_t n = from + part * WIDEST;
      int8_t* blocks[2] = {weights + part * WIDEST * (inputs + 4), weights + (part * WIDEST + 32) * (inputs + 4)};
      int32_t sums[WIDEST] = {};
      for (int64_t k = 0; k < inputs; k += INPUTS_AT_ONCE) {
        const int64_t of_group = k / group * outputs + n;
        for (int64_t b = 0; b < WIDEST; b += 16) {
          const int64_t in_block = b % block, is_high = in_halves && in_block >= block / 2;
          const int64_t in_row = in_halves ? in_block - is_high * block / 2 : in_block / 2;
          const int64_t byte = ((n + b - in_block) * inputs + k * block) / 2 + in_row;
          const __m512 ratio = _mm512_mul_ps(sixteen_scales(scale, k / group, n + b), _mm512_loadu_ps(rows + n + b));
          __m512i middle = _mm512_set1_epi32(8);
          if (zeros) middle = _mm512_and_si512(sixteen<PAIRS>(zeros + (of_group + b) / 2), _mm512_set1_epi32(15));
          const auto into_fours = !in_halves ? in_pairs : is_high ? in_high : in_low;
          const __m512i sum = into_fours(bytes + byte, own.difference + byte, block / 2, ratio, _mm512_cvtepi32_ps(middle),
                                         own.column + k, blocks[b / 32] + k * 32 + b % 32 * 4);
          _mm512_storeu_si512(sums + b, _mm512_add_epi32(_mm512_loadu_si512(sums + b), sum));
        }
      }
      for (int64_t b = 0; b < WIDEST; b++) {
        int8_t* whole = blocks[b / 32];
        for (int64_t e = (n + b) * own.of_output; e < (n + b + 1) * own.of_output; e++) {
          if (own.places[e] < 0) continue;
          int8_t& weight = whole[own.places[e] / 4 * 128 + b % 32 * 4 + own.places[e] % 4];
          sums[b] += own.exceptions[e] - weight;
          weight = own.exceptions[e];
        }
        reinterpret_cast<int32_t*>(whole + 32 * inputs)[b % 32] = 128 * sums[b];
      }
    }
  });
}

// Return [tokens, outputs] for `x` [tokens, inputs] in its type, by vLLM's INT8 product for AMX, which quantises `x` per
// token. `channel_scale` [outputs] are the scales of the INT8 weights. Weights of at most `most` numbers are written at
// once, to memory of the thread.
at::Tensor linear_by_amx(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale,
                         const std::optional<at::Tensor>& zero, const at::Tensor& row, at::TensorList nested,
                         const at::Tensor& channel_scale, const std::optional<at::Tensor>& bias, int64_t block,
                         bool in_halves, int64_t most) {
  static const auto multiply = c10::Dispatcher::singleton().findSchemaOrThrow("_C::int8_scaled_mm_with_quant", "");
  thread_local at::Tensor memory;
  const int64_t inputs = x.size(1), outputs = row.numel(), step = std::max(WIDEST, most / inputs / WIDEST * WIDEST);
  const auto zeros = zero ? std::optional(zero->contiguous()) : std::nullopt;
  const at::Tensor tokens = x.contiguous();
  std::vector<at::Tensor> parts;
  for (int64_t from = 0; from < outputs; from += step) {
    const int64_t some = std::min(step, outputs - from), numbers = some * (inputs + 4);
    if (!memory.defined() || memory.numel() < numbers) memory = at::empty({numbers}, at::kChar);
    const at::Tensor weights = memory.narrow(0, 0, numbers).view({some, inputs + 4});
    int4_to_amx(packed, scale, zeros, row, nested, block, in_halves, from, weights);
    c10::Stack stack{tokens, weights, channel_scale.narrow(0, from, some).unsqueeze(1)};
    stack.emplace_back(bias ? c10::IValue(bias->narrow(0, from, some).to(at::kFloat)) : c10::IValue());
    stack.emplace_back(static_cast<int64_t>(x.scalar_type()));
    stack.emplace_back(true);
    multiply.callBoxed(&stack);
    parts.push_back(stack.back().toTensor());
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts, 1);
}
#endif

// Write `out` [tokens, outputs] = (sums - zero point of the row * weights' sum of the column) * row scale * column scale
// + bias. `sums` are int32, and changed; zero points, if any, and the weights' sums too; scales and bias float32. Rows of
// `out` may lie apart.
void scale_sums(at::Tensor sums, const at::Tensor& row, const std::optional<at::Tensor>& zero,
                const std::optional<at::Tensor>& weight_sums, const at::Tensor& column,
                const std::optional<at::Tensor>& bias, at::Tensor out) {
  const int64_t outputs = sums.size(1);
  TORCH_CHECK(sums.is_contiguous() && row.is_contiguous() && column.is_contiguous() && out.stride(1) == 1);
  TORCH_CHECK(row.numel() == sums.size(0) && column.numel() == outputs && out.sizes() == sums.sizes());
  TORCH_CHECK(!zero || (zero->is_contiguous() && zero->numel() == row.numel() && weight_sums->is_contiguous() &&
                        weight_sums->numel() == outputs));
  auto* from = sums.data_ptr<int32_t>();
  const int32_t* zeros = zero ? zero->data_ptr<int32_t>() : nullptr;
  const int32_t* of_weights = zero ? weight_sums->data_ptr<int32_t>() : nullptr;
  const float *rows = row.data_ptr<float>(), *columns = column.data_ptr<float>();
  const float* biases = bias ? bias->data_ptr<float>() : nullptr;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "scale_sums", [&] {
    scalar_t* to = out.data_ptr<scalar_t>();
    for_rows(out, 16, [&](int64_t first, int64_t count) {
      for (int64_t m = first; m < first + count; m++) {
        int32_t* __restrict sum = from + m * outputs;
        if (zeros)
          for (int64_t n = 0; n < outputs; n++) sum[n] -= zeros[m] * of_weights[n];
        scalar_t* __restrict result = to + m * out.stride(0);
        const float scale = rows[m];
        if (biases)
          for (int64_t n = 0; n < outputs; n++)
            result[n] = static_cast<scalar_t>(static_cast<float>(sum[n]) * scale * columns[n] + biases[n]);
        else
          for (int64_t n = 0; n < outputs; n++)
            result[n] = static_cast<scalar_t>(static_cast<float>(sum[n]) * scale * columns[n]);
      }
    });
  });
}

}  // namespace

TORCH_LIBRARY(flexquant_one_copy, m) {
  const auto on_cpu = [](auto loop) { return torch::dispatch(c10::DispatchKey::CPU, loop); };
  m.def(
      "int4_to_int8(Tensor packed, Tensor scale, Tensor? zero, Tensor row, Tensor[] nested, int block, "
      "bool in_halves, int first_output, Tensor(a!) out) -> ()",
      on_cpu(int4_to_int8));
#ifdef __AMX_INT8__
  m.def(
      "int4_to_amx(Tensor packed, Tensor scale, Tensor? zero, Tensor row, Tensor[] nested, int block, bool in_halves, "
      "int first_output, Tensor(a!) out) -> ()",
      on_cpu(int4_to_amx));
  m.def(
      "linear_by_amx(Tensor x, Tensor packed, Tensor scale, Tensor? zero, Tensor row, Tensor[] nested, "
      "Tensor channel_scale, Tensor? bias, int block, bool in_halves, int most) -> Tensor",
      on_cpu(linear_by_amx));
#endif
  m.def(
      "scale_sums(Tensor(a!) sums, Tensor row, Tensor? zero, Tensor? weight_sums, Tensor column, Tensor? bias, "
      "Tensor(b!) out) -> ()",
      on_cpu(scale_sums));
}
