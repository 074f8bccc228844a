// The leader tree: what travels up and down it; how introductions travel between hosts: those that
// say the same as one, and always in the order in which they were said.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "hvd/negotiation/leaders/leader_tree.h"
#include "tests/support/signatures.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

constexpr int kHosts = 4;  // 0 has the children 1 and 2, and 2 has 3
constexpr int kRanksPerHost = 8;

struct Heard {
  int rank;
  SharedSignature signature;
  bool operator==(const Heard& other) const {
    return rank == other.rank && *signature == *other.signature;
  }
};

class Measuring final : public Transport {
 public:
  Measuring(std::shared_ptr<Mailboxes> mail, int domain)
      : inner_(std::move(mail), domain, kHosts) {}
  int domain() const override { return inner_.domain(); }
  int domains() const override { return kHosts; }
  void send(int to, SharedBytes message) override {
    sent.push_back({to, *message});
    inner_.send(to, std::move(message));
  }
  std::optional<Message> receive() override { return inner_.receive(); }
  std::vector<Message> sent;  // `from` is where it goes

 private:
  MailTransport inner_;
};

struct Leader {
  std::vector<Heard> heard;
  std::vector<std::string> agreed;
  std::vector<std::string> refused;
  std::vector<int> left;
  std::vector<std::string> failures;
  bool has_room = true;  // for the next batch
  std::unique_ptr<Measuring> wire;
  std::unique_ptr<LeaderTree> relay;
};

struct Tree {
  Tree() {
    std::iota(everyone.begin(), everyone.end(), 0);
    for (int host = 0; host < kHosts; ++host) {
      Leader& leader = leaders[static_cast<std::size_t>(host)];
      LeaderTreeActions actions;
      actions.introduce = [&leader](const UnitKey&, const Runs& ranks, const Signature& signature) {
        for (const Run run : ranks)
          for (int rank = run.first; rank < run.first + run.count; ++rank)
            leader.heard.push_back({rank, std::make_shared<const Signature>(signature)});
      };
      actions.agree = [&leader](const UnitKey& about, const Agreement&) {
        leader.agreed.push_back(about.name);
      };
      actions.refuse = [&leader](const UnitKey& about, int, const std::string&) {
        leader.refused.push_back(about.name);
      };
      actions.leave = [&leader](int rank) { leader.left.push_back(rank); };
      actions.fail = [&leader](const Status& status) { leader.failures.push_back(status.text()); };
      actions.cut = [&leader](int) { return leader.has_room; };
      actions.ranks_of = [this](int) { return &everyone; };
      actions.domain_of = [](int rank) { return rank / kRanksPerHost; };
      leader.wire = std::make_unique<Measuring>(mail, host);
      leader.relay = std::make_unique<LeaderTree>(*leader.wire, std::move(actions));
    }
  }
  void say(int rank, const SharedSignature& signature) {
    leaders[static_cast<std::size_t>(rank / kRanksPerHost)].relay->tell(
        {LocalEvent::Kind::Introduced, key, rank, signature, {}});
  }
  void settle() {
    for (bool any = true; any;) {
      any = false;
      for (auto& leader : leaders) any = leader.relay->advance() || any;
    }
  }
  std::size_t bytes_sent(int host) {
    std::size_t bytes = 0;
    for (const auto& message : leaders[static_cast<std::size_t>(host)].wire->sent)
      bytes += message.bytes.size();
    leaders[static_cast<std::size_t>(host)].wire->sent.clear();
    return bytes;
  }
  const UnitKey key{0, OpKind::Allreduce, "t"};
  std::vector<int> everyone = std::vector<int>(kHosts * kRanksPerHost);
  std::shared_ptr<Mailboxes> mail = std::make_shared<Mailboxes>(kHosts);
  std::vector<Leader> leaders = std::vector<Leader>(kHosts);
};

SharedSignature shaped(std::int64_t size) {
  Signature signature;
  for (int i = 0; i < 20; ++i) signature.tensors.push_back({DataType::Float32, {size}, {}});
  return std::make_shared<const Signature>(std::move(signature));
}

}  // namespace

TEST_CASE("relay: introductions that say the same travel as one") {
  Tree tree;
  const auto same = shaped(4);
  tree.say(24, same);
  tree.settle();
  const std::size_t one = tree.bytes_sent(3);
  for (const int rank : {31, 25, 27, 26, 30, 28, 29}) tree.say(rank, shaped(4));
  tree.settle();
  CHECK(tree.bytes_sent(3) == one);  // 25 to 31: one run of ranks
  for (const int host : {0, 1}) {
    CAPTURE(host);
    const auto& heard = tree.leaders[static_cast<std::size_t>(host)].heard;
    REQUIRE(heard.size() == 8);
    for (int i = 0; i < 8; ++i) CHECK(heard[static_cast<std::size_t>(i)] == Heard{24 + i, same});
  }
}

