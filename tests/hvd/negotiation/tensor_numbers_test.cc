// Numbers that leaders give up and that come back, with messages that arrive at any time: what is
// decided is the same everywhere, and each domain knows then what all ranks have said.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "hvd/negotiation/leaders/leader_tree.h"
#include "tests/support/random.h"
#include "tests/support/sanitized.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

constexpr std::size_t kCapacity = 6;
constexpr int kNames = 40;

/// A domain of one rank, and a table that forgets what the root asks it to, and now and then more.
class Domain {
 public:
  Domain(const std::shared_ptr<Mailboxes>& mail, int self, int domains)
      : self_(self), wire_(mail, self, domains), everyone_(static_cast<std::size_t>(domains)) {
    std::iota(everyone_.begin(), everyone_.end(), 0);
    LeaderTreeActions actions;
    actions.introduce = [this](const UnitKey& key, const Runs& ranks, const Signature& signature) {
      hear(key, ranks, signature);
    };
    actions.agree = [this](const UnitKey& key, const Agreement&) { agree(key); };
    actions.drop = [this](const UnitKey& key) { return forget(key); };
    actions.ranks_of = [this](int) { return &everyone_; };
    actions.domain_of = [](int rank) { return rank; };
    tree = std::make_unique<LeaderTree>(wire_, std::move(actions), kCapacity);
  }

  [[nodiscard]] bool waits_for(const UnitKey& key) const { return waiting_.contains(key); }
  [[nodiscard]] std::size_t rounds(const UnitKey& key) const {
    return rounds_.contains(key) ? rounds_.at(key) : 0;
  }
  /// The rank submits the tensor, with another shape than the last time where it likes.
  void submit(const UnitKey& key, std::int64_t size) {
    Signature signature;
    signature.tensors.push_back({DataType::Float32, {size}, {}});
    const auto known = table_.find(key);
    if (known == table_.end() || !known->second.contains(self_) ||
        known->second.at(self_) != size) {
      tree->tell({LocalEvent::Kind::Introduced,
                  key,
                  self_,
                  std::make_shared<const Signature>(signature),
                  {}});
      table_[key][self_] = size;
    }
    waiting_.insert(key);
    tree->tell({LocalEvent::Kind::Ready, key, -1, nullptr, {{true}, {}, -1}});
  }
  /// As an eviction for want of slots does. Returns false if the tensor is in use.
  bool forget(const UnitKey& key) {
    if (waiting_.contains(key)) return false;
    table_.erase(key);
    return true;
  }

  std::unique_ptr<LeaderTree> tree;
  std::vector<UnitKey> agreed;  ///< in order
  std::map<UnitKey, std::map<int, std::int64_t>>
      agreed_on;  ///< what all ranks had said at the last agreement
  bool knew_all = true;

 private:
  void hear(const UnitKey& key, const Runs& ranks, const Signature& signature) {
    for (const Run run : ranks)
      for (int rank = run.first; rank < run.first + run.count; ++rank)
        if (rank != self_) table_[key][rank] = signature.tensors.front().shape.front();
  }
  void agree(const UnitKey& key) {
    // A table that has forgotten in the middle of the introductions asks for them again, as the
    // controller does.
    if (table_[key].size() < everyone_.size()) tree->retell(key);
    knew_all = knew_all && table_[key].size() == everyone_.size() && waiting_.contains(key);
    agreed.push_back(key);
    agreed_on[key] = table_[key];
    waiting_.erase(key);
    ++rounds_[key];
  }

  int self_;
  MailTransport wire_;
  std::vector<int> everyone_;
  std::map<UnitKey, std::map<int, std::int64_t>> table_;  ///< what each rank has said
  std::set<UnitKey> waiting_;
  std::map<UnitKey, std::size_t> rounds_;
};

struct World {
  World(int domains, unsigned long seed)
      : random(seed), mail(std::make_shared<Mailboxes>(domains)) {
    for (int domain = 0; domain < domains; ++domain)
      all.push_back(std::make_unique<Domain>(mail, domain, domains));
  }
  Domain& any() {
    return *all[static_cast<std::size_t>(random.between(0, static_cast<int>(all.size()) - 1))];
  }
  /// No rank may be two rounds ahead of another, as it waits in between.
  void submit_something(std::size_t rounds) {
    const UnitKey key{
        0, OpKind::Allreduce,
        std::to_string(random.one_in(3) ? random.between(0, 3) : random.between(0, kNames - 1))};
    Domain& domain = any();
    if (!domain.waits_for(key) && domain.rounds(key) < rounds)
      domain.submit(key, random.one_in(8) ? 2 : 1);
  }
  void settle() {
    for (bool moved = true; moved;) {
      moved = false;
      for (auto& domain : all) moved = domain->tree->advance() || moved;
    }
  }
  Random random;
  std::shared_ptr<Mailboxes> mail;
  std::vector<std::unique_ptr<Domain>> all;
};

}  // namespace

TEST_CASE("numbers of tensors that are given up come back, whenever messages arrive") {
  // one thread: there is nothing for ThreadSanitizer to find
  constexpr unsigned long kSeeds = kThreadSanitizer ? 2 : kSanitized ? 15 : 60;
  for (unsigned long seed = 1; seed <= kSeeds; ++seed) {
    CAPTURE(seed);
    World world(2 + static_cast<int>(seed % 7), seed);
    std::size_t most_kept = 0;
    for (std::size_t step = 0; step < 20'000; ++step) {
      if (world.random.one_in(3)) world.submit_something(1 + step / 500);
      if (world.random.one_in(40))
        static_cast<void>(world.any().forget(
            {0, OpKind::Allreduce, std::to_string(world.random.between(0, kNames - 1))}));
      world.any().tree->advance();
      most_kept = std::max(most_kept, world.all.front()->tree->tensors_kept());
    }
    // Now all ranks submit what is missing of what others wait for.
    world.settle();
    for (int name = 0; name < kNames; ++name) {
      const UnitKey key{0, OpKind::Allreduce, std::to_string(name)};
      std::size_t rounds = 0;
      for (auto& domain : world.all)
        rounds = std::max(rounds, domain->rounds(key) + (domain->waits_for(key) ? 1 : 0));
      for (auto& domain : world.all)
        if (domain->rounds(key) < rounds && !domain->waits_for(key)) domain->submit(key, 1);
      world.settle();
    }
    const Domain& first = *world.all.front();
    CHECK(first.agreed.size() > 200);
    for (const auto& domain : world.all) {
      CHECK(domain->knew_all);
      CHECK(domain->agreed == first.agreed);
      CHECK(domain->agreed_on == first.agreed_on);
      CHECK_FALSE(domain->tree->is_waiting());
    }
    CHECK(most_kept <= kNames);
    CHECK(first.tree->tensors_kept() < kNames);
  }
}

}  // namespace hvd::test
