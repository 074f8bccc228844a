// The null twin of wire_present.cc: this build has no UCX.
// Tested in tests/system/scripts/without_nccl.sh

#include "hvd/errors.h"
#include "ops/ucx/wire.h"

namespace hvd {

std::string why_no_ucx() { return "hvd was built without UCX (libucx-dev)"; }

MakePointToPoint open_ucx(int /*rank*/, int /*size*/, const std::function<std::vector<Bytes>(const Bytes&)>& /*allgather*/) {
  throw BackendError(why_no_ucx());
}

}  // namespace hvd
