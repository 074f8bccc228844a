#pragma once
/// request() and small_request() turn options (those of hvd/options.h, and any of a front end that
/// has fields of these names) into what the engine takes. Nobody else does that, so that an option
/// which is added reaches every operation. check_output() makes the checks that a rank can make by
/// itself before an operation writes its result into memory that exists (`allgather_into`,
/// `alltoall_into`, `reducescatter_into`), on buffers or on tensors. Any thread. They throw
/// InvalidArgument: for a process set of another world than the current one, for a name that ends
/// in a newline, or for such memory, naming the operation.
// Tested in tests/hvd/api/request_test.cc, tests/contract/cases/into_cases.cc,
// tests/torch_bindings/collectives/into_test.cc

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/api/world.h"
#include "hvd/base/text.h"
#include "hvd/base/visible.h"
#include "hvd/engine/core/repeated_op.h"
#include "hvd/hvd.h"
#include "hvd/negotiation/values/signature.h"
#include "hvd/options.h"
#include "hvd/submission.h"

namespace hvd {

/// SetOptions are those of operations that have a name and a set, and nothing else that could be
/// said: barrier, join.
struct SetOptions {
  std::string_view name;
  const ProcessSet& process_set;
};

/// Throws InvalidArgument for a name that could be taken for one which the library has made up.
HVD_BETWEEN_LIBRARIES void refuse_made_up(OpKind kind, std::string_view name);

/// Sets kind, name, process set, operation, scales, root and deadline of a Submission or a
/// SmallCall, as far as the options have them.
template <class Call, class Options>
void fill(Call& call, OpKind kind, const Options& options) {
  require_current_world(options.process_set);
  if (!options.name.empty() && options.name.back() == '\n') refuse_made_up(kind, options.name);
  call.kind = kind;
  call.name = options.name;
  call.process_set = options.process_set.id();
  if constexpr (requires { options.prescale_factor; }) {
    call.op = options.op;
    call.prescale_factor = options.prescale_factor;
    call.postscale_factor = options.postscale_factor;
  }
  if constexpr (requires { options.root_rank; }) call.root = options.root_rank;
  if constexpr (requires { options.deadline; }) call.deadline = options.deadline;
}

/// Returns the tensor as options with element counts for each rank see it: in one dimension. As it
/// is without them, with other options, and where it is to be refused for its shape.
template <class Options>
[[nodiscard]] Buffer dealt(Buffer buffer, const Options& options) {
  if constexpr (requires { options.counts; })
    if (!options.counts.empty() && has_possible_sizes(buffer.shape))
      buffer.shape = {element_count(buffer.shape)};
  return buffer;
}

/// Returns the element counts of such options; none of others. Throws InvalidArgument if there are
/// some for several `tensors`.
template <class Options>
[[nodiscard]] std::vector<std::int64_t> counts_of(const Options& options, std::size_t tensors = 1) {
  if constexpr (requires { options.counts; }) {
    if (!options.counts.empty() && tensors > 1)
      throw InvalidArgument(formatted(
          "reducescatter '{}': element counts for the ranks go with one tensor, not with {}",
          options.name, tensors));
    return options.counts;
  }
  return {};
}

/// Returns the submission of such an operation on this device; its tensors are to be added.
template <class Options>
[[nodiscard]] Submission request(OpKind kind, const Options& options, const Device& device = {}) {
  Submission submission;
  fill(submission, kind, options);
  submission.device = device;
  return submission;
}

/// Returns what SmallCalls::try_run is to be asked for; its tensor is to be added. It must not
/// outlive the options, whose name it refers to.
template <class Options>
[[nodiscard]] SmallCall small_request(OpKind kind, const Options& options) {
  SmallCall call;
  fill(call, kind, options);
  return call;
}

/// Throws InvalidArgument if no `input` of other ranks could make the result fit `output`: its
/// type, device and dimensions beyond the first must be the input's, and it must have room for what
/// this rank itself gives. Whether it has just as many rows as come is known when all ranks have
/// said theirs (a Mismatch on all of them if not), but for a reducescatter and in a set of one
/// rank, where it is checked here. `splits`: rows of an alltoall for each rank, or elements of a
/// reducescatter of one dimension; empty: the first dimension is divided evenly.
HVD_BETWEEN_LIBRARIES void check_output(OpKind kind, const std::string& name, const Buffer& output,
                                        const Buffer& input, const ProcessSet& set,
                                        const std::vector<std::int64_t>& splits = {});

/// Returns whether the two share a byte.
HVD_BETWEEN_LIBRARIES bool overlap(const Buffer& a, const Buffer& b);

}  // namespace hvd
