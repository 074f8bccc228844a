// Tested in tests/ops/rendezvous/meeting_test.cc
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "hvd/base/process.h"
#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "ops/rendezvous/meeting_file.h"
#include "ops/rendezvous/store_meeting.h"

namespace hvd {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Result = Attempt::Result;

constexpr auto kKnob = "HVD_START_TIMEOUT";
constexpr auto kSure = 3s;  // after which a wrong answer will not become a right one
// in which a server that is there answers; a busy one is asked again, with more time
constexpr auto kAnswer = 1s;
constexpr auto kMostAnswer = 8s;
// in which ranks that contradict each other still find somebody who tells them so
constexpr auto kAfterword = 2s;
constexpr auto kGrace = 5s;  // in which a store that has run out of patience says so
constexpr auto kPause = 20ms;
constexpr auto kMostPause = 200ms;

std::string who_am_i() { return formatted("process {} on {}", ::getpid(), host_name()); }

/// The addresses at which to look for the store, and the key.
struct Place {
  std::vector<SocketAddress> addresses;  // with their ports
  Digest key{};
};

/// One rank on its way to the store.
class StoreFinder {
 public:
  StoreFinder(const Launch& launch, std::chrono::milliseconds patience)
      : address_(*launch.store),
        hello_{*launch.hints.rank, *launch.hints.size, who_am_i()},
        patience_(patience),
        deadline_(Clock::now() + patience),
        file_(address_.path) {}

  std::unique_ptr<Meeting> meet() {
    std::unique_ptr<StoreServer> server;
    if (hello_.rank == 0) server = open_store();
    try {
      auto ranks = std::make_unique<StoreMeeting>(hello_.rank, hello_.size, find_store());
      ranks->start(server, Clock::now() + patience_ + 30s);
      return ranks;
    } catch (const InvalidArgument&) {
      if (server) std::this_thread::sleep_for(kAfterword);
      throw;
    }
  }

 private:
  [[nodiscard]] bool is_file() const { return !address_.path.empty(); }
  [[nodiscard]] Digest key() const { return make_key(address_.token, address_.job); }
  [[nodiscard]] std::string seconds() const {
    return formatted("{} s ({})",
                     std::chrono::duration_cast<std::chrono::seconds>(patience_).count(), kKnob);
  }

  /// A name may take a moment to be known: a pod's until it is there, perhaps long after this one.
  std::vector<SocketAddress> resolve_host() {
    for (;;) {
      std::string problem;
      bool may_pass = false;
      auto found = resolve(address_.host, problem, &may_pass);
      if (!found.empty()) return found;
      if (Clock::now() > (may_pass || address_.may_be_named_later ? deadline_ : began_ + kSure))
        throw BackendError(
            formatted("hvd::init(): the host '{}', at which the ranks are to meet, is not found: "
                      "{}; MASTER_ADDR, or HVD_INIT, "
                      "must name the host of rank 0",
                      address_.host, problem));
      std::this_thread::sleep_for(kMostPause);
    }
  }

  std::unique_ptr<StoreServer> open_store() {
    FileDescriptor listener = is_file() ? listen_for_file() : listen_for_tcp();
    StoreServer::Options options;
    options.size = hello_.size;
    options.key = place_.key;
    options.patience = patience_;
    options.place =
        is_file() ? address_.path : formatted("{}:{}", address_.host, port_of(listener));
    options.knob = kKnob;
    return std::make_unique<StoreServer>(std::move(listener), std::move(options));
  }

  /// Throws if who holds the store at `place` is of this job.
  void require_no_other(const Place& place) {
    for (const auto& address : place.addresses) {
      const Attempt attempt =
          try_to_meet(address, hello_, place.key, Clock::now() + 2 * kAnswer, deadline_);
      if (attempt.result == Result::Wrong || attempt.result == Result::Complete ||
          attempt.result == Result::Welcome)
        throw InvalidArgument(formatted(
            "hvd::init(): another process is rank 0 of this job already, at {}: each process needs "
            "a RANK of its own, and each job a MASTER_PORT or HVD_INIT of its own{}{}",
            address_.text(), attempt.text.empty() ? "" : "; ", attempt.text));
    }
  }

  FileDescriptor listen_for_tcp() {
    const auto addresses = resolve_host();
    int error = 0;
    for (int port = address_.first_port; port < address_.first_port + address_.ports; ++port) {
      for (const auto& address : addresses) {
        place_ = {{address.with_port(port)}, key()};
        int code = 0;
        const auto heard = address_to_listen_at(address_.host, place_.addresses.front());
        if (auto listener = listen_at(heard, code)) return std::move(*listener);
        // at another address of this host somebody has the port, which may be free at this one
        if (code == EADDRINUSE)
          if (auto listener = listen_at(place_.addresses.front(), code))
            return std::move(*listener);
        if (code != EADDRNOTAVAIL || error == 0) error = code;
        if (code == EADDRINUSE) require_no_other(place_);
      }
    }
    const std::string begin = formatted("hvd::init(): rank 0 cannot listen at {}: {}",
                                        address_.text(), std::strerror(error));
    if (error == EADDRNOTAVAIL)
      throw BackendError(
          begin +
          "; the address must be one of the host that rank 0 runs on (MASTER_ADDR, or HVD_INIT)");
    if (error == EADDRINUSE)
      throw BackendError(
          begin + "; another program has it: choose another MASTER_PORT, or port in HVD_INIT");
    throw BackendError(begin);
  }

