#include "tools/hvd_bench/workload.h"

#include <fmt/format.h>

#include <cstring>
#include <new>
#include <numeric>

namespace bench {

namespace {

std::shared_ptr<void> ordinary_memory(std::size_t bytes) {
  const auto alignment = std::align_val_t{4096};
  return {::operator new(bytes, alignment),
          [alignment](void* block) { ::operator delete(block, alignment); }};
}

/// This rank's part of what an allgather of `counts` brings.
std::vector<std::size_t> share_of(const std::vector<std::size_t>& counts, Collective collective) {
  if (collective != Collective::Allgather) return counts;
  std::vector<std::size_t> shares;
  for (const auto count : counts)
    shares.push_back(std::max<std::size_t>(1, count / static_cast<std::size_t>(hvd::size())));
  return shares;
}

/// What this rank gets of `counts` in memory that exists.
std::vector<std::size_t> results_of(const std::vector<std::size_t>& counts, Collective collective) {
  if (collective != Collective::Reducescatter) return counts;
  return {counts.front() / static_cast<std::size_t>(hvd::size())};
}

/// The host of each rank; where they do not share memory, each is one of its own.
std::vector<int> hosts() {
  std::int32_t mine = ranks_share_memory() ? hvd::cross_rank() : hvd::rank();
  const auto all =
      hvd::allgather({&mine, hvd::DataType::Int32, {1}, {}}, {.name = "hvd_bench.hosts"});
  std::vector<int> list(static_cast<std::size_t>(hvd::size()));
  std::memcpy(list.data(), all.data.data(), all.data.size());
  return list;
}

}  // namespace

bool ranks_share_memory() {
  return largest(hvd::local_size() == 1 || hvd::allocate_shared(64) != nullptr ? 0 : 1) == 0;
}

Tensors::Tensors(const std::vector<std::size_t>& counts, hvd::DataType dtype, const Place& place)
    : counts_(counts), dtype_(dtype) {
  for (const auto count : counts_) {
    starts_.push_back(bytes_);
    bytes_ += hvd::aligned_to_member(count * hvd::element_bytes(dtype_));
  }
  if (place.on_gpu) {
    device_ = gpu::device();
    block_ = place.in_arena ? hvd::allocate_on_device(bytes_, device_, dtype_, place.use)
                            : gpu::allocate(bytes_);
    mirror_ = ordinary_memory(bytes_);
  } else {
    block_ = mirror_ = place.in_arena ? hvd::allocate_shared(bytes_) : ordinary_memory(bytes_);
  }
  if (place.in_arena && largest(block_ ? 0 : 1) > 0)  // a GPU may be full on one rank only
    throw WrongOptions(place.on_gpu
                           ? "--memory arena: there is no memory of the GPU to work on in place"
                           : "--memory arena: the ranks share no memory here");
  zero();
}

std::span<std::byte> Tensors::operator[](std::size_t tensor) const {
  return {static_cast<std::byte*>(mirror_.get()) + starts_[tensor],
          counts_[tensor] * hvd::element_bytes(dtype_)};
}

void Tensors::push() const {
  if (mirror_ != block_) gpu::copy(block_.get(), mirror_.get(), bytes_);
}
void Tensors::pull() const {
  if (mirror_ != block_) gpu::copy(mirror_.get(), block_.get(), bytes_);
}

hvd::Buffer Tensors::buffer(std::size_t tensor) const {
  return {static_cast<std::byte*>(block_.get()) + starts_[tensor],
          dtype_,
          {static_cast<std::int64_t>(counts_[tensor])},
          device_,
          true};
}

void Tensors::zero() const {
  std::memset(mirror_.get(), 0, bytes_);
  push();
}

Subject::Subject(const Options& options, const std::vector<std::size_t>& counts, bool in_arena,
                 bool in_place, hvd::Compression wire, bool persistent)
    : options_(options),
      in_arena_(in_arena),
      in_place_(in_place),
      persistent_(persistent),
      wire_(wire),
      input_(share_of(counts, options.collective), options.dtype, whereabouts()) {
  if (writes_into() || (!in_place && options.collective == Collective::Allreduce))
    output_.emplace(results_of(counts, options.collective), options.dtype, whereabouts());
  const std::size_t elements = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  for (std::size_t i = 0; i < counts.size(); ++i) {
    inputs_.push_back(input_.buffer(i));
    outputs_.push_back(output().buffer(i));
    // The names of one size and kind of memory stay the same, as a training loop's do.
    const std::string name = fmt::format("{}.{}.{}.{}.{}.{}", name_of(options.collective), elements,
                                         memory(), place(), this->wire(), i);
    reduce_options_.push_back({.name = name, .op = options.op, .compression = wire});
    broadcast_options_ = {.name = name};
    gather_options_ = {.name = name};
    exchange_options_ = {.name = name};
    scatter_options_ = {.name = name, .op = options.op};
  }
  handles_.reserve(counts.size());
  if (persistent_) make_persistent();
  if (options.check && options.op == hvd::ReduceOp::Adasum) hosts_ = hosts();
}

void Subject::make_persistent() {
  const hvd::Buffer &from = inputs_[0], &to = outputs_[0];
  switch (options_.collective) {
    case Collective::Broadcast:
      return again_.push_back(hvd::broadcast_init(from, broadcast_options_));
    case Collective::Allgather:
      return again_.push_back(hvd::allgather_init(to, from, gather_options_));
    case Collective::Alltoall:
      exchange_again_ = hvd::alltoall_init(to, from, exchange_options_);
      return;
    case Collective::Reducescatter:
      return again_.push_back(hvd::reducescatter_init(to, from, scatter_options_));
    default:
      for (std::size_t i = 0; i < inputs_.size(); ++i)
        again_.push_back(hvd::allreduce_init(inputs_[i], outputs_[i], reduce_options_[i]));
  }
}

void Subject::run_allreduce() {
  if (options_.grouped) {
    if (options_.async)
      return hvd::grouped_allreduce_async(inputs_, outputs_, reduce_options_[0]).wait();
    return hvd::grouped_allreduce(inputs_, outputs_, reduce_options_[0]);
  }
  if (inputs_.size() == 1 && !options_.async)
    return hvd::allreduce(inputs_[0], outputs_[0], reduce_options_[0]);
  handles_.clear();
  for (std::size_t i = 0; i < inputs_.size(); ++i)
    handles_.push_back(hvd::allreduce_async(inputs_[i], outputs_[i], reduce_options_[i]));
  for (const auto& handle : handles_) handle.wait();
}

void Subject::run_into() {
  const hvd::Buffer &from = inputs_[0], &to = outputs_[0];
  switch (options_.collective) {
    case Collective::Allgather:
      return options_.async ? hvd::allgather_into_async(to, from, gather_options_).wait()
                            : hvd::allgather_into(to, from, gather_options_);
    case Collective::Alltoall:
      if (options_.async) {
        hvd::alltoall_into_async(to, from, exchange_options_).wait();
      } else {
        hvd::alltoall_into(to, from, exchange_options_);
      }
      return;
    default:
      return options_.async ? hvd::reducescatter_into_async(to, from, scatter_options_).wait()
                            : hvd::reducescatter_into(to, from, scatter_options_);
  }
}

void Subject::run() {
  if (exchange_again_) {
    exchange_again_->start();
    exchange_again_->wait();
    return;
  }
  for (auto& operation : again_) operation.start();
  for (auto& operation : again_) operation.wait();
  if (persistent_) return;
  if (writes_into()) return run_into();
  switch (options_.collective) {
    case Collective::Allreduce: return run_allreduce();
    case Collective::Broadcast:
      return options_.async ? hvd::broadcast_async(inputs_[0], broadcast_options_).wait()
                            : hvd::broadcast(inputs_[0], broadcast_options_);
    case Collective::Allgather:
      gathered_ = options_.async ? hvd::allgather_async(inputs_[0], gather_options_).wait()
                                 : hvd::allgather(inputs_[0], gather_options_);
      return;
    case Collective::Alltoall:
      exchanged_ = options_.async ? hvd::alltoall_async(inputs_[0], exchange_options_).wait()
                                  : hvd::alltoall(inputs_[0], exchange_options_);
      return;
    case Collective::Reducescatter:
      gathered_ = options_.async ? hvd::reducescatter_async(inputs_[0], scatter_options_).wait()
                                 : hvd::reducescatter(inputs_[0], scatter_options_);
      return;
    case Collective::Barrier: return hvd::barrier();
  }
}

Question Subject::question() const {
  return {options_.dtype, options_.op, hvd::size(), wire_.wire_type(options_.dtype), hosts_};
}

std::size_t Subject::count_wrong() {
  for (std::size_t i = 0; i < input_.size(); ++i) fill(question(), hvd::rank(), i, input_[i]);
  input_.push();
  if (output_) output_->zero();
  run();
  input_.pull();
  if (output_) output_->pull();
  std::size_t wrong = 0;
  if (options_.collective == Collective::Barrier) return 0;
  if (is_shared_out(options_.collective)) return count_wrong_shares();
  for (std::size_t i = 0; i < input_.size(); ++i) {
    wrong += options_.collective == Collective::Broadcast
                 ? count_wrong_copied(question(), 0, i, input_[i])
                 : count_wrong_reduced(question(), i, output()[i]);
    // out of place leaves the input alone
    if (output_) wrong += count_wrong_copied(question(), hvd::rank(), i, input_[i]);
  }
  return wrong;
}

/// Of a collective whose output is put together of shares, or is one.
std::size_t Subject::count_wrong_shares() const {
  const auto ranks = static_cast<std::size_t>(hvd::size());
  const auto self = static_cast<std::size_t>(hvd::rank());
  const std::size_t whole = input_.count(0);
  const std::size_t element = hvd::element_bytes(options_.dtype);
  if (options_.collective == Collective::Reducescatter) {
    const std::size_t share = whole / ranks;
    const std::span<const std::byte> got =
        output_ ? (*output_)[0] : std::span<const std::byte>(gathered_.data);
    if (got.size() != share * element) return whole;
    return count_wrong_reduced(question(), 0, got, self * share);
  }
  const bool gathers = options_.collective == Collective::Allgather;
  const std::span<const std::byte> got = output_   ? (*output_)[0]
                                         : gathers ? std::span<const std::byte>(gathered_.data)
                                                   : exchanged_.data;
  const std::size_t share = gathers ? whole : whole / ranks;
  if (got.size() != share * ranks * element) return whole * ranks;
  std::size_t wrong = 0;
  for (std::size_t rank = 0; rank < ranks; ++rank)
    wrong += count_wrong_copied(question(), static_cast<int>(rank), 0,
                                got.subspan(rank * share * element, share * element),
                                gathers ? 0 : self * share);
  return wrong;
}

void Subject::zero() const {
  input_.zero();
  if (output_) output_->zero();
}

}  // namespace bench
