#include <algorithm>
#include <chrono>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "ops/ucx/point_to_point.h"
#include "ops/ucx/wire.h"

namespace hvd {

namespace {

constexpr int kMostConnected = 64;  // ranks of a world in which each connects to all others at once
constexpr unsigned kFirstWordsChannel = 255;
constexpr std::chrono::seconds kPatience{60};

/// Says a word to each rank, and hears one of each: then connections stand in both directions. One that is still being made when the other
/// end goes ends the process in UCX 1.13 (an assertion, wireup_ep.c:241). Large worlds connect when they need to.
void connect(const std::shared_ptr<UcxWorker>& worker, int size) {
  if (size > kMostConnected) return;
  UcxPointToPoint wire(worker, kFirstWordsChannel);
  // UCX may touch them after a failure: on purpose not freed then.
  const auto* const word = new std::byte{};
  auto* const heard = new std::vector<std::byte>(static_cast<std::size_t>(size));
  std::vector<Posted> posted;
  for (int rank = 0; rank < size; ++rank) {
    if (rank == worker->rank()) continue;
    posted.push_back(wire.receive(std::span(*heard).subspan(static_cast<std::size_t>(rank), 1), rank, 0));
    posted.push_back(wire.send({word, 1}, rank, 0, SendMode::Ordinary));
  }
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  std::vector<Finished> finished;
  const auto is_missing = [](const Posted& one) { return one.handle != 0; };
  for (;;) {
    finished.clear();
    wire.test(posted, finished);
    const auto missing = std::find_if(posted.begin(), posted.end(), is_missing);
    if (missing == posted.end() && wire.flush()) break;
    if (std::chrono::steady_clock::now() > deadline) {
      const std::string peer = missing == posted.end() ? "another" : formatted("rank {}", missing->peer);
      for (Posted& one : posted)
        if (one.handle != 0) static_cast<void>(wire.drop(one));
      throw BackendError(
          formatted("hvd::init(): UCX connects rank {} and {} not within {} s; UCX_NET_DEVICES must allow a network that "
                    "both have",
                    worker->rank(), peer, kPatience.count()));
    }
    std::this_thread::yield();
  }
  delete heard;
  delete word;
}

}  // namespace

std::string why_no_ucx() { return opened_ucx().problem; }

MakePointToPoint open_ucx(int rank, int size, const std::function<std::vector<Bytes>(const Bytes&)>& allgather) {
  const OpenedUcx& opened = opened_ucx();
  if (!opened.problem.empty()) throw BackendError(opened.problem);
  const auto worker = std::make_shared<UcxWorker>(opened.api, rank, size);
  worker->learn(allgather(worker->address()));
  connect(worker, size);
  return [worker, channel = 0U]() mutable { return std::make_unique<UcxPointToPoint>(worker, channel++); };
}

}  // namespace hvd
