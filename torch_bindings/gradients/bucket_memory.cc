#include "torch_bindings/gradients/bucket_memory.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <utility>

#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/gradients/gradient_mark.h"
#include "torch_bindings/platform/stream_set.h"

namespace hvd {

namespace {

/// Each pair of types by itself: where the first of `to` chose the kernel for all, the others were
/// wrong (PyTorch issue 173383).
void copy_together(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  std::map<std::pair<at::ScalarType, at::ScalarType>,
           std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>>
      by_types;
  for (std::size_t i = 0; i < to.size(); ++i) {
    auto& [theirs, mine] = by_types[{to[i].scalar_type(), from[i].scalar_type()}];
    theirs.push_back(to[i]);
    mine.push_back(from[i]);
  }
  for (auto& [types, tensors] : by_types) at::_foreach_copy_(tensors.first, tensors.second);
}

bool has_form_of(const at::Tensor& gradient, const at::Tensor& place) {
  return gradient.scalar_type() == place.scalar_type() && gradient.strides() == place.strides() &&
         !gradient.is_conj() && !gradient.is_neg();
}

}  // namespace

BucketMemory::BucketMemory(const std::vector<const NamedParameter*>& members, const Terms& terms)
    : cells_(members.begin(), members.end()), terms_(terms) {}

DataType BucketMemory::wire_type(const NamedParameter& member, const Compression& compression) {
  return compression.wire_type(detail::data_type_of(member.parameter, member.name));
}

at::ScalarType BucketMemory::wire_type(const Cell& cell) const {
  return detail::scalar_type_of(wire_type(*cell.named, terms_.compression));
}

void BucketMemory::make_room(const std::vector<BucketMemory*>& buckets, bool are_taken_together,
                             const Lend& lend) {
  const NamedParameter& first = *buckets.front()->cells_.front().named;
  const at::Device device = first.parameter.device();
  std::size_t bytes = 0;
  for (const auto* bucket : buckets) {
    for (const Cell& cell : bucket->cells_) {
      if (cell.named->parameter.device() != device) return;
      bytes += aligned_to_member(static_cast<std::size_t>(cell.named->parameter.numel()) *
                                 c10::elementSize(bucket->wire_type(cell)));
    }
  }
  bytes = std::max<std::size_t>(bytes, kMemberAlignment);
  std::shared_ptr<void> memory;
  bool is_shared = false;  // by the ranks of the host
  if (device.is_cpu()) {
    memory = allocate_shared(bytes);
    is_shared = memory != nullptr;
    if (!is_shared) {
      const at::Tensor ordinary =
          at::empty({static_cast<std::int64_t>(bytes + kMemberAlignment)}, at::kByte);
      memory = std::shared_ptr<void>(ordinary.mutable_data_ptr(), [ordinary](void*) {});
    }
  } else {
    memory = lend(wire_type(first, buckets.front()->terms_.compression), bytes);
    if (!memory) return;
  }
  std::size_t offset = 0;
  for (auto* bucket : buckets) {
    bucket->memory_ = memory;
    bucket->is_taken_together_ = are_taken_together;
    for (Cell& cell : bucket->cells_) {
      const at::Tensor& parameter = cell.named->parameter;
      cell.wire =
          detail::watched(detail::view_of(memory, offset, parameter, bucket->wire_type(cell)));
      offset += aligned_to_member(cell.wire.nbytes());
      if (cell.wire.scalar_type() != parameter.scalar_type() || !bucket->terms_.are_views) continue;
      cell.home = cell.place = cell.wire;
      if (is_shared && bucket->terms_.may_be_made_there)
        cell.announced = std::make_unique<detail::AnnouncedGradient>(parameter);
    }
  }
}

void BucketMemory::give_up() {
  for (Cell& cell : cells_) cell = Cell(cell.named);
  memory_.reset();
  is_taken_together_ = false;
}

void BucketMemory::take_in(std::size_t member, bool just_given) {
  Cell& cell = cells_[member];
  at::Tensor& gradient = cell.gradient();
  if (is_taken_together_ || !cell.home.defined() || gradient.is_alias_of(cell.home)) return;
  if (cell.announced && has_form_of(gradient, cell.place) &&
      detail::stays_in_shared_memory(gradient, cell.named, just_given)) {
    cell.home = cell.wire = gradient = detail::watched(gradient);
    cell.zeros_at = -1;
    return;
  }
  go_home(cell);
  cell.home.copy_(gradient);  // the gradient has just been written: this reads it from the cache
  gradient = cell.home;
}

void BucketMemory::pack(std::size_t member) {
  Cell& cell = cells_[member];
  if (cell.home.defined()) return;
  at::Tensor& gradient = cell.gradient();
  gradient = detail::watched(gradient.resolve_conj().resolve_neg());
  if (is_taken_together_) return;
  const at::Tensor& parameter = cell.named->parameter;
  if (parameter.is_cpu()) {
    cell.wire.copy_(gradient);
    return;
  }
  if (!gradient.is_non_overlapping_and_dense()) gradient = gradient.contiguous();
  if (terms_.go_in_parts && gradient.strides() != parameter.strides() &&
      parameter.is_non_overlapping_and_dense())
    gradient = at::empty_strided(gradient.sizes(), parameter.strides(), gradient.options())
                   .copy_(gradient);
  cell.wire = gradient.to(wire_type(cell));  // the gradient itself if that is its type
}

void BucketMemory::take_in_together(const std::vector<std::size_t>& members, bool are_thrown_away,
                                    bool other_streams) {
  const bool by_backend = !terms_.is_alone && !terms_.go_in_parts;
  std::vector<at::Tensor> from, to;
  for (const auto member : members) {
    Cell& cell = cells_[member];
    at::Tensor& gradient = cell.gradient();
    if (!gradient.defined() || are_thrown_away) {  // since backward gave it
      cell.given.reset();
      if (has_gradient(member)) gradient = gradient.clone();
      cell.wire.zero_();
      continue;
    }
    if (has_gradient(member)) continue;
    if (by_backend && cell.home.defined() && has_form_of(gradient, cell.home)) {
      cell.given = std::exchange(gradient, cell.home);
      continue;
    }
    if (other_streams) detail::keep_for_current_stream(gradient);
    from.push_back(gradient);
    to.push_back(cell.wire);
    if (cell.home.defined()) gradient = cell.home;
  }
  copy_together(to, from);
}

void BucketMemory::fill_with_zeros(std::size_t member) {
  Cell& cell = cells_[member];
  if (!has_room()) {
    const at::Tensor& parameter = cell.named->parameter;
    cell.wire =
        at::zeros_like(parameter, parameter.options().requires_grad(false).dtype(wire_type(cell)));
    return;
  }
  if (cell.zeros_at >= 0 && cell.zeros_at == detail::version_of(cell.wire)) return;
  cell.wire.zero_();
  cell.zeros_at = detail::version_of(cell.wire);
}

const at::Tensor& BucketMemory::sent(std::size_t member) const {
  const Cell& cell = cells_[member];
  return cell.given.defined() ? cell.given : cell.wire;
}

bool BucketMemory::sends_gradient(std::size_t member) const {
  const Cell& cell = cells_[member];
  return cell.given.defined() ||
         (cell.gradient().defined() && cell.gradient().is_alias_of(cell.wire));
}

bool BucketMemory::has_gradient(std::size_t member) const {
  const Cell& cell = cells_[member];
  return cell.home.defined() && cell.gradient().defined() && cell.gradient().is_alias_of(cell.home);
}

TensorArgument BucketMemory::argument(std::size_t member,
                                      std::vector<std::shared_ptr<void>>& kept) {
  Cell& cell = cells_[member];
  if (!cell.wire.defined())
    cell.wire = at::empty({0}, cell.named->parameter.options().dtype(wire_type(cell)));
  TensorArgument argument = detail::argument(sent(member), cell.wire, cell.named->name);
  argument.name = cell.named->name;
  argument.padded = has_room() && !terms_.go_in_parts;
  kept.push_back(std::make_shared<at::Tensor>(cell.wire));
  if (cell.given.defined()) kept.push_back(std::make_shared<at::Tensor>(cell.given));
  return argument;
}

void BucketMemory::give_back(const std::vector<std::size_t>& members) {
  std::vector<at::Tensor> from, to;
  for (const auto member : members) {
    const Cell& cell = cells_[member];
    at::Tensor& gradient = cell.gradient();
    if (cell.home.defined()) {
      if (!has_gradient(member)) gradient = cell.home;
      continue;
    }
    if (gradient.defined() && gradient.is_alias_of(cell.wire)) continue;
    if (gradient.defined()) {
      detail::keep_for_current_stream(gradient);  // backward may have made it on another one
    } else {
      gradient = at::empty_like(cell.wire, cell.wire.options().dtype(cell.type));
    }
    from.push_back(cell.wire);
    to.push_back(gradient);
  }
  copy_together(to, from);
}

void BucketMemory::let_go_of_given() {
  for (Cell& cell : cells_) cell.given.reset();
}

bool BucketMemory::put_given_back(std::size_t member) {
  Cell& cell = cells_[member];
  const at::Tensor given = std::exchange(cell.given, {});
  if (!given.defined() || !has_gradient(member)) return false;
  cell.gradient() = given;
  return true;
}

void BucketMemory::go_home() {
  for (Cell& cell : cells_) go_home(cell);
}

void BucketMemory::go_home(Cell& cell) {
  if (!cell.place.defined() || cell.home.is_same(cell.place)) return;
  cell.home = cell.wire = cell.place;
  cell.zeros_at = -1;
}

}  // namespace hvd
