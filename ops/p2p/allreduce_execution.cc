#include "ops/p2p/allreduce_execution.h"

#include <cstring>
#include <utility>

#include "hvd/routes.h"

namespace hvd {

namespace {

// Of messages: buffers, no choice of a way.
constexpr std::size_t kLeastPartBytes = 64 << 10;
constexpr std::size_t kMostPartBytes = 256 << 10;
constexpr std::size_t kRoundBytes = 8 << 20;
constexpr std::size_t kUnit = 16;  // elements, as in `share`
constexpr unsigned kContribution = 0;
constexpr unsigned kResult = 1;

std::size_t rounded_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

AllreduceExecution::AllreduceExecution(P2pContext& context, Batch batch)
    : ReducingExecution(context, std::move(batch)), all_(all_elements(batch_)), own_inputs_(arrays(who_.self_domain)) {
  const auto by_size = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  const auto fewest = std::min_element(who_.domains.begin(), who_.domains.end(), by_size);
  const std::size_t others = who_.domains.size() - 1;
  small_ = routes::is_one_step(all_.flat.size() * element_ * (plan_.raw ? plan_.most_ranks : 1), who_.domains.size());
  owners_ = small_ ? 1 : fewest->size();
  owner_ = who_.self_place < owners_;
  if (!owner_) return;
  slice_ = share({0, all_.flat.size()}, owners_, who_.self_place);
  // Each begins with another one, so that not all send to the same.
  for (std::size_t i = 1; i <= others; ++i) {
    const std::size_t domain = (who_.self_domain + i) % who_.domains.size();
    const auto& ranks = who_.domains[domain];
    peers_.push_back({domain, ranks[who_.self_place], arrays(domain)});
  }
  plan_rounds();
}

void AllreduceExecution::plan_rounds() {
  const std::size_t domains = who_.domains.size();
  const std::size_t bytes = std::clamp(kRoundBytes / (domains * (plan_.raw ? plan_.most_ranks : 1)), kLeastPartBytes, kMostPartBytes);
  // No more than the slice needs, so that buffers of small batches are small.
  part_elements_ =
      std::min(rounded_up(bytes / element_, kUnit), rounded_up(small_ ? slice_.size() : (slice_.size() + domains - 1) / domains, kUnit));
  const std::size_t elements = part_elements_ * (small_ ? 1 : domains);
  if (elements > 0) rounds_ = (slice_.size() + elements - 1) / elements;
}

AllreduceExecution::Slot AllreduceExecution::make_slot() {
  const std::size_t bytes = part_elements_ * element_;
  Slot slot;
  if (peers_.empty()) return slot;
  const std::size_t contributions = small_ ? 1 : peers_.size();
  std::size_t total = contributions * own_inputs_ * bytes;
  if (!plan_.raw) total += bytes;
  if (!small_) total += bytes + peers_.size() * bytes;
  for (const Peer& peer : peers_) total += peer.inputs * bytes;
  auto rest = requests_.buffer(total);
  const auto cut = [&](std::size_t size) {
    const auto piece = rest.first(size);
    rest = rest.subspan(size);
    return piece;
  };
  slot.outgoing = cut(contributions * own_inputs_ * bytes);
  if (!plan_.raw) slot.own = cut(bytes);
  if (!small_) slot.result = cut(bytes);
  for (const Peer& peer : peers_) {
    slot.inputs.push_back(cut(peer.inputs * bytes));
    if (!small_) slot.parts.push_back(cut(bytes));
  }
  return slot;
}

Range AllreduceExecution::round(std::size_t number) const {
  const std::size_t elements = part_elements_ * (small_ ? 1 : who_.domains.size());
  const std::size_t begin = slice_.begin + number * elements;
  return {begin, std::min(begin + elements, slice_.end)};
}

Range AllreduceExecution::part(std::size_t number, std::size_t domain) const {
  return small_ ? round(number) : share(round(number), who_.domains.size(), domain);
}

void AllreduceExecution::start(std::size_t number) {
  while (slots_made_ <= number && slots_made_ < kWindow) slots_[slots_made_++] = make_slot();
  Slot& slot = slots_[number % kWindow];
  const Range mine = part(number, who_.self_domain);
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const Peer& peer = peers_[i];
    const Range theirs = part(number, peer.domain);
    if (mine.size() > 0)
      requests_.receive(slot.inputs[i].first(peer.inputs * mine.size() * element_), peer.rank, context_.tag(batch_, kContribution),
                        slot.awaited_inputs);
    if (!small_ && theirs.size() > 0)
      requests_.receive(slot.parts[i].first(theirs.size() * element_), peer.rank, context_.tag(batch_, kResult), slot.awaited_parts);
  }
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const Range theirs = part(number, peers_[i].domain);
    if (theirs.size() == 0) continue;
    const std::size_t bytes = own_inputs_ * theirs.size() * element_;
    if (small_) {
      if (i == 0) contribute(all_, theirs, slot.outgoing.data());
      // Nothing will come back that says it has arrived. A leader looks for messages every 10 ms at least, so what waits in this process
      // leaves it; it need not wait for the other side.
      const auto outgoing = slot.outgoing.first(bytes);
      const int tag = context_.tag(batch_, kContribution);
      if (context_.leads()) {
        requests_.send(outgoing, peers_[i].rank, tag, slot.sending);
      } else {
        requests_.send_synchronously(outgoing, peers_[i].rank, tag, slot.sending);
      }
    } else {
      const auto outgoing = slot.outgoing.subspan(i * own_inputs_ * part_elements_ * element_, bytes);
      contribute(all_, theirs, outgoing.data());
      requests_.send(outgoing, peers_[i].rank, context_.tag(batch_, kContribution), slot.sending);
    }
  }
  if (!plan_.raw) contribute(all_, mine, slot.own.data());
}

