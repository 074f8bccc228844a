#pragma once
/// A Simulation is a world of simulated hosts that agree, in virtual time, by the library's own
/// negotiator, leader tree and planner. What is simulated is the network, the time that a leader
/// takes for a message, and when ranks submit. Batches take no time: they are done when the last
/// host has cut them, so that a step's time is what agreeing costs. It is for one thread; the same
/// world and program give the same results (but for `charge_measured`). It fails by throwing
/// std::logic_error.

#include <cstdint>
#include <memory>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/scale/host.h"
#include "tests/scale/network.h"
#include "tests/scale/program.h"
#include "tests/scale/table.h"

namespace scale {

struct World {
  int ranks = 8;
  int ranks_per_host = 8;
  NetworkModel network;
  Time per_message{2'000};  ///< that a leader is busy with each message that it sends or receives
  Time skew{
      50'000};  ///< mean of how much later than the first a rank submits, exponentially distributed
  std::uint64_t seed = 1;
  int tables = 0;  ///< that the hosts share; 0: one each
  std::uint64_t fusion_threshold_bytes = std::uint64_t{128} << 20;
  /// A leader is busy for as long as the library's code takes here, instead of `per_message`. No
  /// two runs are alike then.
  bool charge_measured = false;

  [[nodiscard]] int hosts() const { return (ranks + ranks_per_host - 1) / ranks_per_host; }
  [[nodiscard]] int host_of(int rank) const { return rank / ranks_per_host; }
  [[nodiscard]] int ranks_on(int host) const {
    return std::min(ranks_per_host, ranks - host * ranks_per_host);
  }
};

struct StepResult {
  Time time{0};  ///< from the last submission of a round to the last host's cut, over all rounds of
                 ///< the step
  int rounds = 0;  ///< messages one after the other, in the longest chain
  int cuts = 0;
  std::vector<HostStep> hosts;
};

class Simulation {
 public:
  Simulation(World world, Program program);
  /// Every rank submits the whole program once, and all of it is agreed and cut.
  StepResult step();

 private:
  struct Event {
    Time at;
    std::uint64_t number;  ///< events of one moment happen in the order in which they were foreseen
    enum class Kind : std::uint8_t { Submit, Wake, Done } kind;
    std::uint64_t what;  ///< Submit: rank; Wake: host; Done: batch
    bool operator>(const Event& other) const {
      return at != other.at ? at > other.at : number > other.number;
    }
  };
  void foresee(Time at, Event::Kind kind, std::uint64_t what) {
    events_.push({at, ++events_foreseen_, kind, what});
  }
  void wake(Host& host);
  void begin_round();
  void launch(const hvd::CutBatch& batch, Time now);
  void submit(int rank);
  void finish(std::uint64_t batch);

  const World world_;
  const Program program_;
  Network network_;
  std::unordered_map<std::string, std::size_t> index_of_;
  std::vector<std::unique_ptr<Table>> tables_;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t events_foreseen_ = 0;
  std::uint64_t letters_ = 0;
  Time now_{0};

  struct UnderWay {
    int hosts = 0;  ///< that have cut it
    std::size_t tensors = 0;
  };
  std::unordered_map<std::uint64_t, UnderWay> batches_;
  std::size_t next_unit_ = 0;     // what the coming round begins with
  std::size_t tensors_left_ = 0;  // of this round
  Time last_submission_{0};
  StepResult result_;
};

}  // namespace scale