TEST_CASE(
    "relay: a rank that says something else is heard in order, and only its last word is told "
    "again") {
  Tree tree;
  const auto before = shaped(4);
  const auto after = shaped(5);
  for (const int rank : {25, 24, 26}) tree.say(rank, before);
  tree.say(25, after);
  tree.settle();
  const std::vector<Heard> expected{{24, before}, {25, before}, {26, before}, {25, after}};
  CHECK(tree.leaders[0].heard == expected);
  CHECK(tree.leaders[1].heard == expected);
  tree.say(25, before);
  tree.say(24, after);
  tree.settle();
  for (const int host : {0, 1}) {
    CAPTURE(host);
    auto& leader = tree.leaders[static_cast<std::size_t>(host)];
    leader.heard.clear();
    leader.relay->retell(tree.key);
    REQUIRE(leader.heard.size() == 3);
    std::sort(leader.heard.begin(), leader.heard.end(),
              [](const Heard& a, const Heard& b) { return a.rank < b.rank; });
    CHECK(leader.heard == std::vector<Heard>{{24, after}, {25, before}, {26, before}});
  }
}

TEST_CASE(
    "relay: what is ready does not overtake its introduction, and the largest subtree is told "
    "first") {
  Tree tree;
  for (int round = 0; round < 2; ++round) {
    for (int host = kHosts - 1; host >= 0; --host) {
      auto& relay = *tree.leaders[static_cast<std::size_t>(host)].relay;
      if (round == 0) tree.say(host * kRanksPerHost, shaped(4));
      relay.tell({LocalEvent::Kind::Ready, tree.key, -1, nullptr, {{true}, {}, -1}});
      if (host > 0) tree.settle();
    }
    tree.leaders[0].wire->sent.clear();
    tree.settle();  // throws WireError if a leader hears of what it does not know
    std::vector<int> order;
    for (const auto& message : tree.leaders[0].wire->sent) order.push_back(message.from);
    CHECK(order == std::vector<int>{2, 1});
  }
}

TEST_CASE("relay: what became ready while a cut was waited with is said as soon as there is room") {
  Tree tree;
  auto& slow = tree.leaders[3];
  slow.has_room = false;
  tree.leaders[0].relay->announce_cut(0);
  tree.settle();  // host 3 does not go on before it has room for the batch
  for (int host = 0; host < kHosts; ++host) {
    tree.say(host * kRanksPerHost, shaped(4));
    tree.leaders[static_cast<std::size_t>(host)].relay->tell(
        {LocalEvent::Kind::Ready, tree.key, -1, nullptr, {{true}, {}, -1}});
  }
  tree.settle();
  // host 3 has not heard the tensor's number, so that it cannot say that it is ready
  CHECK(tree.leaders[0].agreed.empty());
  slow.has_room = true;
  tree.settle();
  for (const auto& leader : tree.leaders) CHECK(leader.agreed == std::vector<std::string>{"t"});
}

TEST_CASE(
    "relay: a tensor that is refused between its decision and its cut is refused again where it is "
    "used after the cut") {
  Tree tree;
  const auto ready = [&](Leader& leader) {
    leader.relay->tell({LocalEvent::Kind::Ready, tree.key, -1, nullptr, {{true}, {}, -1}});
  };
  for (int host = 0; host < kHosts; ++host) tree.say(host * kRanksPerHost, shaped(4));
  tree.settle();
  for (auto& leader : tree.leaders) ready(leader);
  tree.settle();
  for (const auto& leader : tree.leaders) REQUIRE(leader.agreed.size() == 1);
  constexpr int kFirst = kRanksPerHost;  // of host 1
  tree.leaders[1].relay->tell({LocalEvent::Kind::Left, {}, kFirst});
  tree.settle();
  Leader& uncut = tree.leaders[3];
  // by a rank that has not read the decision yet
  uncut.relay->tell({LocalEvent::Kind::Doubted, tree.key});
  tree.settle();
  for (const auto& leader : tree.leaders) REQUIRE(leader.refused.size() == 1);
  // Host 3 could not give up what was still to be cut. Its ranks come back without introducing it,
  // and then another one leaves.
  ready(uncut);
  uncut.relay->tell({LocalEvent::Kind::Doubted, tree.key});
  uncut.relay->tell({LocalEvent::Kind::Left, {}, 3 * kRanksPerHost});
  tree.settle();
  for (const auto& leader : tree.leaders) CHECK(leader.refused.size() == 2);
  CHECK(tree.leaders[0].left == std::vector<int>{kFirst, 3 * kRanksPerHost});
}

