#pragma once
/// The place where the host table's ranks meet: comm_groups (who shares a communicator) and their
/// collectives, computed on host memory by the rank that arrives last. Any thread; one lock.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "ops/gpu/api/gpu_api.h"
#include "tests/support/gpu/checks/happens_before.h"
#include "tests/support/gpu/checks/omissions.h"

namespace hvd::gpu::test {

/// What one rank brings to a collective.
struct Contribution {
  StateText call;
  const void* send = nullptr;
  void* receive = nullptr;
  std::size_t count = 0;
  NcclType type = NcclType::Uint8;
  int extra = 0;  ///< the operation; of a broadcast the root
  int root = 0;   ///< of a reduction to one
  /// Where in registered memory the two lie, as text; empty: nowhere.
  StateText send_place = {}, receive_place = {};
  /// What its stream knew when it began.
  Clock clock = {};
  bool agrees_with(const Contribution& other) const {
    return call == other.call && count == other.count && type == other.type &&
           extra == other.extra && root == other.root;
  }
  /// NCCL uses registered memory if all ranks' is, at one place.
  bool lies_as(const Contribution& other) const {
    const bool read_by_all = call == "ncclAllReduce" || call == "ncclReduceScatter";
    const bool written_by_all = call == "ncclAllReduce" || call == "ncclAllGather";
    return (!read_by_all || send_place == other.send_place) &&
           (!written_by_all || receive_place == other.receive_place);
  }
};

/// The bytes of one element.
std::size_t bytes_of_type(NcclType type);

/// Where ranks meet. Any thread.
class HostCluster {
 public:
  HostCluster();
  ~HostCluster();
  HostCluster(const HostCluster&) = delete;
  HostCluster& operator=(const HostCluster&) = delete;

  /// The ranks of one communicator, and its collectives by their number.
  struct CommGroup {
    std::size_t ranks = 0;
    StateSet<int> joined;
    bool left = false;  ///< a rank has aborted its side: what is not done never will be, and ends
                        ///< on the others all the same
    struct Meeting {
      StateMap<int, Contribution> arrived;
      bool done = false;
    };
    StateMap<std::uint64_t, Meeting> meetings;
    /// A message between two ranks: the first of the two brings half of it.
    struct Transfer {
      StateMap<bool, Contribution> halves;  ///< true: the sender's
      bool done = false;
    };
    using Way = std::tuple<int, int, std::uint64_t>;  ///< from, to, number
    StateMap<Way, Transfer> transfers;
    StateMap<std::uint64_t, StateMap<int, std::size_t>>
        windows;  ///< by their number, the bytes of each rank that has come
  };

  NcclUniqueId new_id();

  CommGroup* join(const NcclUniqueId& id, int ranks, int rank);
  bool complete(const CommGroup& comm_group);
  void wait_until_complete(const CommGroup& comm_group);

  /// Brings (once) what `rank` has for collective `number`; true when all ranks have and it is
  /// computed. `clock`: of the rank's stream; in the end it knows what those know whose values the
  /// rank has got.
  bool meet(CommGroup& comm_group, std::uint64_t number, int rank, const Contribution& contribution,
            Clock& clock);

  /// Whether collective `number` is computed; whether a message is delivered.
  bool has_met(CommGroup& comm_group, std::uint64_t number);
  bool has_moved(CommGroup& comm_group, const CommGroup::Way& way);

  /// Brings (once) one side of a message; true when both sides are there and it is delivered.
  /// `clock`: likewise.
  bool transfer(CommGroup& comm_group, const CommGroup::Way& way, bool sends,
                const Contribution& contribution, Clock& clock);

  /// Brings `bytes` to window `number`. Then: whether all ranks have come; or waits until they
  /// have.
  void open_window(CommGroup& comm_group, std::uint64_t number, int rank, std::size_t bytes);
  bool window_complete(const CommGroup& comm_group, std::uint64_t number);
  void wait_for_window(const CommGroup& comm_group, std::uint64_t number);

  /// What `rank` has brought and nobody has used yet goes with it.
  void withdraw(CommGroup& comm_group, int rank);
  bool is_left(const CommGroup& comm_group);

  void note(const std::string& misuse);
  /// Uses of memory without an order among them.
  std::vector<std::string> misuses();
  HappensBefore& order() { return order_; }
  Omissions& omissions() { return omissions_; }

  // ---- CUDA IPC: handles are numbers
  /// An event. It lives as long as anything that waits for it.
  class SharedEvent {
   public:
    std::atomic<std::uint64_t> recorded{0}, happened{0};
    std::atomic<int> open{0};  ///< in ranks that have it from another

    /// The turn happens, in a stream that knows this.
    void happen(std::uint64_t turn, const Clock& clock);
    /// What that stream knew; nothing of turns that nobody can ask for any more.
    Clock clock_of(std::uint64_t turn) const;

   private:
    mutable std::mutex mutex_;
    StateMap<std::uint64_t, Clock> clocks_;  ///< by turn
  };
  IpcHandle publish(int owner, void* memory);
  IpcHandle publish(int owner, const std::shared_ptr<SharedEvent>& event);
  struct Published {
    int owner = -1;
    void* memory = nullptr;
    std::shared_ptr<SharedEvent> event = nullptr;
  };
  /// Nothing if there is no such handle.
  Published published(const IpcHandle& handle);
  /// How often a piece of memory is open in other ranks.
  void opened(void* memory, int change);
  bool is_open(void* memory);

 private:
  static IpcHandle handle_of(std::size_t number);
  void note_locked(const std::string& misuse) { misuses_.emplace_back(misuse); }

  std::mutex mutex_;
  std::condition_variable joined_;
  int ids_ = 0;
  StateMap<StateText, CommGroup> comm_groups_;
  StateVector<StateText> misuses_;
  HappensBefore order_;
  Omissions omissions_;
  std::vector<Published> published_;
  std::map<void*, int> open_;
};

}  // namespace hvd::gpu::test
