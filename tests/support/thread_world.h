#pragma once
/// A world whose ranks are threads of this process, with neither MPI nor a GPU: the board and the
/// arenas are ordinary memory, domains (pretended hosts) talk through mailboxes, and batches that
/// span domains run on a rendezvous of the test's own. `run` gives every rank a thread and a
/// watchdog: a hang ends the program and names the ranks that still run.

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/engine/engine.h"
#include "ops/shm/memory/arena.h"
#include "tests/support/sanitized.h"

namespace hvd::test {

/// Ends the program if it lives longer than its time.
class Watchdog {
 public:
  Watchdog(std::string what, std::chrono::seconds limit, std::function<std::string()> state = {});
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  bool over_ = false;
  std::thread thread_;
};

/// Mailboxes between the leaders of pretended hosts.
class Mailboxes {
 public:
  explicit Mailboxes(int domains) : boxes_(static_cast<std::size_t>(domains)) {}
  void put(int to, Message message);
  std::optional<Message> take(int owner);

 private:
  std::mutex mutex_;
  std::vector<std::deque<Message>> boxes_;
};

class MailTransport final : public Transport {
 public:
  /// `listens`: of the leader, whose mailbox it is.
  MailTransport(std::shared_ptr<Mailboxes> mail, int domain, int domains, bool listens = true)
      : mail_(std::move(mail)), domain_(domain), domains_(domains), listens_(listens) {}
  int domain() const override { return domain_; }
  int domains() const override { return domains_; }
  void send(int to, SharedBytes message) override;
  std::optional<Message> receive() override {
    return listens_ ? mail_->take(domain_) : std::nullopt;
  }

 private:
  std::shared_ptr<Mailboxes> mail_;
  int domain_, domains_;
  bool listens_;
};

struct WorldOptions {
  int size = 2;
  int domains = 1;  ///< ranks are dealt to domains in blocks
  Config config;
  unsigned cores = 2;
  std::chrono::seconds limit{kThreadSanitizer ? 180 : 60};
  std::function<void(int rank, EngineParts& parts)>
      customize;  ///< has the last word on what a rank's engine is made of
  /// Before that, for what works in the arena.
  std::function<void(int rank, EngineParts& parts, const std::shared_ptr<Arena>& arena)>
      add_backends;
};

class ThreadWorld {
 public:
  explicit ThreadWorld(WorldOptions options);
  ~ThreadWorld();
  ThreadWorld(const ThreadWorld&) = delete;
  ThreadWorld& operator=(const ThreadWorld&) = delete;

  [[nodiscard]] int size() const { return options_.size; }
  Engine& engine(int rank) { return *engines_[static_cast<std::size_t>(rank)]; }
  Arena& arena(int rank) { return *arenas_[static_cast<std::size_t>(rank)]; }

  /// Runs `body(rank, engine)` on a thread per rank; rethrows the first exception. `shut_down`:
  /// each rank then calls shutdown().
  void run(const std::function<void(int, Engine&)>& body, bool shut_down = true);

 private:
  WorldOptions options_;
  std::vector<std::shared_ptr<Arena>> arenas_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

/// The submission of one tensor of this process's memory.
template <class T>
Submission allreduce_of(std::vector<T>& values, std::string name, DataType dtype,
                        ReduceOp op = ReduceOp::Sum) {
  Submission submission;
  submission.kind = OpKind::Allreduce;
  submission.name = std::move(name);
  submission.op = op;
  submission.tensors.push_back({values.data(),
                                values.data(),
                                dtype,
                                {static_cast<std::int64_t>(values.size())},
                                nullptr,
                                true});
  return submission;
}

}  // namespace hvd::test