void AllreduceExecution::combine(std::size_t number) {
  Slot& slot = slots_[number % kWindow];
  const Range mine = part(number, who_.self_domain);
  from_.assign(who_.domains.size(), slot.own.data());
  for (std::size_t i = 0; i < peers_.size(); ++i) from_[peers_[i].domain] = slot.inputs[i].data();
  ReducingExecution::combine(all_, mine, from_, [&](const BatchMember& member, std::size_t first, std::size_t before) {
    for (std::size_t place = 0; place < ranks_here(); ++place) out_.push_back(output(member, place) + first * element_);
    if (!slot.result.empty()) out_.push_back(slot.result.data() + before * element_);
  });
  if (small_ || mine.size() == 0) return;
  for (const Peer& peer : peers_)
    requests_.send_synchronously(slot.result.first(mine.size() * element_), peer.rank, context_.tag(batch_, kResult), slot.sending);
}

void AllreduceExecution::scatter(std::size_t number) {
  if (small_) return;
  const Slot& slot = slots_[number % kWindow];
  for (std::size_t i = 0; i < peers_.size(); ++i)
    all_.flat.each(part(number, peers_[i].domain), [&](std::size_t index, std::size_t first, std::size_t count, std::size_t before) {
      for (std::size_t place = 0; place < ranks_here(); ++place)
        std::memcpy(output(batch_.members[index], place) + first * element_, slot.parts[i].data() + before * element_, count * element_);
    });
}

/// Does one step of one round if there is one to do.
bool AllreduceExecution::work() {
  const auto slot = [this](std::size_t number) -> Slot& { return slots_[number % kWindow]; };
  if (combined_ < started_ && slot(combined_).awaited_inputs == 0) {
    combine(combined_++);
    return true;
  }
  if (scattered_ < combined_ && slot(scattered_).awaited_parts == 0) {
    scatter(scattered_++);
    return true;
  }
  if (started_ < rounds_ && started_ - scattered_ < kWindow && slot(started_).sending == 0) {
    start(started_++);
    return true;
  }
  return false;
}

void AllreduceExecution::finish_slice() {
  counted_ = true;
  if (alone()) return;
  if (state_.finished.fetch_add(1, std::memory_order_acq_rel) + 1 == owners_) state_.complete.store(true, std::memory_order_release);
}

Progress AllreduceExecution::advance() {
  bool worked = requests_.poll();
  while (work()) {
    worked = true;
    requests_.poll();
  }
  if (owner_ && scattered_ == rounds_ && !counted_) {
    finish_slice();
    worked = true;
  }
  const bool complete = alone() ? counted_ : state_.complete.load(std::memory_order_acquire);
  if (!complete || !requests_.idle()) return worked ? Progress::Advanced : Progress::Idle;
  count_sent_bytes();
  if (!alone())
    for (const auto& member : batch_.members) context_.staging().take_out(my_location(member), member.output, bytes_of(member.count));
  return Progress::Done;
}

}  // namespace hvd
