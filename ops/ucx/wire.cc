#include "ops/ucx/wire.h"

#include "hvd/errors.h"

#ifdef HVD_HAVE_UCX
#include <algorithm>
#include <chrono>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "hvd/base/text.h"
#include "ops/ucx/point_to_point.h"

namespace hvd {

namespace {

constexpr int kMostConnected = 64;  // ranks of a world in which each connects to all others at once
constexpr unsigned kFirstWordsChannel = 255;
constexpr std::chrono::seconds kPatience{60};

using Allgather = std::function<std::vector<Bytes>(const Bytes&)>;

/// Makes the endpoints of all ranks. Returns what UCX says of one it cannot make, or an empty text.
std::string find_ways(UcxWorker& worker, int size) {
  std::string problem;
  for (int rank = 0; rank < size; ++rank) try {
      if (rank != worker.rank()) static_cast<void>(worker.endpoint(rank));
    } catch (const BackendError& error) {
      if (problem.empty()) problem = error.what();
    }
  return problem;
}

/// Throws, on all ranks alike, the first problem that one has. A rank that has ended is not reached
/// either: then that is thrown, by the second exchange where it has ended after the first.
void agree(const std::string& problem, const Allgather& allgather) {
  for (const Bytes& said : allgather(Writer().put_string(problem).take())) {
    std::string text = Reader(said).get_string();
    if (text.empty()) continue;
    static_cast<void>(allgather({}));
    throw BackendError(std::move(text));
  }
}

/// Says a word to each rank, and hears one of each: then connections stand in both directions. One
/// that is still being made when the other end goes ends the process in UCX 1.13 (an assertion,
/// wireup_ep.c:241). Goes on with the others where one is lost. Returns what is wrong.
std::string connect(const std::shared_ptr<UcxWorker>& worker, int size) {
  UcxPointToPoint wire(worker, kFirstWordsChannel);
  struct Words {
    std::byte mine{};
    std::vector<std::byte> heard;
  };
  const auto words = std::make_shared<Words>();
  words->heard.resize(static_cast<std::size_t>(size));
  worker->keep(words);
  std::vector<Posted> posted;
  for (int rank = 0; rank < size; ++rank) {
    if (rank == worker->rank()) continue;
    posted.push_back(
        wire.receive(std::span(words->heard).subspan(static_cast<std::size_t>(rank), 1), rank, 0));
    posted.push_back(wire.send({&words->mine, 1}, rank, 0, SendMode::Ordinary));
  }
  std::string problem;
  const auto give_up = [&](Posted& one, std::string_view what) {
    if (problem.empty())
      problem = formatted(
          "hvd::init(): UCX {} between rank {} and rank {}; UCX_NET_DEVICES and UCX_TLS must allow "
          "a way that both have",
          what, worker->rank(), one.peer);
    static_cast<void>(wire.drop(one));
  };
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  const auto is_missing = [](const Posted& one) { return one.handle != 0; };
  std::vector<Finished> finished;
  while (std::any_of(posted.begin(), posted.end(), is_missing) ||
         (problem.empty() && !wire.flush())) {
    finished.clear();
    const bool is_late = std::chrono::steady_clock::now() > deadline;
    for (Posted& one : posted) {
      if (!is_missing(one)) continue;
      if (worker->is_given_up(one.peer)) give_up(one, "has lost the connection");
      if (is_late && is_missing(one)) give_up(one, "makes no connection within a minute");
    }
    try {
      wire.test(posted, finished);
    } catch (const RankFailed&) {
      continue;  // since the look above
    }
    if (is_late && problem.empty())
      problem = formatted("hvd::init(): UCX does not send what rank {} says", worker->rank());
    if (is_late) break;
    std::this_thread::yield();
  }
  return problem;
}

}  // namespace

std::string why_no_ucx() { return opened_ucx().problem; }

MakePointToPoint open_ucx(int rank, int size, const Allgather& allgather) {
  const OpenedUcx& opened = opened_ucx();
  if (!opened.problem.empty()) throw BackendError(opened.problem);
  const auto worker = std::make_shared<UcxWorker>(opened.api, rank, size);
  worker->learn(allgather(worker->address()));
  if (size <= kMostConnected) {  // larger worlds connect when they need to
    agree(find_ways(*worker, size), allgather);
    agree(connect(worker, size), allgather);
  }
  return [worker, channel = 0U]() mutable {
    return std::make_unique<UcxPointToPoint>(worker, channel++);
  };
}

}  // namespace hvd

#else  // this build has no UCX

namespace hvd {

std::string why_no_ucx() { return "hvd was built without UCX (libucx-dev)"; }

MakePointToPoint open_ucx(int /*rank*/, int /*size*/,
                          const std::function<std::vector<Bytes>(const Bytes&)>& /*allgather*/) {
  throw BackendError(why_no_ucx());
}

}  // namespace hvd

#endif