TEST_CASE(
    "relay: ranks that wait for one another are found when their domains have said so, unless one "
    "waits no more") {
  Tree tree;
  const auto blocked = [&](int host, const std::string& name) {
    const UnitKey waits{0, OpKind::Allreduce, name};
    const int rank = host * kRanksPerHost;
    auto& relay = *tree.leaders[static_cast<std::size_t>(host)].relay;
    relay.tell({LocalEvent::Kind::Introduced, waits, rank, shaped(4), {}});
    tree.settle();
    relay.blocked({host, {{rank, {waits}, {waits}}}, {}});
    tree.settle();
  };
  blocked(kHosts - 1, "q");
  blocked(0, "q");  // the other ranks compute
  tree.leaders[kHosts - 1].relay->blocked({kHosts - 1, {}, {}});
  tree.settle();
  blocked(0, "p");
  for (const auto& leader : tree.leaders) CHECK(leader.refused.empty());
  blocked(kHosts - 1, "q");
  blocked(0, "p");
  // there may be more of them in a moment
  for (const auto& leader : tree.leaders) CHECK(leader.refused.empty());
  blocked(0, "p");
  for (const auto& leader : tree.leaders)
    CHECK(leader.refused == std::vector<std::string>{"p", "q"});
  for (int i = 0; i < 2; ++i) blocked(0, "p");  // what was said before is out of date
  for (const auto& leader : tree.leaders) CHECK(leader.refused.size() == 2);
}

TEST_CASE(
    "the leader tree: a failure reaches all leaders at once, also where those between them do "
    "nothing, and each once") {
  Tree tree;
  const auto failures = [&](int host) {
    return tree.leaders[static_cast<std::size_t>(host)].failures;
  };
  auto& failing = *tree.leaders[3].relay;  // whose words would go by 2 and 0
  failing.failed({Status::Code::RankFailed, "why"});
  failing.failed({Status::Code::RankFailed, "what comes of it"});
  failing.advance();
  tree.leaders[1].relay->advance();
  CHECK(failures(1) == std::vector<std::string>{"why"});
  tree.settle();
  for (const int host : {0, 1, 2}) CHECK(failures(host) == std::vector<std::string>{"why"});
  CHECK(failures(3).empty());
}

TEST_CASE("the leader tree: all have left once nobody of them has messages pending") {
  Tree tree;
  const auto lingers = [&](int host, int change) {
    tree.leaders[static_cast<std::size_t>(host)].relay->tell(
        {LocalEvent::Kind::Lingering, {}, -1, nullptr, {}, {}, change});
  };
  LeaderTree& root = *tree.leaders[0].relay;
  for (int host = 0; host < kHosts; ++host) lingers(host, 1);
  for (const int rank : tree.everyone)
    tree.leaders[static_cast<std::size_t>(rank / kRanksPerHost)].relay->tell(
        {LocalEvent::Kind::Left, {}, rank});
  tree.settle();
  for (int host = kHosts - 1; host >= 0; --host) {
    CHECK_FALSE(root.all_left());
    lingers(host, -1);
    tree.settle();
  }
  CHECK(root.all_left());
  for (const int change : {-1, 0, 2}) CHECK_THROWS_AS(lingers(0, change), WireError);
}

