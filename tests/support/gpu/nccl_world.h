#pragma once
/// Ranks as threads, each with an NCCL backend on its own host device; and tensors for them. A
/// world that does not end within 20 s ends the program and says which ranks were still running.

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ops/gpu/nccl/nccl_backend.h"
#include "ops/shm/memory/shared_memory.h"
#include "tests/support/gpu/baton.h"
#include "tests/support/gpu/host_gpu_api.h"

namespace hvd::gpu::test {

/// For the ranks' threads, where doctest's macros would end the wrong thread.
void expect(bool condition, const std::string& what);

/// `count` numbers as elements of `dtype`; complex numbers take two each.
std::vector<std::byte> encoded(DataType dtype, const std::vector<double>& numbers);

std::vector<double> decoded(DataType dtype, const std::vector<std::byte>& bytes);

/// A tensor of one rank. `in_place`: the output is the input.
struct Tensor {
  std::string name;
  std::vector<std::byte> input;
  std::vector<std::byte> output;
  bool in_place = false;
  void* ready_event = nullptr;
  std::vector<std::int64_t> counts;  ///< as in BatchMember
  std::vector<std::int64_t> sends;

  const std::vector<std::byte>& result() const { return in_place ? input : output; }
};

class World;

/// How the first rank of a set gives its bytes to the others. A set comes here several times, once
/// for each of its communicators.
class IdExchange {
 public:
  /// `failed` ends the wait; `pause` is called while there is nothing yet.
  Bytes give(int rank, const ProcessSetInfo& set, Bytes mine,
             const std::atomic<bool>* failed = nullptr, const std::function<void()>& pause = {});

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::vector<int>, std::deque<Bytes>> given_;
  std::map<std::pair<int, std::vector<int>>, std::size_t> turns_;
};

/// What a rank's thread has.
struct Rank {
  World& world;
  int rank;
  ProcessSetInfo set;
  HostDevice& device;
  std::unique_ptr<NcclBackend> backend;

  BatchTraits traits(OpKind kind, DataType dtype, ReduceOp op = ReduceOp::Sum) const;
  static Batch batch(const BatchTraits& traits, std::vector<Tensor>& tensors);
  /// As the engine drives it: until done, or until another rank has failed.
  void finish(Execution& execution) const;
  void run(const BatchTraits& traits, std::vector<Tensor>& tensors) const {
    finish(*backend->launch(batch(traits, tensors)));
  }
};

class World {
 public:
  explicit World(int ranks);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  HostCluster cluster;
  std::vector<std::unique_ptr<HostDevice>> devices;
  NcclOptions options;
  std::set<int> users_devices;      ///< on which the test itself has put contexts
  std::atomic<bool> failed{false};  ///< as the engine would tell all ranks
  bool shares_abort_word = true;
  std::string title;  ///< what the watchdog says of it

  /// All devices run by it, and ranks one at a time: the same each time.
  void set_schedule(const Schedule& schedule);
  [[nodiscard]] Baton* baton() { return baton_ ? &*baton_ : nullptr; }
  /// Lets the rank's device go on, and other ranks run.
  void pass(int rank);
  /// What the rank's backend calls.
  [[nodiscard]] const GpuApi& table(int rank) const;

  /// Calls `body` on a thread per rank and waits for them; rethrows what the first of them threw.
  /// Backends are gone afterwards, and nothing may have leaked or been misused.
  void run(const std::function<void(Rank&)>& body);

  ProcessSetInfo everyone(int rank) const;

  /// In memory that the ranks share, where the rank has it mapped: each at an address of its own,
  /// as processes do.
  [[nodiscard]] std::uint32_t* abort_word(int rank) const;

 private:
  void body_of(int rank, const std::function<void(Rank&)>& body);

  std::vector<std::unique_ptr<Mapping>> abort_pages_;
  IdExchange exchange_;
  std::optional<Baton> baton_;
  std::vector<GpuApi> tables_;  ///< that pass it
};

}  // namespace hvd::gpu::test
