#pragma once
/// A case is one thing that the contract promises, checked by all ranks of a world together; the
/// context is what a rank's case works with. Every rank runs the same cases in the same order, each
/// in a thread of its own or in its process. A wrong result is noted and the case goes on, so that
/// the ranks stay together; what is thrown ends the case on that rank.

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/contract/endpoint.h"
#include "tests/support/oracle/oracle.h"

namespace hvd::contract {

using namespace oracle;

/// What is true of a world, the same on all its ranks.
struct Setting {
  std::string name;  ///< "shm, 4 threads"
  int size = 1;
  Device device;
  bool any_order = false;   ///< sums are the transport's own: in its order, with roundings between
  bool front_door = false;  ///< hvd/hvd.h, which checks a little more than the engine
  bool arena = true;        ///< ranks share memory: of some domain at least
  bool fuses = true;  ///< the threshold is not 0: this is the first of the instance's two worlds
  std::vector<int> domain_of_rank =
      {};  ///< by rank: with whom it shares a board; empty: all ranks share one
  /// Whether no other rank shares memory with this one.
  [[nodiscard]] bool is_alone(int rank) const;
  /// Of ranks that work together, the places by domain; those of `absent`, which only count as
  /// zeros, are in none.
  [[nodiscard]] Domains domains_of(const std::vector<int>& ranks,
                                   const std::vector<int>& absent) const;
};

/// Thrown by a case that cannot run here, before it has called anything: on all ranks alike.
struct Skip {
  std::string reason;
};

/// The sets of ranks in every world. Global: all. Early: from init() on, the even ranks. Late: made
/// by add_process_set, all but rank 0.
enum class SetKind : std::uint8_t { Global, Early, Late };
std::vector<int> ranks_of(SetKind set, int size);

struct Context {
  Endpoint& endpoint;
  const Setting& setting;
  const int rank = 0;
  const int size = 1;
  std::map<std::string, Block>&
      notebook;  ///< of this rank; goes from the first world to the second
  int late_set = 0;
  std::vector<std::string> failures = {};  ///< of the case under way

  void fail(const std::string& text) { failures.push_back(text); }
  bool expect(bool condition, const std::string& text) {
    if (!condition) fail(text);
    return condition;
  }
  void equal(std::int64_t got, std::int64_t want, const std::string& what) {
    expect(got == want, what + " is " + std::to_string(got) + ", not " + std::to_string(want));
  }
  [[nodiscard]] std::vector<int> ranks_of(SetKind set) const {
    return contract::ranks_of(set, size);
  }
  [[nodiscard]] int id_of(SetKind set) const {
    return set == SetKind::Global ? 0 : set == SetKind::Early ? 1 : late_set;
  }
  [[nodiscard]] bool is_in(SetKind set) const;
  /// Skips the case where no backend does it.
  void need(OpKind kind, DataType dtype = DataType::Float32, ReduceOp op = ReduceOp::Sum) const;
};

struct Case {
  std::string name;
  std::function<void(Context&)> body;
  bool of_a_product = false;  ///< one of very many alike: a sanitizer build may leave some out
};
using Cases = std::vector<Case>;

// The chapters of the suite.
void add_allreduce_cases(Cases& cases, const Setting& setting);
void add_grouped_allreduce_cases(Cases& cases, const Setting& setting);
void add_fusion_cases(Cases& cases, const Setting& setting);
void add_gather_cases(Cases& cases, const Setting& setting);
void add_broadcast_cases(Cases& cases, const Setting& setting);
void add_alltoall_cases(Cases& cases, const Setting& setting);
void add_reducescatter_cases(Cases& cases, const Setting& setting);
void add_into_cases(Cases& cases, const Setting& setting);
void add_set_cases(Cases& cases, const Setting& setting);
void add_join_cases(Cases& cases, const Setting& setting);
void add_mismatch_cases(Cases& cases, const Setting& setting);
void add_local_error_cases(Cases& cases, const Setting& setting);
void add_peer_cases(Cases& cases, const Setting& setting);
/// All that a world of this setting runs; less where its threshold is 0.
Cases all_cases(const Setting& setting);
/// A submission that is pending at shutdown() fails once. Shuts the world down; its last case.
void run_shutdown_cell(Context& context);

}  // namespace hvd::contract
