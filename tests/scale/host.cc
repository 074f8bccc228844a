#include "tests/scale/host.h"

#include <algorithm>
#include <stdexcept>

#include "tests/scale/simulation.h"

namespace scale {

namespace {

constexpr std::size_t kRemembered = std::size_t{1} << 20;  // more tensors than any program here has

}  // namespace

Host::Host(const World& world, const Program& program,
           const std::unordered_map<std::string, std::size_t>& index_of, int number, Table& table,
           Wires wires)
    : world_(world),
      program_(program),
      index_of_(index_of),
      number_(number),
      table_(table),
      wires_(std::move(wires)),
      units_(program.units.size(),
             {0, std::vector<bool>(static_cast<std::size_t>(world.ranks)), 0}) {
  leader_tree_ = std::make_unique<hvd::LeaderTree>(*this, actions(), kRemembered);
}

hvd::LeaderTreeActions Host::actions() {
  hvd::LeaderTreeActions actions;
  actions.introduce = [this](const hvd::UnitKey& key, const hvd::Runs& ranks,
                             const hvd::Signature&) {
    for (const auto [first, count] : ranks)
      for (int rank = first; rank < first + count; ++rank)
        if (world_.host_of(rank) != number_) introduce(key, rank);
  };
  actions.agree = [this](const hvd::UnitKey& key, const hvd::Agreement& what) { agree(key, what); };
  actions.cut = [this](int /*process_set*/) {
    cut();
    return true;
  };
  actions.refuse = [](const hvd::UnitKey& key, int, const std::string&) {
    throw std::logic_error("nobody leaves, but " + key.name + " was refused");
  };
  actions.leave = [](int) {};
  actions.end = [] {};
  actions.conflict = [](int, const std::string& name, const std::vector<hvd::StuckRank>&) {
    throw std::logic_error("a conflict about " + name);
  };
  actions.fail = [](const hvd::Status& status) { throw std::logic_error(status.text()); };
  actions.drop = [](const hvd::UnitKey&) { return false; };
  actions.ranks_of = [this](int set) { return &table_.negotiator().sets().info(set).ranks; };
  actions.domain_of = [this](int rank) { return world_.host_of(rank); };
  return actions;
}

int Host::domains() const { return world_.hosts(); }

Time Host::relay_took() const { return processor_time() - began_ - not_relay_; }

Time Host::now() const {
  return driven_at_ + (world_.charge_measured ? relay_took() + table_took_ : messages_took_);
}

template <class Call>
auto Host::aside(const Call& call) {
  struct Clock {
    Time& total;
    Time since = processor_time();
    ~Clock() { total += processor_time() - since; }
  } clock{not_relay_};
  return call();
}

void Host::send(int to, hvd::SharedBytes message) {
  messages_took_ += world_.per_message;
  const bool up = to < number_;
  ++(up ? step_.traffic.up_messages : step_.traffic.down_messages);
  (up ? step_.traffic.up_bytes : step_.traffic.down_bytes) += message->size();
  const Time leaves = now();
  aside([&] { wires_.send(to, {leaves, 0, depth_ + 1, {number_, *message}}); });
}

std::optional<hvd::Message> Host::receive() {
  if (inbox_.empty() || inbox_.top().arrival > driven_at_) return std::nullopt;
  Letter letter = inbox_.top();
  inbox_.pop();
  messages_took_ += world_.per_message;
  depth_ = std::max(depth_, letter.depth);
  ++step_.traffic.received_messages;
  step_.traffic.received_bytes += letter.message.bytes.size();
  return std::move(letter.message);
}

std::optional<Time> Host::next_work() const {
  if (!local_events_.empty()) return busy_until_;
  if (!inbox_.empty()) return std::max(busy_until_, inbox_.top().arrival);
  return std::nullopt;
}

void Host::charge_table(Time took) {
  step_.table_took += took;
  table_took_ += took;
}

bool Host::submit(int rank, std::size_t index) {
  const Unit& unit = program_.units[index];
  Arrivals& arrivals = units_[index];
  if (!arrivals.introduced[static_cast<std::size_t>(rank)]) {
    arrivals.introduced[static_cast<std::size_t>(rank)] = true;
    ++arrivals.introductions;
    const Time took = table_.introduce(unit, index, rank);
    step_.table_took += took;
    log_took_ += took;
    local_events_.push_back(
        {hvd::LocalEvent::Kind::Introduced, unit.key, rank, unit.signature, {}});
  }
  if (++arrivals.submitted < world_.ranks_on(number_)) return false;
  arrivals.submitted = 0;
  auto [what, took] = table_.ready(unit, rank);
  step_.table_took += took;
  log_took_ += took;
  local_events_.push_back({hvd::LocalEvent::Kind::Ready, unit.key, -1, nullptr, std::move(what)});
  return true;
}

/// What hvd::Engine::drive_leader_tree does.
void Host::drive(Time now) {
  driven_at_ = now;
  messages_took_ = Time(0);
  not_relay_ = Time(0);
  table_took_ = std::exchange(log_took_, Time(0));
  began_ = processor_time();
  for (auto& news : std::exchange(local_events_, {})) leader_tree_->tell(std::move(news));
  if (is_root()) {
    leader_tree_->hear();
  } else {
    leader_tree_->advance();
  }
  if (is_root() && open_batches_ == 0 &&
      table_.negotiator().agreed().has(table_.negotiator().sets().scope_of(0))) {
    leader_tree_->announce_cut(0);
    cut();
  }
  leader_tree_->advance();
  const Time took = relay_took();
  step_.relay_took += took;
  busy_until_ = now + (world_.charge_measured ? took + table_took_ : messages_took_);
}

void Host::introduce(const hvd::UnitKey& key, int rank) {
  const std::size_t index = index_of_.at(key.name);
  Arrivals& arrivals = units_[index];
  auto known = arrivals.introduced[static_cast<std::size_t>(rank)];
  if (known) return;
  known = true;
  ++arrivals.introductions;
  // without a look at the clock, which takes longer
  if (table_.knows(index, rank)) return charge_table(table_.introduction_took());
  charge_table(aside([&] { return table_.introduce(program_.units[index], index, rank); }));
}

void Host::agree(const hvd::UnitKey& key, const hvd::Agreement& what) {
  if (units_[index_of_.at(key.name)].introductions != world_.ranks)
    throw std::logic_error(key.name + " was agreed before all introductions of it had come");
  charge_table(aside([&] {
    const hvd::Unit* unit = table_.negotiator().find(key);
    if (unit == nullptr) throw std::logic_error("an agreement about an unknown tensor");
    return table_.decide(decided_++, hvd::Negotiator::agreement(unit->id, what)).took;
  }));
}

void Host::cut() {
  const auto* decision = aside([&] { return &table_.decide_cut(decided_++); });
  charge_table(decision->took);
  if (is_root()) open_batches_ += decision->batches.size();
  const Time cut_at = now();
  aside([&] {
    for (const auto& batch : decision->batches) wires_.launch(batch, cut_at);
  });
}

}  // namespace scale
