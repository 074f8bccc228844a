#pragma once
/// This header is UCX as the wire between ranks that share no memory, for those who put a world
/// together: whether there is any, and the making of it. Ranks need nothing but a way to tell each
/// other their addresses, so MPI is not needed. A build without UCX's headers says that it has
/// none.
// Tested in tests/ops/p2p/transport_test.cc, tests/system/scripts/without_nccl.sh

#include <functional>
#include <string>
#include <vector>

#include "hvd/base/wire.h"
#include "ops/p2p/point_to_point.h"

namespace hvd {

/// Returns why this process cannot use UCX, as a part of a sentence; empty if it can.
std::string why_no_ucx();

/// Collective. Returns what makes wires between all ranks, the first on all of them, then the
/// second, and so on; they share connections, and are for one thread at a time, all together.
/// `allgather` gives a rank's bytes to all. Throws BackendError.
MakePointToPoint open_ucx(int rank, int size,
                          const std::function<std::vector<Bytes>(const Bytes&)>& allgather);

}  // namespace hvd
