#include "torch_bindings/reducer/join_rounds.h"

#include <torch/torch.h>

#include <utility>
#include <vector>

#include "hvd/base/text.h"
#include "torch_bindings/collectives/collectives.h"

namespace hvd::detail {

namespace {
constexpr unsigned char kEnded = 0, kTrains = 1, kFailed = 2;
}  // namespace

JoinRounds::JoinRounds(std::string name, ProcessSet process_set, bool divide_by_initial_world_size)
    : name_(std::move(name)),
      process_set_(std::move(process_set)),
      divide_by_initial_world_size_(divide_by_initial_world_size) {}

/// One byte per rank of the set: the sum is what all said. Ranks that have joined say kEnded.
at::Tensor JoinRounds::mark(unsigned char value) const {
  at::Tensor marks = torch::full({process_set_.size()}, kEnded, torch::kUInt8);
  marks[process_set_.rank()] = value;
  return marks;
}

int JoinRounds::first_training() const {
  const at::Tensor marks = allreduce_(
      mark(kTrains),
      {.name = name_ + "/who still trains", .op = ReduceOp::Sum, .process_set = process_set_});
  return process_set_.ranks().at(static_cast<std::size_t>(marks.nonzero()[0].item<std::int64_t>()));
}

Handle<at::Tensor> JoinRounds::announce_failure() const {
  return allreduce_async(
      mark(kFailed), {.name = name_ + "/round", .op = ReduceOp::Sum, .process_set = process_set_});
}

double JoinRounds::end_round() {
  if (process_set_.size() == 1) return 1;
  const at::Tensor marks = allreduce_(
      mark(kTrains), {.name = name_ + "/round", .op = ReduceOp::Sum, .process_set = process_set_});
  try {
    refuse_failed(marks);
  } catch (...) {
    has_thrown_ = true;
    throw;
  }
  return divide_by_initial_world_size_
             ? 1
             : static_cast<double>(process_set_.size()) / marks.count_nonzero().item<double>();
}

void JoinRounds::end(bool failed) const {
  refuse_failed(
      allreduce_(mark(failed ? kFailed : kEnded),
                 {.name = name_ + "/end", .op = ReduceOp::Sum, .process_set = process_set_}));
}

void JoinRounds::refuse_failed(const at::Tensor& marks) const {
  std::vector<int> ranks;
  const auto* const mark = marks.const_data_ptr<std::uint8_t>();
  for (int i = 0; i < process_set_.size(); ++i)
    if (mark[i] == kFailed) ranks.push_back(process_set_.ranks().at(static_cast<std::size_t>(i)));
  if (ranks.empty()) return;
  throw RankFailed(
      formatted("{}: rank{} {} left the guard by an exception; the models of the ranks may differ "
                "now: broadcast them, or load a checkpoint, before going on",
                name_, ranks.size() == 1 ? "" : "s", joined(ranks, ", ")));
}

}  // namespace hvd::detail
