#include <utility>

#include "hvd/errors.h"
#include "ops/ucx/point_to_point.h"
#include "ops/ucx/wire.h"

namespace hvd {

std::string why_no_ucx() { return opened_ucx().problem; }

MakePointToPoint open_ucx(int rank, int size, const std::function<std::vector<Bytes>(const Bytes&)>& allgather) {
  const OpenedUcx& opened = opened_ucx();
  if (!opened.problem.empty()) throw BackendError(opened.problem);
  const auto worker = std::make_shared<UcxWorker>(opened.api, rank, size);
  worker->learn(allgather(worker->address()));
  return [worker, channel = 0U]() mutable { return std::make_unique<UcxPointToPoint>(worker, channel++); };
}

}  // namespace hvd
