// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
//
// Blocks of inputs times Sylvester's Hadamard matrix of their size, over its root. The matrix is a product of log2(size)
// sparse ones that add and subtract pairs, so that each number takes log2(size) additions in place of `size` products.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>
#include <cstdint>
#include <utility>

namespace {

constexpr int LANES = 16;
constexpr int64_t LARGEST = 1024, GRAIN = 256;
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Order __attribute__((vector_size(4 * LANES)));

// Replace each pair of lanes (a, b) that are `apart` by (a + b, a - b).
template <int apart, int... lane>
Vector pairs_added(Vector v, std::integer_sequence<int, lane...>) {
#ifdef __clang__
  const Vector other = __builtin_shufflevector(v, v, (lane ^ apart)...);
#else
  const Vector other = __builtin_shuffle(v, Order{(lane ^ apart)...});
#endif
  return other + v * Vector{(lane & apart ? -1.0f : 1.0f)...};
}

void add_pairs(Vector* v, int64_t count) {
  constexpr auto lanes = std::make_integer_sequence<int, LANES>();
  for (int64_t i = 0; i < count; i++)
    v[i] = pairs_added<8>(pairs_added<4>(pairs_added<2>(pairs_added<1>(v[i], lanes), lanes), lanes), lanes);
  for (int64_t apart = 1; apart < count; apart *= 2)
    for (int64_t first = 0; first < count; first += 2 * apart)
      for (int64_t i = first; i < first + apart; i++) {
        const Vector a = v[i], b = v[i + apart];
        v[i] = a + b;
        v[i + apart] = a - b;
      }
}

// Return `x` [..., inputs] times the matrix [size, size], block by block of `size` inputs, summed in float32.
at::Tensor rotate(const at::Tensor& x, int64_t size) {
  TORCH_CHECK(size >= LANES && size <= LARGEST && (size & (size - 1)) == 0 && x.size(-1) % size == 0);
  const at::Tensor rows = x.contiguous(), out = at::empty_like(rows);
  const float scale = 1 / std::sqrt(static_cast<float>(size));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "rotate", [&] {
    const scalar_t* from = rows.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, rows.numel() / size, GRAIN, [&](int64_t first, int64_t last) {
      alignas(64) float block[LARGEST];
      for (int64_t n = first * size; n < last * size; n += size) {
        for (int64_t i = 0; i < size; i++) block[i] = static_cast<float>(from[n + i]) * scale;
        add_pairs(reinterpret_cast<Vector*>(block), size / LANES);
        for (int64_t i = 0; i < size; i++) to[n + i] = static_cast<scalar_t>(block[i]);
      }
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(flexquant_rotation, m) {
  m.def("rotate(Tensor x, int size) -> Tensor", torch::dispatch(c10::DispatchKey::CPU, rotate));
}
