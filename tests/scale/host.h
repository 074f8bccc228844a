#pragma once
/// A Host is one simulated host: its leader's hvd::LeaderTree, and hvd::Engine's part around it.
/// What the host's ranks submit becomes records of the table and local events for the tree, and
/// what the tree brings becomes records. It is its own transport: it counts what passes, and gives
/// it to the simulated network. It runs only inside `drive`, at a moment of virtual time, and is
/// then busy for a while.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hvd/negotiation/leaders/leader_tree.h"
#include "hvd/transport.h"
#include "tests/scale/clock.h"
#include "tests/scale/program.h"
#include "tests/scale/table.h"

namespace scale {

struct World;

/// What a leader has sent, by direction: to its parent, to its children; and received.
struct Traffic {
  std::uint64_t up_messages = 0, up_bytes = 0;
  std::uint64_t down_messages = 0, down_bytes = 0;
  std::uint64_t received_messages = 0, received_bytes = 0;
  [[nodiscard]] std::uint64_t messages() const {
    return up_messages + down_messages + received_messages;
  }
  [[nodiscard]] std::uint64_t bytes() const { return up_bytes + down_bytes + received_bytes; }
  bool operator==(const Traffic&) const = default;
};

/// What passes through a host in one step.
struct HostStep {
  Traffic traffic;
  Time relay_took{0};  ///< processor time of the relay's code
  Time table_took{0};  ///< processor time of the negotiator's and planner's code, for one rank that
                       ///< reads the log
};

/// A message on its way.
struct Letter {
  Time arrival{0};
  std::uint64_t number = 0;  ///< in the order of sending
  int depth = 0;             ///< messages that one after the other led to this one
  hvd::Message message;
};

class Host final : public hvd::Transport {
 public:
  struct Wires {
    std::function<void(int to, Letter letter)> send;
    /// A batch has been cut for this host's ranks, at virtual time `now`.
    std::function<void(const hvd::CutBatch& batch, Time now)> launch;
  };
  /// `index_of` finds a unit of the program by its name.
  Host(const World& world, const Program& program,
       const std::unordered_map<std::string, std::size_t>& index_of, int number, Table& table,
       Wires wires);

  // ---- hvd::Transport
  int domain() const override { return number_; }
  int domains() const override;
  void send(int to, hvd::SharedBytes message) override;
  std::optional<hvd::Message> receive() override;

  /// One of this host's ranks submits unit `index`. True if it is the last of them to do so.
  bool submit(int rank, std::size_t index);
  void deliver(Letter letter) { inbox_.push(std::move(letter)); }
  /// Does what the thread that has the engine's turn does, at `now`.
  void drive(Time now);
  /// Root: batches that were cut are done, so the next may be.
  void batches_are_done() { open_batches_ = 0; }

  [[nodiscard]] Time busy_until() const { return busy_until_; }
  /// When there is next something to do, as far as this host knows.
  [[nodiscard]] std::optional<Time> next_work() const;
  [[nodiscard]] int depth() const { return depth_; }
  void set_depth(int depth) { depth_ = depth; }
  /// What has passed since it was last asked.
  HostStep take_step() { return std::exchange(step_, {}); }

  /// When the simulation wakes this host next; the simulation's own.
  std::optional<Time> wake;

 private:
  hvd::LeaderTreeActions actions();
  void introduce(const hvd::UnitKey& key, int rank);
  void agree(const hvd::UnitKey& key, const hvd::Agreement& what);
  void cut();
  void charge_table(Time took);
  /// Processor time of the relay since it is driven.
  [[nodiscard]] Time relay_took() const;
  /// Does something that is not the relay's work.
  template <class Call>
  auto aside(const Call& call);
  [[nodiscard]] Time now() const;
  [[nodiscard]] bool is_root() const { return number_ == 0; }

  const World& world_;
  const Program& program_;
  const std::unordered_map<std::string, std::size_t>& index_of_;
  const int number_;
  Table& table_;
  Wires wires_;
  std::unique_ptr<hvd::LeaderTree> leader_tree_;

  struct Arrivals {
    int submitted = 0;             ///< ranks of this host, in this round
    std::vector<bool> introduced;  ///< by rank of the world
    int introductions = 0;
  };
  std::vector<Arrivals> units_;
  std::vector<hvd::LocalEvent> local_events_;
  std::size_t decided_ = 0;  // of the root's decisions, those that have reached this host
  std::size_t open_batches_ = 0;

  struct Later {
    bool operator()(const Letter& a, const Letter& b) const {
      return a.arrival != b.arrival ? a.arrival > b.arrival : a.number > b.number;
    }
  };
  std::priority_queue<Letter, std::vector<Letter>, Later> inbox_;
  int depth_ = 0;
  HostStep step_;
  Time busy_until_{0};
  Time log_took_{0};  // reading what this host's ranks have written since it was last driven

  // ---- while it is driven
  Time driven_at_{0};
  Time began_{0};          // on the processor's clock
  Time messages_took_{0};  // as the model has it
  Time table_took_{0};     // processor time of the table, whoever it was spent for
  Time not_relay_{0};      // processor time that was spent here on anything but the relay
};

}  // namespace scale
