// Tested in tests/contract/cases/into_cases.cc

#include <cstring>
#include <memory>
#include <utility>

#include "hvd/api/buffers.h"
#include "hvd/api/request.h"
#include "hvd/api/world.h"
#include "hvd/base/text.h"

namespace hvd {

namespace {

/// Returns a submission whose result goes to `output`.
template <class Options>
Submission writing(OpKind kind, const Buffer& output, const Buffer& input, const Options& options,
                   std::vector<std::int64_t> splits = {}) {
  check_output(kind, options.name, output, input, options.process_set, splits);
  Submission submission = request(kind, options, input.device);
  const void* from = input.data;
  if (overlap(output, input)) {
    // Others may read the input until all are done, and this rank writes the output before that.
    if (input.device != Device())
      throw InvalidArgument(
          formatted("{}_into '{}': the output overlaps the input; give it memory of its own",
                    name_of(kind), options.name));
    const std::size_t bytes =
        static_cast<std::size_t>(element_count(input.shape)) * element_bytes(input.dtype);
    const std::shared_ptr<std::byte[]> copy(new std::byte[bytes]);
    std::memcpy(copy.get(), input.data, bytes);
    from = copy.get();
    submission.keep_alive = copy;
  }
  submission.tensors.push_back({from, nullptr, input.dtype, input.shape, nullptr, true});
  if (kind != OpKind::Reducescatter && !output.shape.empty())
    submission.tensors.front().output_rows = output.shape.front();
  submission.tensors.front().splits = std::move(splits);
  submission.allocate = [data = output.data](std::size_t /*index*/, std::int64_t /*rows*/) {
    return data;
  };
  return submission;
}

/// Tries the fast path of repeated operations. What it cannot judge (rows, for one) is negotiated.
template <class Options>
bool run_small(OpKind kind, const Buffer& output, const Buffer& input, const Options& options,
               std::span<const std::int64_t> splits = {}, std::span<std::int64_t> received = {}) {
  const bool alike = output.dtype == input.dtype && output.device == input.device &&
                     output.shape.size() == input.shape.size();
  if (!alike || input.shape.empty() || !is_on_host(input) || !is_on_host(output) ||
      overlap(output, input))
    return false;
  for (std::size_t d = 1; d < input.shape.size(); ++d)
    if (output.shape[d] != input.shape[d]) return false;
  SmallCall call = small_call(kind, input, output, options);
  call.splits = splits;
  call.received = received;
  call.output_rows = output.shape.front();
  return try_fast_path(call);
}

}  // namespace

Handle<void> allgather_into_async(const Buffer& output, const Buffer& input,
                                  const AllgatherOptions& options) {
  const WorldScope scope(options.world);
  return submit_only(writing(OpKind::Allgather, output, input, options));
}
void allgather_into(const Buffer& output, const Buffer& input, const AllgatherOptions& options) {
  const WorldScope scope(options.world);
  if (!run_small(OpKind::Allgather, output, input, options))
    submit_and_wait(writing(OpKind::Allgather, output, input, options));
}

Handle<void> reducescatter_into_async(const Buffer& output, const Buffer& input,
                                      const ReducescatterOptions& options) {
  const WorldScope scope(options.world);
  return submit_only(
      writing(OpKind::Reducescatter, output, dealt(input, options), options, options.counts));
}
void reducescatter_into(const Buffer& output, const Buffer& input,
                        const ReducescatterOptions& options) {
  const WorldScope scope(options.world);
  if (options.counts.empty() && run_small(OpKind::Reducescatter, output, input, options)) return;
  submit_and_wait(
      writing(OpKind::Reducescatter, output, dealt(input, options), options, options.counts));
}

Handle<std::vector<std::int64_t>> alltoall_into_async(const Buffer& output, const Buffer& input,
                                                      const AlltoallBufferOptions& options) {
  const WorldScope scope(options.world);
  auto running = engine();
  auto pending =
      running->submit(writing(OpKind::Alltoall, output, input, options, splits_of(input, options)));
  return {std::move(running), pending, [pending] { return pending->rows.front(); }};
}
std::vector<std::int64_t> alltoall_into(const Buffer& output, const Buffer& input,
                                        const AlltoallBufferOptions& options) {
  const WorldScope scope(options.world);
  if (!input.shape.empty()) {
    std::vector<std::int64_t> rows = splits_of(input, options);  // for each rank; then from each
    if (run_small(OpKind::Alltoall, output, input, options, rows, rows)) return rows;
  }
  return submit_and_wait(
             writing(OpKind::Alltoall, output, input, options, splits_of(input, options)))
      ->rows.front();
}

}  // namespace hvd
