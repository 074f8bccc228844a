#pragma once
/// Many worlds at once, drawn from a seed: of random members of a few ranks, each with random
/// operations from one or several threads, and an end of its own. A rank is whatever runs its
/// members: threads of one process, or a process.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hvd/world.h"

namespace hvd::test::worlds_by_seed {

/// How a world ends.
enum class EndOfWorld : std::uint8_t {
  Shutdown,  ///< all call it, after their last operation
  Dropped,   ///< each drops its value, after its last operation
  Left,      ///< one leaves in the middle
  Aborted,   ///< one aborts it in the middle
  Late,      ///< one stops submitting; another's deadline ends it
  Absent,    ///< one never comes
  Killed,    ///< one member's process dies in the middle
};

/// A WorldPlan is the same on all members.
struct WorldPlan {
  std::string name;
  std::vector<int> members;  ///< ranks of the program, ascending
  EndOfWorld end = EndOfWorld::Shutdown;
  int ender = 0;  ///< the place in `members` of the one that ends it
  int steps = 0;  ///< of each thread; the end comes after them
  int threads = 1;
  std::uint64_t seed = 0;
  bool shares_memory = true;
};

/// A ProgramPlan is what a seed stands for.
struct ProgramPlan {
  std::vector<WorldPlan> worlds;
  int victim = -1;  ///< the rank that is killed; none
};

struct ProgramShape {
  int ranks = 6;
  int worlds = 20;
  int steps = 12;
  bool kills = false;  ///< of half of the seeds, one rank
  bool shares_memory = true;
};

ProgramPlan plan_of(std::uint64_t seed, const ProgramShape& shape);

/// What runs a rank is told of its members.
struct RankHooks {
  std::function<void()> made = [] {
  };  ///< one of them has made its world, or has failed to, or is not to come
  std::function<void()> die = [] {};  ///< ends the process
};

/// Takes the part of the member at `place` in the world, from its making to its end. Returns what
/// was wrong; empty: nothing.
std::string take_part(const WorldPlan& plan, int place, const hvd::Rendezvous& rendezvous,
                      const RankHooks& hooks);

}  // namespace hvd::test::worlds_by_seed
