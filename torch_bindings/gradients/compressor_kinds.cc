// Tested in tests/torch_bindings/gradients/compressor_test.cc
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <utility>

#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/encodings.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/gradients/compressor.h"

namespace hvd {

namespace {

using Tensors = std::vector<at::Tensor>;
using detail::decode_int8, detail::encode_int8, detail::kInt8Block, detail::kInt8Row;

/// Drops what was remembered where it is not finite.
void drop_not_finite(at::Tensor& memory) { memory.nan_to_num_(0, 0, 0); }

// -------------------------------------------------------------------------------------------- int8

/// Gradients of one type on one device travel as one row of blocks; each starts a block. Rank r
/// sums up the r-th part of the blocks.
class Int8Compressor : public GradientCompressor {
 public:
  Int8Compressor(Terms terms, Parameters parameters)
      : GradientCompressor(std::move(terms), std::move(parameters)) {
    std::map<std::pair<std::string, at::ScalarType>, std::size_t> places;
    for (std::size_t i = 0; i < residuals_.size(); ++i) {
      const auto [place, added] = places.try_emplace(
          {residuals_[i].device().str(), residuals_[i].scalar_type()}, parts_.size());
      if (added) parts_.emplace_back();
      Part& part = parts_[place->second];
      const std::int64_t blocks = (residuals_[i].numel() + kInt8Block - 1) / kInt8Block;
      part.members.push_back({i, part.blocks, blocks});
      part.blocks += blocks;
    }
    for (auto& part : parts_) {
      const auto options = residuals_[part.members.front().number].options();
      part.own = part.blocks / ranks_ + (self_ < part.blocks % ranks_ ? 1 : 0);
      part.begin = part.blocks / ranks_ * self_ + std::min(self_, part.blocks % ranks_);
      part.of_sums = at::zeros({part.own, kInt8Block}, options);
      part.splits = at::full({ranks_}, part.blocks / ranks_, at::kLong);
      part.splits.narrow(0, 0, part.blocks % ranks_).add_(1);
      part.values = at::zeros({part.blocks, kInt8Block}, options);
    }
  }

  [[nodiscard]] Tensors memory() const override {
    Tensors all = residuals_;
    for (const auto& part : parts_) all.push_back(part.of_sums);
    return all;
  }

 protected:
  Tensors exchange(const std::vector<std::size_t>& active) override {
    Tensors results(residuals_.size());
    for (std::size_t p = 0; p < parts_.size(); ++p)
      exchange(parts_[p], active, std::to_string(p), results);
    Tensors in_order;
    for (const auto i : active) in_order.push_back(results[i]);
    return in_order;
  }

 private:
  struct Member {
    std::size_t number;
    std::int64_t begin, blocks;
  };
  struct Part {
    std::vector<Member> members;
    std::int64_t blocks = 0, begin = 0,
                 own = 0;  ///< of all; the first that this rank sums up, and how many
    at::Tensor values;     ///< [blocks, 256], scratch; zeros between the members
    at::Tensor of_sums;    ///< [own, 256], what the rounding of the sums left out
    at::Tensor splits;
  };

  static at::Tensor elements(const at::Tensor& blocks, const Member& member, std::int64_t count) {
    return blocks.narrow(0, member.begin, member.blocks).flatten().narrow(0, 0, count);
  }

