#pragma once
/// This header has what the files behind hvd/hvd.h have in common; nobody else includes it. Its functions run in the caller's thread and
/// fail as hvd/hvd.h says.
///   hvd.cc        the world as users see it: ranks, process sets, timeline, join and barrier
///   buffers.cc    allreduce and broadcast of raw buffers
///   gathering.cc  allgather, reducescatter and alltoall of them, whose results are made when their sizes are known
///   into.cc       the same, with results in memory that exists

#include <string>
#include <string_view>
#include <vector>

#include "hvd/engine/engine.h"
#include "hvd/hvd.h"

namespace hvd {

void submit_and_wait(Submission submission);
Handle<void> submit_only(Submission submission);

/// Returns what `Engine::try_fast_path` is asked for. The call must not outlive the arguments.
SmallCall small_call(OpKind kind, const Buffer& input, const Buffer& output, const std::string& name, const ProcessSet& set);
/// Sets operation and scales of a SmallCall or a Submission from any options.
template <class Call, class Options>
void set_reduction(Call& call, const Options& options) {
  call.op = options.op;
  call.prescale_factor = options.prescale_factor;
  call.postscale_factor = options.postscale_factor;
}
/// Returns whether `Engine::try_fast_path` may be tried: it looks at no more than that.
inline bool is_on_host(const Buffer& buffer) { return buffer.device == Device() && buffer.data != nullptr; }

/// Returns what each rank of `running` has, in the order of the ranks. Collective.
std::vector<Bytes> gather_bytes(Engine& running, const Bytes& mine, std::string_view name);

}  // namespace hvd
