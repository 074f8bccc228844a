#pragma once
/// The checks that a rank can make by itself before an operation writes its result into memory that exists (`allgather_into`,
/// `alltoall_into`, `reducescatter_into`), on buffers or on tensors. Any thread. They fail with InvalidArgument, which names the operation.
// Tested in tests/contract/into_cases.cc, tests/torch_bindings/collectives/into_test.cc

#include <string>

#include "hvd/base/visible.h"
#include "hvd/hvd.h"

namespace hvd {

/// Throws InvalidArgument if no `input` of other ranks could make the result fit `output`: its type, device and dimensions beyond the first
/// must be the input's, and it must have room for what this rank itself gives. Whether it has just as many rows as come is known when all
/// ranks have said theirs (a Mismatch on all of them if not), but for a reducescatter and in a set of one rank, where it is checked here.
/// `splits`: rows of an alltoall for each rank, or elements of a reducescatter of one dimension; empty: the first dimension is divided
/// evenly.
HVD_BETWEEN_LIBRARIES void check_output(OpKind kind, const std::string& name, const Buffer& output, const Buffer& input,
                                        const ProcessSet& set, const std::vector<std::int64_t>& splits = {});

/// Returns whether the two share a byte.
HVD_BETWEEN_LIBRARIES bool overlap(const Buffer& a, const Buffer& b);

}  // namespace hvd