TEST_CASE("the leader tree: 2 to 9 domains agree, whoever is ready first") {
  for (int domains = 2; domains <= 9; ++domains) {
    CAPTURE(domains);
    auto mail = std::make_shared<Mailboxes>(domains);
    struct Leader {
      std::unique_ptr<MailTransport> transport;
      std::unique_ptr<LeaderTree> relay;
      std::map<std::string, int> introduced;
      std::vector<std::string> agreed;
      int cuts = 0;
      int ends = 0;
      std::vector<std::string> conflicts;
      std::vector<bool> present;
      std::vector<int> absent;
      std::vector<int> left;
    };
    std::vector<int> all(static_cast<std::size_t>(domains));
    std::iota(all.begin(), all.end(), 0);
    std::vector<Leader> leaders(static_cast<std::size_t>(domains));
    for (int d = 0; d < domains; ++d) {
      Leader& leader = leaders[static_cast<std::size_t>(d)];
      leader.transport = std::make_unique<MailTransport>(mail, d, domains);
      LeaderTreeActions actions;
      actions.introduce = [&leader](const UnitKey& key, const Runs& ranks, const Signature&) {
        for (const Run run : ranks) leader.introduced[key.name] += run.count;
      };
      actions.agree = [&leader](const UnitKey& key, const Agreement& what) {
        leader.agreed.push_back(key.name);
        leader.present = what.present;
        leader.absent = what.absent;
      };
      actions.end = [&leader] { ++leader.ends; };
      actions.conflict = [&leader](int, const std::string& name, const std::vector<StuckRank>&) {
        leader.conflicts.push_back(name);
      };
      actions.credit = [](int, int, std::uint64_t) {};
      actions.cut = [&leader](int) { return ++leader.cuts > 0; };
      actions.refuse = [](const UnitKey&, int, const std::string&) {};
      actions.leave = [&leader](int rank) { leader.left.push_back(rank); };
      actions.fail = [](const Status&) {};
      actions.drop = [](const UnitKey&) { return true; };
      actions.ranks_of = [&all](int) { return &all; };
      actions.domain_of = [](int rank) { return rank; };
      leader.relay = std::make_unique<LeaderTree>(*leader.transport, std::move(actions));
    }
    const auto settle = [&] {
      for (bool any = true; any;) {
        any = false;
        for (auto& leader : leaders) any = leader.relay->advance() || any;
      }
    };
    const Signature signature = signature_of(DataType::Float32, {4});
    for (int round = 0; round < 2; ++round)
      for (int d = domains - 1; d >= 0; --d) {
        auto& relay = *leaders[static_cast<std::size_t>(d)].relay;
        const UnitKey key{0, OpKind::Allreduce, "t"};
        if (round == 0)
          relay.tell(
              {LocalEvent::Kind::Introduced, key, d, std::make_shared<const Signature>(signature)});
        relay.tell({LocalEvent::Kind::Ready, key, -1, nullptr, {{d == 1}, {}, -1}});
        settle();
        CHECK(leaders[0].agreed.size() == static_cast<std::size_t>(d == 0 ? round + 1 : round));
      }
    // One rank joins: it is waited for no more, whether it does so before the others are ready or
    // after.
    const UnitKey key{0, OpKind::Allreduce, "t"};
    for (const bool before : {true, false}) {
      if (before) leaders[1].relay->tell({LocalEvent::Kind::Joined, {0, OpKind::Join, {}}, 1});
      for (int d = 0; d < domains; ++d)
        if (d != 1)
          leaders[static_cast<std::size_t>(d)].relay->tell(
              {LocalEvent::Kind::Ready, key, -1, nullptr, {{true}, {}, -1}});
      settle();
      CHECK(leaders[0].agreed.size() == (before ? 3 : 4));
      CHECK(leaders[0].absent == std::vector<int>{1});
    }
    // Ranks that wait for different operations under one name: found when all have said so. What
    // was said before a decision is stale.
    const auto stuck_rank = [&](int d, OpKind kind) {
      leaders[static_cast<std::size_t>(d)].relay->stuck(0, "x", {{d, kind}});
    };
    for (int d = 0; d < domains; ++d) {
      settle();
      CHECK(leaders[0].conflicts.empty());
      stuck_rank(d, d == 1 ? OpKind::Broadcast : OpKind::Allreduce);
    }
    settle();
    for (const auto& leader : leaders) CHECK(leader.conflicts == std::vector<std::string>{"x"});
    leaders[0].relay->announce_cut(0);
    for (int d = 0; d < domains; ++d) {
      CHECK_FALSE(leaders[0].relay->all_left());
      leaders[static_cast<std::size_t>(d)].relay->tell({LocalEvent::Kind::Left, {}, d});
      settle();
    }
    CHECK(leaders[0].relay->all_left());
    leaders[0].relay->announce_end();
    settle();
    for (int d = 0; d < domains; ++d) {
      const Leader& leader = leaders[static_cast<std::size_t>(d)];
      CHECK(leader.agreed == std::vector<std::string>{"t", "t", "t", "t"});
      CHECK(leader.present == std::vector<bool>{true});
      CHECK(leader.cuts == (d == 0 ? 0 : 1));
      CHECK(leader.introduced.at("t") >= domains - 1);  // of all other domains' ranks
      CHECK(leader.left.size() == static_cast<std::size_t>(domains - 1));
      CHECK(leader.ends == (d == 0 ? 0 : 1));
    }
  }
}

}  // namespace hvd::test
