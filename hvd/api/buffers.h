#pragma once
/// This header has what the files behind hvd/hvd.h have in common; nobody else includes it. Its
/// functions run in the caller's thread and fail as hvd/hvd.h says.
///   hvd.cc        the world as users see it: ranks, process sets, timeline, join and barrier
///   buffers.cc    allreduce and broadcast of raw buffers
///   gathering.cc  allgather, reducescatter and alltoall of them, whose results are made when their
///                 sizes are known
///   peers.cc      send and recv
///   into.cc       the same, with results in memory that exists
///   persistent.cc all of these as operations that are started again and again
// Tested in tests/contract/endpoint_front.cc, tests/contract/cases/local_error_cases.cc

#include <memory>
#include <string_view>
#include <vector>

#include "hvd/api/request.h"
#include "hvd/engine/engine.h"
#include "hvd/hvd.h"

namespace hvd {

/// Returns what is to be known when it is done.
std::shared_ptr<HandleState> submit_and_wait(Submission submission);
Handle<void> submit_only(Submission submission);

/// Returns what `SmallCalls::try_run` is asked for. The call must not outlive the arguments.
template <class Options>
SmallCall small_call(OpKind kind, const Buffer& input, const Buffer& output,
                     const Options& options) {
  SmallCall call = small_request(kind, options);
  call.dtype = input.dtype;
  call.shape = input.shape;
  call.input = input.data;
  call.output = output.data;
  return call;
}
/// A Detour is memory that an operation on the host works on instead of the caller's: it is of the
/// type in which the operation travels, or apart from the output.
class Detour {
 public:
  /// `wire`: the type of its elements; `output`: where the result goes, without memory if it goes
  /// there by itself.
  Detour(const Buffer& input, const Buffer& output, DataType wire);
  [[nodiscard]] void* memory() const { return memory_.get(); }
  /// Brings the input here.
  void enter() const { convert(memory_.get(), wire_, input_.data, input_.dtype); }
  /// Brings the result to the output.
  void leave() const {
    if (output_.data != nullptr) convert(output_.data, output_.dtype, memory_.get(), wire_);
  }

 private:
  void convert(void* to, DataType to_type, const void* from, DataType from_type) const;

  std::shared_ptr<RunningWorld> world_;
  Buffer input_, output_;
  DataType wire_;
  std::size_t count_;
  std::shared_ptr<void> memory_;
};

/// Returns each rank's rows of an alltoall's input: as the options say, or as many each.
std::vector<std::int64_t> splits_of(const Buffer& input, const AlltoallBufferOptions& options);
/// Returns whether `SmallCalls::try_run` may be tried: it looks at no more than that.
inline bool is_on_host(const Buffer& buffer) {
  return buffer.device == Device() && buffer.data != nullptr;
}

/// Returns what each rank of `running` has, in the order of the ranks. Collective.
std::vector<Bytes> gather_bytes(Engine& running, const Bytes& mine, std::string_view name);

}  // namespace hvd
