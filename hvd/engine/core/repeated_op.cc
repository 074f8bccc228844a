#include "hvd/engine/core/repeated_op.h"

#include <algorithm>
#include <array>
#include <utility>

namespace hvd {

SmallCall call_of(const Submission& submission) {
  SmallCall call;
  static_cast<OperationTerms&>(call) = submission;
  call.process_set = submission.process_set;
  call.name = submission.name;
  call.deadline = submission.deadline;
  if (submission.tensors.empty()) return call;
  const TensorArgument& tensor = submission.tensors.front();
  call.dtype = tensor.dtype;
  call.shape = tensor.shape;
  call.input = tensor.input;
  call.output = tensor.output;
  call.splits = tensor.splits;
  call.output_rows = tensor.output_rows;
  return call;
}

bool is_small_unowned(const Submission& submission, int domains) {
  const auto& tensors = submission.tensors;
  if (submission.kind != OpKind::Allreduce || submission.device != Device() ||
      submission.internal || tensors.empty() || tensors.size() > limit(Limit::GroupTensors) ||
      submission.deadline != std::chrono::nanoseconds(0))
    return false;
  std::int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    // laid out to be reduced where it is, without a copy, which it cannot be between hosts
    if (domains == 1 && tensor.padded && tensor.input == tensor.output) return false;
    if (!tensor.present || tensor.input == nullptr || tensor.output == nullptr ||
        tensor.dtype != tensors.front().dtype)
      return false;
    bytes += element_count(tensor.shape) * static_cast<std::int64_t>(element_bytes(tensor.dtype));
  }
  return routes::is_at_slot(static_cast<std::size_t>(bytes), static_cast<std::size_t>(domains));
}

bool TensorMemory::overlaps_in_part() const {
  const auto from = reinterpret_cast<std::uintptr_t>(input),
             to = reinterpret_cast<std::uintptr_t>(output);
  return from != to && from < to + bytes && to < from + bytes;
}

std::optional<GroupOverlap> find_overlap(std::span<const TensorMemory> group) {
  struct Range {
    std::uintptr_t begin, end;
    std::size_t tensor;
    bool is_written;
  };
  std::array<Range, 2 * limit(Limit::GroupTensors)> few;
  std::vector<Range> many(2 * group.size() > few.size() ? 2 * group.size() : 0);
  const std::span<Range> room = many.empty() ? std::span<Range>(few) : std::span<Range>(many);
  std::size_t count = 0;
  for (std::size_t i = 0; i < group.size(); ++i) {
    const std::size_t bytes = group[i].bytes;
    if (bytes == 0) continue;
    const auto input = reinterpret_cast<std::uintptr_t>(group[i].input),
               output = reinterpret_cast<std::uintptr_t>(group[i].output);
    const bool is_one = input == output || group[i].overlaps_in_part();
    room[count++] = {is_one ? std::min(input, output) : output,
                     (is_one ? std::max(input, output) : output) + bytes, i, true};
    if (!is_one) room[count++] = {input, input + bytes, i, false};
  }
  const auto all = room.first(count);
  std::ranges::sort(all, {}, &Range::begin);
  struct Last {
    std::uintptr_t end = 0;
    std::size_t tensor = 0;
  };
  Last written, any;
  for (const auto& [begin, end, tensor, is_written] : all) {
    const Last& before = is_written ? any : written;
    if (begin < before.end)
      return is_written ? GroupOverlap{tensor, before.tensor} : GroupOverlap{before.tensor, tensor};
    if (end > any.end) any = {end, tensor};
    if (is_written && end > written.end) written = {end, tensor};
  }
  return std::nullopt;
}

bool RepeatedOp::fits(const SmallCall& call) const {
  if (signature->kind != call.kind || signature->tensors.empty())
    return signature->kind == call.kind && signature->tensors.empty();
  if (signature->tensors.size() != std::max<std::size_t>(1, call.group.size()) ||
      group.empty() != call.group.empty())
    return false;
  const TensorSignature& tensor = signature->tensors.front();
  const bool reduces = call.kind == OpKind::Allreduce || call.kind == OpKind::Reducescatter;
  const bool has_splits = call.kind == OpKind::Alltoall || call.kind == OpKind::Reducescatter;
  if (has_splits && !std::equal(tensor.splits.begin(), tensor.splits.end(), call.splits.begin(),
                                call.splits.end()))
    return false;
  const bool same_shapes =
      call.group.empty() ? std::ranges::equal(tensor.shape, call.shape)
                         : std::ranges::equal(signature->tensors, call.group,
                                              [](const auto& one, const auto& other) {
                                                return std::ranges::equal(one.shape, other.shape);
                                              });
  return tensor.dtype == call.dtype && same_shapes &&
         (!reduces ||
          (signature->op == call.op && signature->prescale_factor == call.prescale_factor &&
           signature->postscale_factor == call.postscale_factor)) &&
         (call.kind != OpKind::Broadcast || signature->root == call.root) &&
         (call.kind == OpKind::Reducescatter
              ? call.output_rows < 0 || call.output_rows == result_rows
              : call.output_rows == tensor.output_rows) &&
         has_allowed_memory(call);
}

/// Returns whether all of an allreduce lies where it may; a group does where its last call did.
bool RepeatedOp::has_allowed_memory(const SmallCall& call) const {
  // A domain's only rank works in the caller's memory when a round is negotiated after all.
  const bool in_callers_memory = is_direct() && call.kind == OpKind::Allreduce;
  if (group.empty())
    return !in_callers_memory ||
           !TensorMemory{call.input, call.output, input_bytes}.overlaps_in_part();
  if (std::ranges::equal(group, call.group, [](const Member& last, const SmallTensor& now) {
        return last.input == now.input && last.output == now.output;
      }))
    return true;
  std::array<TensorMemory, limit(Limit::GroupTensors)> tensors;
  for (std::size_t i = 0; i < group.size(); ++i)
    tensors.at(i) = {call.group[i].input, call.group[i].output, group[i].bytes};
  const auto all = std::span<const TensorMemory>(tensors).first(group.size());
  return !find_overlap(all) &&
         !(in_callers_memory && std::ranges::any_of(all, &TensorMemory::overlaps_in_part));
}

std::shared_ptr<RepeatedOp> RepeatedOps::find(int process_set, OpKind kind,
                                              std::string_view name) const {
  const View wanted(process_set, kind, name);
  if (last_ != nullptr && view(last_->first) == wanted) return last_->second;
  const auto found = repeated_ops_.find(wanted);
  if (found == repeated_ops_.end()) return nullptr;
  last_ = &*found;
  return found->second;
}

void RepeatedOps::add(const UnitKey& key, std::shared_ptr<RepeatedOp> op) {
  repeated_ops_[key] = std::move(op);
}

std::shared_ptr<RepeatedOp> RepeatedOps::remove(const UnitKey& key) {
  last_ = nullptr;
  auto node = repeated_ops_.extract(key);
  return node.empty() ? nullptr : std::move(node.mapped());
}

}  // namespace hvd
