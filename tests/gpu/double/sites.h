#pragma once
/// The places in hvd's code that calls come from: each can be left out, and whoever counts on it
/// must be found out (tests/gpu/torch_omissions.cc). Under a Lock.

#include <string>

namespace hvd::gpu::test::cuda {

/// Whether an address is the program's, hvd being linked into it, or that of a library.
bool is_programs(const void* caller);
/// Return addresses in the program, as it is in its file, the innermost first, with a "-" where
/// other libraries than LibTorch's guards are in between: for addr2line.
std::string callers();

/// Whether the program's call that the thread is in does nothing. `kind`: "wait", "record",
/// "device", "stream". HVD_TEST_GPU_OMIT leaves out those whose callers begin with one of its lines
/// ("wait 2995c1 1c0"); with HVD_TEST_GPU_COUNT all that there are are said on the standard error
/// at the end.
bool is_left_out(const char* kind);

}  // namespace hvd::gpu::test::cuda
