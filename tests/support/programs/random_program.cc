#include "tests/support/programs/random_program.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "tests/support/programs/expectations.h"
#include "tests/support/programs/random_call.h"

namespace hvd::test {

namespace {

using StepKind = Step::Kind;
using Steps = std::vector<Step>;

/// Draws the phases of one program.
class Builder {
 public:
  explicit Builder(std::uint64_t seed) : dice_(Random::mixed(seed) ^ seed) {
    static const std::vector<std::pair<int, int>> kWorlds{{1, 1}, {2, 1}, {2, 2}, {3, 1},
                                                          {3, 2}, {3, 3}, {4, 1}, {4, 1},
                                                          {4, 2}, {4, 3}, {7, 1}, {7, 3}};
    program_.seed = seed;
    std::tie(program_.size, program_.domains) = dice_.pick(kWorlds);
    program_.fusion_threshold =
        dice_.pick(std::vector<std::uint64_t>{0, 4096, std::uint64_t{128} << 20});
    program_.cache_capacity = dice_.pick(std::vector<std::uint32_t>{16, 32, 64, 4096, 4096});
    program_.cores = dice_.pick(std::vector<unsigned>{1, 2, 16});
    limits_.largest_group = program_.cache_capacity > 16 ? 4 : 1;
    slots_ = program_.cache_capacity > 16
                 ? std::min(24, (static_cast<int>(program_.cache_capacity) - 3) / 4 - 1)
                 : 11;
    sets_.push_back({everyone(), false});
    for (int i = dice_.below(3); i > 0; --i) {
      program_.static_sets.push_back(some_ranks());
      sets_.push_back({program_.static_sets.back(), false});
    }
  }

  Program build() {
    for (int i = dice_.between(3, 8); i > 0; --i) {
      const int what = dice_.below(13);
      if (what < 5) {
        draw_async();
      } else if (what < 7) {
        draw_in_order(1);
      } else if (what < 8) {
        draw_in_order(dice_.between(2, 3));
      } else if (what < 10) {
        draw_join();
      } else {
        draw_steady();
      }
    }
    return std::move(program_);
  }

