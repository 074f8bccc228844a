#pragma once
/// What the tests of the LibTorch front end share: data that differ by rank and element, what a
/// reduction of them must give, and a library restarted with another configuration. Every rank runs
/// the same cases; what one rank would only wait for, another must not skip.

#include <doctest/doctest.h>
#include <hvd/torch.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/support/error_of.h"

namespace hvd::test {

/// Small numbers, exact in every type; `variant` makes another tensor.
inline at::Tensor data(at::IntArrayRef sizes, at::ScalarType type, int rank, int variant = 0) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  const at::Tensor number = torch::arange(count, torch::kInt64);
  at::Tensor values = (number * 3 + number * number + rank * 7 + variant * 5).remainder(11);
  if (type != at::kByte && type != at::kBool) values = values - 4;
  if (type == at::kBool) return (number + rank + variant).remainder(3).eq(0).reshape(sizes);
  if (at::isComplexType(type))
    return torch::complex(values.to(torch::kFloat64), (values + rank).to(torch::kFloat64))
        .to(type)
        .reshape(sizes);
  if (at::isFloatingType(type)) return (values.to(torch::kFloat64) / 4).to(type).reshape(sizes);
  return values.to(type).reshape(sizes);
}

/// Whether sharded optimizers of a test have one copy of the parameters per host.
inline bool one_copy = false;
/// Runs the rest of the test case with and without one copy.
inline void with_and_without_one_copy() {
  one_copy = false;
  SUBCASE("sharded") {}
  SUBCASE("one copy of the parameters per host") { one_copy = true; }
}

/// A network with the same small weights on all ranks.
inline torch::nn::Sequential small_model(at::ScalarType type = at::kDouble, int hidden = 8) {
  torch::nn::Sequential net(torch::nn::Linear(6, hidden), torch::nn::Tanh(),
                            torch::nn::Linear(hidden, 3));
  int variant = 0;
  const torch::NoGradGuard no_gradient;
  for (auto& parameter : net->parameters())
    parameter.copy_(data(parameter.sizes(), at::kDouble, 0, variant++) * 0.3);
  net->to(type);
  return net;
}
/// Its loss on the batch of `rank` at `step`.
inline at::Tensor small_loss(torch::nn::Sequential& net, int rank, int step) {
  const auto type = net->parameters().front().scalar_type();
  const at::Tensor x = data({5, 6}, at::kDouble, rank, step).to(type);
  const at::Tensor y = data({5, 3}, at::kDouble, rank, step + 1).to(type);
  return torch::mse_loss(net->forward(x), y);
}

/// All its parameters, one after the other.
inline at::Tensor flat(const torch::nn::Sequential& net) {
  std::vector<at::Tensor> parts;
  for (const auto& parameter : net->parameters()) parts.push_back(parameter.detach().reshape({-1}));
  return torch::cat(parts);
}

/// Every type that travels.
inline const std::vector<at::ScalarType> kTypes{
    at::kByte,     at::kChar,  at::kShort,  at::kInt,  at::kLong,         at::kHalf,
    at::kBFloat16, at::kFloat, at::kDouble, at::kBool, at::kComplexFloat, at::kComplexDouble};

/// `data` of every rank, in rank order.
inline std::vector<at::Tensor> all_data(at::IntArrayRef sizes, at::ScalarType type,
                                        const std::vector<int>& ranks, int variant = 0) {
  std::vector<at::Tensor> all;
  for (const int rank : ranks) all.push_back(data(sizes, type, rank, variant));
  return all;
}
inline std::vector<int> everyone() { return global_process_set().ranks(); }

/// `value` plus this rank's number, everywhere.
inline at::Tensor rank_tensor(double value, at::IntArrayRef sizes = {3}) {
  return torch::full(sizes, value + rank(), at::kFloat);
}

/// What a sum is made in.
inline at::ScalarType arithmetic_type(at::ScalarType type) {
  if (type == at::kHalf || type == at::kBFloat16) return at::kFloat;
  if (at::isIntegralType(type, true)) return at::kLong;
  return type;
}

/// As docs/semantics.md says: folded in rank order, 16-bit floats in fp32, integer averages exact
/// and truncated.
inline at::Tensor reduced(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  const auto type = inputs.front().scalar_type();
  at::Tensor sum = inputs.front().to(arithmetic_type(type), false, true);
  for (std::size_t i = 1; i < inputs.size(); ++i) {
    const at::Tensor next = inputs[i].to(sum.scalar_type());
    if (op == ReduceOp::Min) {
      sum = torch::minimum(sum, next);
    } else if (op == ReduceOp::Max) {
      sum = torch::maximum(sum, next);
    } else if (op == ReduceOp::Product) {
      sum = sum * next;
    } else {
      sum = sum + next;
    }
  }
  if (op == ReduceOp::Average) {
    // divided by a real number
    at::Tensor parts = sum.is_complex() ? torch::view_as_real(sum) : sum;
    const at::Tensor size = torch::full_like(parts, static_cast<double>(inputs.size()));
    parts = at::isIntegralType(type, true) ? torch::div(parts, size, "trunc") : parts / size;
    sum = sum.is_complex() ? torch::view_as_complex(parts) : parts;
  }
  return sum.to(type);
}

/// The reduction of `rank_tensor(0)`.
inline at::Tensor reduced_ranks(ReduceOp op) {
  std::vector<at::Tensor> all;
  for (int r = 0; r < size(); ++r) all.push_back(torch::full({3}, r, at::kFloat));
  return reduced(all, op);
}

/// Equal in type, shape and every bit that matters.
inline bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.scalar_type() == b.scalar_type() &&
         a.sizes() == b.sizes() && torch::equal(a, b);
}

inline double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

/// Whether all ranks hold the same bits. Collective.
inline bool same_on_all_ranks(const at::Tensor& tensor) {
  const at::Tensor bits = tensor.detach().contiguous().reshape({1, -1});
  const at::Tensor all = allgather(bits);
  for (std::int64_t i = 1; i < all.size(0); ++i)
    if (!torch::equal(all[0], all[i])) return false;
  return true;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// "ranks 0-2: <common>; rank 3: <last>", the grouping of a Mismatch in which the last rank
/// differs.
inline std::string grouping(const std::string& common, const std::string& last) {
  const int before = size() - 1;
  const std::string group =
      before == 1 ? "rank 0: " : "ranks 0-" + std::to_string(before - 1) + ": ";
  return group + common + "; rank " + std::to_string(before) + ": " + last;
}
inline bool last() { return rank() == size() - 1; }
/// "rank 3", the last one.
inline std::string last_rank() { return "rank " + std::to_string(size() - 1); }

/// The library with another configuration until the end of the scope.
class Restarted {
 public:
  explicit Restarted(const Config& config) {
    shutdown();
    init(config);
  }
  ~Restarted() {
    shutdown();
    init();
  }
  Restarted(const Restarted&) = delete;
  Restarted& operator=(const Restarted&) = delete;
};

}  // namespace hvd::test