  void exchange(Part& part, const std::vector<std::size_t>& active, const std::string& number,
                Tensors& results) {
    std::vector<Member> present, absent;
    for (const auto& member : part.members)
      (std::binary_search(active.begin(), active.end(), member.number) ? present : absent)
          .push_back(member);
    if (present.empty()) return;
    const auto type = part.values.scalar_type();
    for (const auto& member : present)
      elements(part.values, member, residuals_[member.number].numel())
          .copy_(detail::in_memory_order(residuals_[member.number]));
    for (const auto& member : absent) part.values.narrow(0, member.begin, member.blocks).zero_();

    const at::Tensor sent = encode_int8(part.values);
    const at::Tensor left = part.values.sub(decode_int8(sent, type));
    for (const auto& member : present) {
      at::Tensor residual = detail::in_memory_order(residuals_[member.number]);
      residual.copy_(elements(left, member, residual.numel()));
      drop_not_finite(residual);
    }
    AlltoallOptions to_owners{
        .name = name("values.") + number, .splits = part.splits, .process_set = terms_.process_set};
    const at::Tensor received = alltoall(sent, to_owners).output.view({ranks_, part.own, kInt8Row});
    count_alltoall(sent.nbytes());
    at::Tensor sum = decode_int8(received[0], type);
    for (std::int64_t rank = 1; rank < ranks_; ++rank) sum.add_(decode_int8(received[rank], type));
    sum = finish(sum).add_(part.of_sums);
    const at::Tensor rounded = encode_int8(sum);
    sum.sub_(decode_int8(rounded, type));
    drop_not_finite(sum);
    for (const auto& member : absent) keep(part, member, sum);
    part.of_sums.copy_(sum);
    const at::Tensor all = decode_int8(
        allgather(rounded, {.name = name("sums.") + number, .process_set = terms_.process_set}),
        type);
    count_allgather(rounded.nbytes());
    for (const auto& member : present)
      results[member.number] = elements(all, member, residuals_[member.number].numel());
  }

  /// Blocks of a gradient that nobody had: what was left out of their sums stays.
  static void keep(const Part& part, const Member& member, at::Tensor& sum) {
    const std::int64_t first = std::max(member.begin, part.begin) - part.begin;
    const std::int64_t last =
        std::min(member.begin + member.blocks, part.begin + part.own) - part.begin;
    if (first < last)
      sum.narrow(0, first, last - first).copy_(part.of_sums.narrow(0, first, last - first));
  }

  std::vector<Part> parts_;
};

// -------------------------------------------------------------------------------------------- topk

class TopKCompressor : public GradientCompressor {
 public:
  TopKCompressor(Terms terms, Parameters parameters)
      : GradientCompressor(std::move(terms), std::move(parameters)) {}

 protected:
  Tensors exchange(const std::vector<std::size_t>& active) override {
    struct Sent {
      Handle<Tensors> all;
      std::int64_t count;
    };
    std::vector<Sent> under_way;
    for (const auto i : active) {
      at::Tensor values = detail::in_memory_order(residuals_[i]);
      const auto [places, chosen] = detail::largest(values, terms_.compression.ratio());
      values.index_fill_(0, places.to(at::kLong), 0);
      under_way.push_back({grouped_allgather_async(
                               {places, chosen}, {.name = name("values of ") + parameters_[i].first,
                                                  .process_set = terms_.process_set}),
                           places.numel()});
      count_allgather(places.nbytes() + chosen.nbytes());
    }
    Tensors results;
    for (std::size_t a = 0; a < active.size(); ++a) {
      const Tensors all = under_way[a].all.wait();
      const at::Tensor& residual = residuals_[active[a]];
      at::Tensor sum = at::zeros({residual.numel()}, residual.options());
      // one after the other: each has a place at most once, so the order is fixed
      for (std::int64_t rank = 0; rank < ranks_; ++rank)
        sum.index_add_(0, all[0].narrow(0, rank * under_way[a].count, under_way[a].count),
                       all[1].narrow(0, rank * under_way[a].count, under_way[a].count));
      results.push_back(finish(sum));
    }
    return results;
  }
};

// ---------------------------------------------------------------------------------------- powersgd

class PowerSgdCompressor : public GradientCompressor {
 public:
  PowerSgdCompressor(Terms terms, Parameters parameters)
      : GradientCompressor(std::move(terms), std::move(parameters)),
        steps_(at::zeros({1}, at::kLong)) {
    for (std::size_t i = 0; i < residuals_.size(); ++i) {
      const std::int64_t rows = residuals_[i].size(0);
      const std::int64_t columns = residuals_[i].numel() / rows;
      const std::int64_t rank = std::min<std::int64_t>({terms_.compression.rank(), rows, columns});
      right_.push_back(random({columns, rank}, i).to(residuals_[i].options()));
    }
  }
  [[nodiscard]] Tensors memory() const override {
    Tensors all = residuals_;
    all.insert(all.end(), right_.begin(), right_.end());
    all.push_back(steps_);
    return all;
  }

