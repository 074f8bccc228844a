#include "hvd/api/request.h"

#include <algorithm>

#include "hvd/negotiation/values/unit_names.h"

namespace hvd {

namespace {

std::string text_of(const Device& device) {
  return device.kind == DeviceKind::Cpu ? std::string(name_of(device.kind))
                                        : formatted("{}:{}", name_of(device.kind), device.index);
}

std::size_t size_of(const Buffer& buffer) {
  return static_cast<std::size_t>(element_count(buffer.shape)) * element_bytes(buffer.dtype);
}

/// Throws if the rows of `output` cannot be right, whatever the other ranks give.
void check_rows(OpKind kind, const std::string& name, const Buffer& output, const Buffer& input,
                const ProcessSet& set, const std::vector<std::int64_t>& splits) {
  const std::int64_t room = output.shape.front();
  const int ranks = set.size();
  const int self = set.rank();
  if (self < 0) return;  // the engine says so
  std::int64_t least = input.shape.front();
  const bool has_splits = splits.size() == static_cast<std::size_t>(ranks);
  if (!splits.empty() && !has_splits) return;  // a wrong number of splits: the engine says so
  if (has_splits) {
    least = splits[static_cast<std::size_t>(self)];
  } else if (kind == OpKind::Reducescatter) {
    least = scattered_rows(input.shape.front(), static_cast<std::size_t>(ranks),
                           static_cast<std::size_t>(self));
  } else if (kind == OpKind::Alltoall) {
    least = input.shape.front() / ranks;
  }
  const bool exact = kind == OpKind::Reducescatter || ranks == 1;
  if (exact ? room == least : room >= least) return;
  throw InvalidArgument(
      formatted("{}_into '{}': the output has {} rows; {} {} come to rank {} of the process set",
                name_of(kind), name, room, exact ? "just" : "at least", least, self));
}

}  // namespace

void refuse_made_up(OpKind kind, std::string_view name) {
  if (!is_for_users(name))
    throw InvalidArgument(formatted("{} '{}': a name must not end in a newline", name_of(kind),
                                    display_name(std::string(name))));
}

void check_output(OpKind kind, const std::string& name, const Buffer& output, const Buffer& input,
                  const ProcessSet& set, const std::vector<std::int64_t>& splits) {
  require_running();
  require_current_world(set);
  if (input.shape.empty()) return;  // the engine refuses scalars
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument(formatted("{}_into '{}': {}", name_of(kind), name, why));
  };
  if (output.dtype != input.dtype)
    refuse(formatted("the output is of type {}, the input of type {}", name_of(output.dtype),
                     name_of(input.dtype)));
  if (output.device != input.device)
    refuse(formatted("the output is on {}, the input on {}", text_of(output.device),
                     text_of(input.device)));
  if (output.shape.size() != input.shape.size() ||
      !std::equal(output.shape.begin() + 1, output.shape.end(), input.shape.begin() + 1))
    refuse(formatted("the output is {}, the input {}; all dimensions but the first must be equal",
                     to_string(output.shape), to_string(input.shape)));
  if (output.shape.front() < 0)
    refuse(formatted("the output's shape {} has negative sizes", to_string(output.shape)));
  check_rows(kind, name, output, input, set, splits);
  if (output.data == nullptr && element_count(output.shape) > 0)
    refuse(formatted("the output of shape {} has no memory: it is a null pointer",
                     to_string(output.shape)));
}

bool overlap(const Buffer& a, const Buffer& b) {
  const auto begin_a = reinterpret_cast<std::uintptr_t>(a.data),
             begin_b = reinterpret_cast<std::uintptr_t>(b.data);
  const std::size_t bytes_a = size_of(a), bytes_b = size_of(b);
  return bytes_a > 0 && bytes_b > 0 && begin_a < begin_b + bytes_b && begin_b < begin_a + bytes_a;
}

}  // namespace hvd
