// LeaderTree: messages from neighbours, at the root and at a leader that has both a parent and a
// child.
#include <deque>

#include "hvd/negotiation/leaders/leader_tree.h"
#include "tests/fuzz/fuzz_examples.h"
#include "tests/fuzz/fuzz_support.h"

namespace hvd::fuzz {

namespace {

constexpr int kDomains = 4;  // 0 has the children 1 and 2, and 2 has 3

class Line final : public Transport {
 public:
  explicit Line(int domain) : domain_(domain) {}
  int domain() const override { return domain_; }
  int domains() const override { return kDomains; }
  void send(int to, SharedBytes message) override { sent.push_back({to, *message}); }
  std::optional<Message> receive() override {
    if (coming.empty()) return std::nullopt;
    Message message = std::move(coming.front());
    coming.pop_front();
    return message;
  }
  std::deque<Message> coming;
  std::vector<Message> sent;  // `from` is where it goes

 private:
  int domain_;
};

struct Leader {
  explicit Leader(int domain) : line(domain) {
    LeaderTreeActions actions;
    actions.introduce = [](const UnitKey&, const Runs&, const Signature&) {};
    actions.agree = [](const UnitKey&, const Agreement&) {};
    actions.end = [] {};
    actions.cut = [this](int) { return ++cuts_asked % 3 != 0; };  // sometimes there is no room
    actions.credit = [](int, int, std::uint64_t) {};
    actions.conflict = [](int, const std::string&, const std::vector<StuckRank>&) {};
    actions.refuse = [](const UnitKey&, int, const std::string&) {};
    actions.leave = [](int) {};
    actions.fail = [](const Status&) {};
    // sometimes it is in use
    actions.drop = [this](const UnitKey&) { return ++drops_asked % 3 != 0; };
    actions.ranks_of = [this](int set) -> const std::vector<int>* {
      if (set < 0 || set > 2) throw WireError("unknown process set");
      return set == 0 ? &everyone : set == 1 ? &some : nullptr;  // 2 was removed
    };
    actions.domain_of = [](int rank) { return rank; };
    relay = std::make_unique<LeaderTree>(line, std::move(actions), 2);
  }
  std::vector<int> everyone{0, 1, 2, 3}, some{1, 3};
  Line line;
  std::unique_ptr<LeaderTree> relay;
  int cuts_asked = 0;
  int drops_asked = 0;
};

void talk(test::Random& random, LeaderTree& relay, int domain, const UnitKey& key) {
  const auto said = std::make_shared<const Signature>(signature(random, key.kind, 4));
  relay.tell({LocalEvent::Kind::Introduced, key, domain, said});
  if (key.kind == OpKind::Join || random.one_in(4))
    relay.tell({LocalEvent::Kind::Joined, {key.process_set, OpKind::Join, {}}, domain});
  if (!random.one_in(4)) relay.tell({LocalEvent::Kind::Ready, key, -1, nullptr, agreement(random)});
  if (random.one_in(4))
    relay.tell({LocalEvent::Kind::Left,
                {},
                domain,
                nullptr,
                {},
                random.one_in(2) ? Pledges{{key, 1}} : Pledges{}});
  if (random.one_in(8)) relay.tell({LocalEvent::Kind::Lingering, {}, -1, nullptr, {}, {}, 1});
  if (random.one_in(4)) relay.tell({LocalEvent::Kind::Doubted, key});
  if (random.one_in(4)) relay.blocked({domain, {{domain, {key}, {key}}}, {}});
  if (random.one_in(8)) relay.failed({Status::Code::RankFailed, "rank 3 died"});
}

}  // namespace

/// What one of the leaders hears while all of them talk.
Bytes example(test::Random& random) {
  std::vector<std::unique_ptr<Leader>> leaders;
  for (int d = 0; d < kDomains; ++d) leaders.push_back(std::make_unique<Leader>(d));
  const int listener = random.one_in(2) ? 0 : 2;
  Writer writer;
  writer.put(static_cast<std::uint8_t>(listener == 0 ? 0 : 1));
  const auto deliver = [&] {
    for (auto& leader : leaders) {
      leader->relay->advance();
      for (auto& message : std::exchange(leader->line.sent, {})) {
        if (message.from == listener)
          writer.put(static_cast<std::uint8_t>(leader->line.domain())).put_bytes(message.bytes);
        leaders[static_cast<std::size_t>(message.from)]->line.coming.push_back(
            {leader->line.domain(), message.bytes});
      }
    }
  };
  try {
    for (int i = random.between(1, 3); i > 0; --i) {
      const UnitKey about = key(random, 1);
      for (int d = 0; d < kDomains; ++d)
        talk(random, *leaders[static_cast<std::size_t>(d)]->relay, d, about);
      if (random.one_in(3)) leaders[0]->relay->announce_cut(0);
      for (int round = 0; round < 5; ++round) deliver();
    }
  } catch (const WireError&) {  // as good an example as any
  }
  return writer.take();
}

void take(Reader& input) {
  const int domain = input.get<std::uint8_t>() % 2 == 0 ? 0 : 2;
  Leader leader(domain);
  const std::vector<int> neighbours = domain == 0 ? std::vector<int>{1, 2} : std::vector<int>{0, 3};
  test::Random random(1);
  for (int messages = 0; !input.at_end() && messages < 200; ++messages) {
    const auto from = static_cast<int>(input.get<std::uint8_t>());
    // this domain has something to say itself
    if (std::find(neighbours.begin(), neighbours.end(), from) == neighbours.end()) {
      talk(random, *leader.relay, domain, key(random, 1));
      leader.relay->advance();
      continue;
    }
    leader.line.coming.push_back({from, input.get_bytes()});
    leader.relay->advance();
    leader.line.sent.clear();
    if (leader.relay->is_root()) static_cast<void>(leader.relay->all_left());
  }
}

}  // namespace hvd::fuzz