 protected:
  [[nodiscard]] std::size_t remainders() const override { return residuals_.size(); }
  Tensors exchange(const std::vector<std::size_t>& active) override {
    steps_.add_(1);
    Tensors matrices, left, right;
    for (const auto i : active) {
      matrices.push_back(residuals_[i].reshape({residuals_[i].size(0), -1}));
      left.push_back(matrices.back().mm(right_[i]));
    }
    average(left, "left");
    std::vector<std::vector<std::int64_t>> empty(active.size());
    for (std::size_t a = 0; a < active.size(); ++a) {
      left[a] = detail::orthonormal(left[a], &empty[a]);
      right.push_back(matrices[a].t().mm(left[a]));
    }
    average(right, "right");
    Tensors results;
    for (std::size_t a = 0; a < active.size(); ++a)
      results.push_back(take_in(active[a], left[a], right[a], empty[a]));
    return results;
  }

 private:
  /// The same on all ranks, and nobody else's random numbers.
  [[nodiscard]] at::Tensor random(at::IntArrayRef sizes, std::size_t parameter) const {
    return detail::random_columns(
        sizes, static_cast<std::uint64_t>(steps_.item<std::int64_t>()) * 1'000'003 + parameter + 1);
  }

  void average(Tensors& tensors, const char* part) {
    for (auto& tensor : tensors) {
      tensor = tensor.contiguous();
      count_allreduce(tensor.nbytes());
    }
    std::map<std::string, Tensors> by_device;
    for (const auto& tensor : tensors) by_device[tensor.device().str()].push_back(tensor);
    for (auto& [device, group] : by_device)
      grouped_allreduce_(group, {.name = name(part) + " on " + device.substr(0, device.find(':')),
                                 .op = ReduceOp::Average,
                                 .process_set = terms_.process_set});
  }

  /// The result for one parameter, and what is remembered for the next time.
  at::Tensor take_in(std::size_t i, const at::Tensor& left, const at::Tensor& right,
                     const std::vector<std::int64_t>& empty) {
    at::Tensor& residual = residuals_[i];
    at::Tensor mean = detail::low_rank_product(left, right).view(residual.sizes());
    if (right.isfinite().all().item<bool>()) {
      right_[i].copy_(right);
      // or it stayed empty for ever
      for (const auto column : empty) right_[i].select(1, column).copy_(random({right.size(0)}, i));
      residual.sub_(mean);
    } else if (const at::Tensor& gradient = parameters_[i].second.grad();
               gradient.defined()) {  // none of it is any good
      residual.sub_(
          (gradient.is_sparse() ? gradient.to_dense() : gradient).to(residual.scalar_type()),
          gradient_factor());
      drop_not_finite(residual);
    }
    if (terms_.op == ReduceOp::Sum) mean.mul_(ranks_);
    if (terms_.predivide_factor != 1) mean.mul_(terms_.predivide_factor);
    at::Tensor ordered = at::empty_like(residual);
    return detail::in_memory_order(ordered.copy_(mean));
  }

  Tensors right_;     ///< Q of each parameter
  at::Tensor steps_;  ///< for the random numbers
};

}  // namespace

std::unique_ptr<GradientCompressor> GradientCompressor::make(Terms terms, Parameters parameters) {
  if (terms.compression.kind() == Compression::Kind::Int8)
    return std::make_unique<Int8Compressor>(std::move(terms), std::move(parameters));
  if (terms.compression.kind() == Compression::Kind::TopK)
    return std::make_unique<TopKCompressor>(std::move(terms), std::move(parameters));
  return std::make_unique<PowerSgdCompressor>(std::move(terms), std::move(parameters));
}

}  // namespace hvd