 private:
  std::vector<int> everyone() const {
    std::vector<int> ranks(static_cast<std::size_t>(program_.size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  std::vector<int> some_ranks() {
    auto ranks = everyone();
    dice_.shuffle(ranks);
    ranks.resize(static_cast<std::size_t>(dice_.between(1, program_.size)));
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }
  int some_set() {
    while (true)
      if (const int set = dice_.one_in(2) ? 0 : dice_.below(static_cast<int>(sets_.size()));
          !sets_[static_cast<std::size_t>(set)].removed)
        return set;
  }
  const std::vector<int>& ranks_of(int set) const {
    return sets_[static_cast<std::size_t>(set)].ranks;
  }
  OpKind some_kind() {
    static const std::vector<OpKind> kKinds{
        OpKind::Allreduce, OpKind::Allreduce,     OpKind::Allreduce,
        OpKind::Allreduce, OpKind::Allgather,     OpKind::Broadcast,
        OpKind::Alltoall,  OpKind::Reducescatter, OpKind::Barrier};
    return dice_.pick(kKinds);
  }

  Phase& begin(std::string what, std::size_t threads) {
    auto& phase = program_.phases.emplace_back();
    phase.what = std::move(what);
    phase.steps.assign(static_cast<std::size_t>(program_.size), std::vector<Steps>(threads + 1));
    names_.clear();
    steady_sets_.clear();
    left_ = slots_;
    return phase;
  }
  /// Ranks that are ahead would fill a small table with the names of several phases.
  void end(Phase& phase) {
    if (program_.cache_capacity >= 4096 && dice_.one_in(2)) return;
    const std::size_t op = add(
        phase,
        draw_op(dice_, OpKind::Barrier, 0, everyone(), program_.size, "end of phase", limits_), 0);
    for (auto& steps : phase.steps) steps.back().push_back({StepKind::SubmitAndWait, op, {}, {}});
  }
  std::size_t add(Phase& phase, Op op, int set) {
    fill_expectations(op, ranks_of(set));
    phase.ops.push_back(std::move(op));
    return phase.ops.size() - 1;
  }
  /// One that no other operation of its kind has in this phase; often one of earlier phases.
  std::string name(OpKind kind, int set) {
    while (true) {
      std::string drawn =
          std::to_string(static_cast<int>(kind)) + "/" +
          std::string(
              1, static_cast<char>('a' + dice_.below(6 + static_cast<int>(names_.size()) / 2)));
      if (dice_.one_in(20)) drawn += "/fresh \"name\" " + std::to_string(dice_.next() % 1000);
      if (names_.insert({set, kind, drawn}).second) return drawn;
    }
  }
  Op draw(OpKind kind, int set, std::string called) {
    Op op = draw_op(dice_, kind, set, ranks_of(set), program_.size, std::move(called), limits_);
    if (dice_.one_in(6)) spoil(dice_, op, ranks_of(set));
    return op;
  }
  static int slots_of(const Op& op) {
    std::size_t most = 1;
    for (const auto& call : op.calls)
      if (call) most = std::max(most, call->tensors.size());
    return static_cast<int>(most);
  }
  bool take_slots(const Op& op) {
    left_ -= slots_of(op);
    return left_ >= 0;
  }
  Step refusal(int rank) {
    return draw_refusal(dice_, rank, program_.size, steady_sets_.empty() ? sets_ : steady_sets_);
  }
  StepKind waiting() { return dice_.one_in(3) ? StepKind::Poll : StepKind::Wait; }

  // ---- everything at once, in another order on each rank
  void draw_async() {
    Phase& phase = begin("async", static_cast<std::size_t>(dice_.between(1, 3)));
    for (int i = dice_.between(1, 20); i > 0; --i) {
      const int set = some_set();
      const OpKind kind = some_kind();
      Op op = draw(kind, set, dice_.one_in(4) ? "" : name(kind, set));
      if (!take_slots(op)) break;
      add(phase, std::move(op), set);
    }
    const std::size_t orderly = phase.ops.size();
    std::vector<std::pair<int, SetDraw>> changes;
    const auto orphans =
        dice_.one_in(3) ? draw_control(phase, changes) : std::vector<std::size_t>{};
    for (int rank = 0; rank < program_.size; ++rank) deal(phase, rank, orderly, orphans);
    if (dice_.one_in(3)) add_duplicate(phase, orderly);
    end(phase);
    for (auto& [id, set] : changes) {
      if (static_cast<std::size_t>(id) == sets_.size()) {
        sets_.push_back(set);
      } else {
        sets_[static_cast<std::size_t>(id)] = set;
      }
    }
  }

  /// Adds or removes a set; returns operations on a set that is removed under them, which come
  /// before the removal.
  std::vector<std::size_t> draw_control(Phase& phase,
                                        std::vector<std::pair<int, SetDraw>>& changes) {
    Call call;
    call.kind = OpKind::Control;
    call.tensors.resize(1);
    call.tensors[0].dtype = DataType::Int64;
    std::vector<std::size_t> orphans;
    const int removed = dice_.one_in(2) ? some_set() : 0;
    int id = removed;
    if (removed == 0) {
      const auto ranks = some_ranks();
      call.name = "add_process_set";
      call.tensors[0].shape.assign(ranks.begin(), ranks.end());
      id = static_cast<int>(sets_.size());
      changes.push_back({id, {ranks, false}});
    } else {
      for (const auto& one : phase.ops)
        for (const auto& other : one.calls)
          if (other && other->set == removed) return {};
      const auto& ranks = ranks_of(removed);
      call.name = "remove_process_set";
      call.root = removed;
      call.tensors[0].shape.assign(ranks.begin(), ranks.end());
      changes.push_back({removed, {ranks, true}});
      steady_sets_ = sets_;
      steady_sets_[static_cast<std::size_t>(removed)].ranks = everyone();
      for (int i = ranks.size() > 1 && slots_ > 8 ? dice_.below(3) : 0; i > 0; --i)
        orphans.push_back(draw_orphan(phase, removed));
    }
    Op op;
    op.calls.assign(static_cast<std::size_t>(program_.size), call);
    if (program_.size > 1 && removed == 0 && dice_.one_in(4)) {
      auto& shape =
          op.calls[static_cast<std::size_t>(dice_.below(program_.size))]->tensors[0].shape;
      shape = shape.size() == 1 ? Shape{0, 1} : Shape{shape[0]};
      changes.clear();
    }
    add(phase, std::move(op), 0);
    for (auto& expected : phase.ops.back().expected) expected.value = id;
    return orphans;
  }

  std::size_t draw_orphan(Phase& phase, int set) {
    const OpKind kind = some_kind();
    Op op = draw_op(dice_, kind, set, ranks_of(set), program_.size, name(kind, set), {1, false});
    op.calls[static_cast<std::size_t>(dice_.pick(ranks_of(set)))].reset();
    op.expected.assign(op.calls.size(), {});
    for (auto& expected : op.expected) {
      expected.kind = Expected::Kind::InvalidArgument;
      expected.fragments = {"process set " + std::to_string(set) + " was removed"};
    }
    phase.ops.push_back(std::move(op));
    return phase.ops.size() - 1;
  }

  /// One rank's order: unnamed operations in the program's order and from one thread, a control
  /// after its orphans.
  void deal(Phase& phase, int rank, std::size_t orderly, const std::vector<std::size_t>& orphans) {
    auto& threads = phase.steps[static_cast<std::size_t>(rank)];
    const auto own = [&](std::size_t op) -> const auto& {
      return phase.ops[op].calls[static_cast<std::size_t>(rank)];
    };
    std::vector<std::vector<std::size_t>> dealt(threads.size());
    for (std::size_t op = 0; op < orderly; ++op) {
      const auto other =
          static_cast<std::size_t>(dice_.below(static_cast<int>(threads.size()) - 1));
      if (own(op)) dealt[own(op)->name.empty() ? 0 : other].push_back(op);
    }
    for (auto& ops : dealt) dice_.shuffle(ops);
    std::vector<std::size_t> unnamed;
    std::copy_if(dealt[0].begin(), dealt[0].end(), std::back_inserter(unnamed),
                 [&](auto op) { return own(op)->name.empty(); });
    std::sort(unnamed.begin(), unnamed.end());
    auto next = unnamed.begin();
    for (auto& op : dealt[0])
      if (own(op)->name.empty()) op = *next++;
    std::vector<std::size_t> ordered;
    for (const auto op : orphans)
      if (own(op)) ordered.push_back(op);
    for (std::size_t op = orderly; op < phase.ops.size(); ++op)
      if (own(op) && own(op)->kind == OpKind::Control) ordered.push_back(op);
    const auto at = dice_.below(static_cast<int>(dealt[0].size()) + 1);
    dealt[0].insert(dealt[0].begin() + at, ordered.begin(), ordered.end());
    for (std::size_t t = 0; t < threads.size(); ++t) {
      for (const auto op : dealt[t]) {
        if (dice_.one_in(10)) threads[t].push_back(refusal(rank));
        threads[t].push_back({StepKind::Submit, op, {}, {}});
      }
      dice_.shuffle(dealt[t]);
      for (const auto op : dealt[t])
        (dice_.one_in(3) ? threads.back() : threads[t]).push_back({waiting(), op, {}, {}});
    }
  }

  /// One rank submits a name twice, while another that it needs holds back.
  void add_duplicate(Phase& phase, std::size_t orderly) {
    if (orderly == 0) return;
    const auto op = static_cast<std::size_t>(dice_.below(static_cast<int>(orderly)));
    const auto& calls = phase.ops[op].calls;
    const auto callers = std::count_if(calls.begin(), calls.end(),
                                       [](const auto& call) { return call.has_value(); });
    const auto holder = static_cast<std::size_t>(dice_.below(program_.size));
    if (callers < 2 || !calls[holder] || calls[holder]->name.empty()) return;
    for (std::size_t rank = 0; rank < calls.size(); ++rank)
      for (auto& steps : phase.steps[rank]) {
        const auto submits = [&](const Step& step) {
          return step.kind == StepKind::Submit && step.op == op;
        };
        const auto place = std::find_if(steps.begin(), steps.end(), submits);
        if (place == steps.end()) continue;
        if (rank != holder) {
          steps.insert(place, {StepKind::PassGate, op, {}, {}});
          continue;
        }
        Step twice{StepKind::Refused, op, *calls[holder], {}};
        twice.refusal.kind = Expected::Kind::DuplicateName;
        twice.refusal.fragments = {"'" + calls[holder]->name + "' is already in flight"};
        steps.erase(place);
        steps.insert(
            steps.begin(),
            {{StepKind::Submit, op, {}, {}}, std::move(twice), {StepKind::OpenGate, op, {}, {}}});
      }
  }

  // ---- one after the other, in the same order on all ranks; or so in each of several threads
  void draw_in_order(int threads) {
    Phase& phase = begin("in order", static_cast<std::size_t>(threads));
    for (int i = dice_.between(1, 12); i > 0; --i) {
      const int set = some_set();
      const OpKind kind = some_kind();
      const int thread = dice_.below(threads);
      const bool unnamed = thread == 0 && dice_.one_in(3);
      const std::string shared = std::string(1, static_cast<char>('x' + dice_.below(3))) +
                                 (threads > 1 ? std::to_string(thread) : "");
      const std::size_t op = add(phase, draw(kind, set, unnamed ? "" : shared), set);
      const bool at_once = dice_.one_in(2);
      for (const int rank : ranks_of(set)) {
        auto& steps = phase.steps[static_cast<std::size_t>(rank)][static_cast<std::size_t>(thread)];
        if (dice_.one_in(10)) steps.push_back(refusal(rank));
        if (at_once) {
          steps.push_back({StepKind::SubmitAndWait, op, {}, {}});
        } else {
          steps.push_back({StepKind::Submit, op, {}, {}});
          steps.push_back({waiting(), op, {}, {}});
        }
      }
    }
    end(phase);
  }

  // ---- the same again and again, with other values
  void draw_steady() {
    Phase& phase = begin("steady", 1);
    const int set = some_set();
    const OpKind kind = some_kind();
    const Op same = draw_steady_op(dice_, kind, set, ranks_of(set), program_.size, name(kind, set));
    for (int i = dice_.between(4, 9); i > 0; --i) {
      Op op = same;
      const auto values = dice_.next();
      for (auto& call : op.calls)
        if (call) call->value_seed = values;
      if (dice_.one_in(8)) spoil(dice_, op, ranks_of(set));
      const std::size_t index = add(phase, std::move(op), set);
      for (const int rank : ranks_of(set)) {
        auto& steps = phase.steps[static_cast<std::size_t>(rank)][0];
        if (!dice_.one_in(6)) {
          steps.push_back({StepKind::SubmitAndWait, index, {}, {}});
        } else {
          steps.push_back({StepKind::Submit, index, {}, {}});
          steps.push_back({waiting(), index, {}, {}});
        }
      }
    }
    end(phase);
  }

  // ---- ranks stop taking part one after the other
  void draw_join() {
    Phase& phase = begin("join", 1);
    const int set = some_set();
    const auto& ranks = ranks_of(set);
    const int rounds = dice_.below(7);
    std::vector<int> until(static_cast<std::size_t>(program_.size), -1);
    for (const int rank : ranks)
      until[static_cast<std::size_t>(rank)] = dice_.one_in(3) ? rounds : dice_.below(rounds + 1);
    std::map<std::pair<OpKind, std::string>, std::size_t> latest;
    std::vector<std::map<std::pair<OpKind, std::string>, std::size_t>> open(
        static_cast<std::size_t>(program_.size));
    const auto close = [&](int rank, std::pair<OpKind, std::string> key) {
      auto& mine = open[static_cast<std::size_t>(rank)];
      const auto found = mine.find(key);
      if (found == mine.end()) return;
      phase.steps[static_cast<std::size_t>(rank)][0].push_back({waiting(), found->second, {}, {}});
      mine.erase(found);
    };
    const int last_round = *std::max_element(until.begin(), until.end());
    int number = 0;
    for (int round = 0; round < last_round; ++round) {
      const OpKind kind = dice_.one_in(3) ? some_kind() : OpKind::Allreduce;
      std::string called = dice_.one_in(4)
                               ? ""
                               : std::to_string(static_cast<int>(kind)) + "/" +
                                     std::string(1, static_cast<char>('a' + dice_.below(2)));
      Op op = draw_op(dice_, kind, set, ranks, program_.size, called, limits_);
      for (const int rank : ranks)
        if (until[static_cast<std::size_t>(rank)] <= round)
          op.calls[static_cast<std::size_t>(rank)].reset();
      if (dice_.one_in(8)) spoil(dice_, op, ranks);
      const std::pair key{kind, called.empty() ? "\n" + std::to_string(number++) : called};
      const bool few = !take_slots(op);
      const std::size_t index = add(phase, std::move(op), set);
      for (const int rank : ranks) {
        if (until[static_cast<std::size_t>(rank)] <= round) continue;
        close(rank, key);
        phase.steps[static_cast<std::size_t>(rank)][0].push_back({StepKind::Submit, index, {}, {}});
        open[static_cast<std::size_t>(rank)][key] = index;
        if (few || dice_.one_in(2) ||
            (round + 1 == last_round && until[static_cast<std::size_t>(rank)] == last_round))
          close(rank, key);
      }
    }
    const bool one_last = std::count(until.begin(), until.end(), last_round) == 1 && last_round > 0;
    add_joins(phase, set,
              one_last ? std::max_element(until.begin(), until.end()) - until.begin() : -1);
    for (const int rank : ranks)
      for (const auto& [key, op] : open[static_cast<std::size_t>(rank)])
        phase.steps[static_cast<std::size_t>(rank)][1].push_back({waiting(), op, {}, {}});
    end(phase);
  }

  /// All join; meanwhile something happens in other sets.
  void add_joins(Phase& phase, int set, std::ptrdiff_t last) {
    Op op;
    op.calls.resize(static_cast<std::size_t>(program_.size));
    for (const int rank : ranks_of(set)) {
      auto& call = op.calls[static_cast<std::size_t>(rank)].emplace();
      call.kind = OpKind::Join;
      call.name = "join";
      call.set = set;
    }
    if (ranks_of(set).size() == 1) last = ranks_of(set)[0];
    const std::size_t joining = add(phase, std::move(op), set);
    if (last >= 0)
      for (auto& expected : phase.ops[joining].expected) expected.value = last;
    for (const int rank : ranks_of(set))
      phase.steps[static_cast<std::size_t>(rank)][0].push_back({StepKind::Submit, joining, {}, {}});
    if (const int other = some_set(); other != set && slots_ > 6) {
      const OpKind kind = some_kind();
      const std::size_t aside = add(phase, draw(kind, other, name(kind, other)), other);
      for (const int rank : ranks_of(other)) {
        phase.steps[static_cast<std::size_t>(rank)][0].push_back({StepKind::Submit, aside, {}, {}});
        phase.steps[static_cast<std::size_t>(rank)][1].push_back({waiting(), aside, {}, {}});
      }
    }
    for (const int rank : ranks_of(set))
      phase.steps[static_cast<std::size_t>(rank)][1].push_back({waiting(), joining, {}, {}});
  }

  Random dice_;
  Program program_;
  CallLimits limits_;
  int slots_ = 0;
  int left_ = 0;
  std::vector<SetDraw> sets_;
  std::vector<SetDraw> steady_sets_;  // what may be refused while a set is removed; empty: all
  std::set<std::tuple<int, OpKind, std::string>> names_;
};

}  // namespace

Program draw_program(std::uint64_t seed) { return Builder(seed).build(); }

std::string describe(const Program& program) {
  std::string text = "seed " + std::to_string(program.seed) + ": " + std::to_string(program.size) +
                     " ranks, " + std::to_string(program.domains) + " domains, fusion threshold " +
                     std::to_string(program.fusion_threshold) + ", capacity " +
                     std::to_string(program.cache_capacity) + ", cores " +
                     std::to_string(program.cores) + ", phases:";
  for (const auto& phase : program.phases)
    text += " " + phase.what + " (" + std::to_string(phase.ops.size()) + " operations)";
  return text;
}

}  // namespace hvd::test