  FileDescriptor listen_for_file() {
    std::string problem;
    int error = 0;
    auto listener = listen_at(resolve("127.0.0.1", problem).at(0), error);
    if (!listener)
      throw BackendError(
          formatted("hvd::init(): rank 0 cannot listen at 127.0.0.1: {}", std::strerror(error)));
    const MeetingNote note = make_note(port_of(*listener), name_of_host());
    while (!file_.publish(note)) {  // there is one: of a job that has ended, or not
      if (const auto other = file_.read()) {
        require_no_other(place_of(*other));
      } else if (!file_.is_empty()) {
        throw InvalidArgument(
            formatted("hvd::init(): HVD_INIT=file://{}: there is such a file, which is none of "
                      "hvd's; name one that is not there",
                      address_.path));
      }
      file_.remove();
    }
    place_ = place_of(note);
    return std::move(*listener);
  }

  [[nodiscard]] Place place_of(const MeetingNote& note) const {
    std::string problem;
    Place place{resolve("127.0.0.1", problem), make_key(address_.token, note.secret)};
    for (auto& address : place.addresses) address = address.with_port(note.port);
    return place;
  }

  /// Returns where the store may be now; nowhere yet where there is no file.
  Place find_place() {
    if (hello_.rank == 0) return place_;
    if (is_file()) {
      const auto note = file_.read();
      if (!note) return {};
      // of an earlier job, perhaps
      if (note->host != name_of_host() && Clock::now() < began_ + kSure) return {};
      if (note->host != name_of_host())
        throw BackendError(
            formatted("hvd::init(): {} was written on another host ({}): ranks of several hosts "
                      "meet by HVD_INIT=tcp://HOST:PORT; "
                      "or the file is of a job that has ended: remove it",
                      address_.path, note->host.substr(0, note->host.find(' '))));
      return place_of(*note);
    }
    if (place_.addresses.empty()) {
      place_.key = key();
      for (const auto& address : resolve_host())
        for (int port = address_.first_port; port < address_.first_port + address_.ports; ++port)
          place_.addresses.push_back(address.with_port(port));
    }
    return place_;
  }

  Attempt find_store() {
    std::chrono::milliseconds answer = kAnswer;
    std::chrono::milliseconds pause = kPause;
    for (;;) {
      const Place place = find_place();
      Result seen = Result::Nobody;
      for (const auto& address : place.addresses) {
        Attempt attempt =
            try_to_meet(address, hello_, place.key, std::min(Clock::now() + answer, deadline_),
                        deadline_ + kGrace);
        if (attempt.result == Result::Welcome) return attempt;
        if (attempt.result == Result::Wrong)
          throw InvalidArgument(formatted("hvd::init(): {}", attempt.text));
        if (attempt.result == Result::Nobody) continue;
        if (seen != Result::Complete) seen = attempt.result;
        if (attempt.result == Result::Complete) complete_ = attempt.text;
      }
      complain(seen);
      std::this_thread::sleep_for(pause);
      pause = std::min<std::chrono::milliseconds>(2 * pause, kMostPause);
      if (seen == Result::Stranger)
        answer = std::min<std::chrono::milliseconds>(2 * answer, kMostAnswer);
    }
  }

  /// Throws where it is of no use to try again.
  void complain(Result seen) {
    const auto now = Clock::now();
    if (seen == Result::Nobody) wrong_since_ = now;
    const bool is_sure = now > wrong_since_ + kSure;
    if (seen == Result::Complete && is_sure)
      throw InvalidArgument(formatted("hvd::init(): {}", complete_));
    const bool is_single = address_.ports == 1 && !is_file();
    const char* const other =
        seen == Result::OtherJob
            ? "the rank 0 that answers there is of another job, or has another HVD_INIT_TOKEN"
        : seen == Result::Nobody
            ? "nobody answers there"
            : "who answers there is no rank 0 of hvd, or of another version of it";
    if (is_single && seen != Result::Nobody && seen != Result::Complete && is_sure)
      throw BackendError(formatted("hvd::init(): rank {} does not find rank 0 at {}: {}",
                                   hello_.rank, address_.text(), other));
    if (now > deadline_)
      throw BackendError(
          formatted("hvd::init(): rank 0 did not come to {} within {}: {}; has it been started, "
                    "with the same variables?",
                    address_.text(), seconds(), other));
  }

  const StoreAddress address_;
  const Hello hello_;
  const std::chrono::milliseconds patience_;
  const Deadline began_ = Clock::now();
  const Deadline deadline_;
  MeetingFile file_;
  Place place_;
  std::string complete_;
  Deadline wrong_since_ = Clock::now();
};

}  // namespace

std::unique_ptr<Meeting> meet_in_store(const Launch& launch, std::chrono::milliseconds patience) {
  try {
    return StoreFinder(launch, patience).meet();
  } catch (const InvalidArgument& error) {
    if (launch.outer.empty()) throw;
    throw InvalidArgument(
        formatted("{}. Two launchers have started this process: {}, whose numbers were taken ({}), "
                  "and {} within its job or around it; set HVD_INIT=mpi if the latter's count",
                  error.what(), launch.launcher, launch.said, launch.outer));
  }
}

}  // namespace hvd
