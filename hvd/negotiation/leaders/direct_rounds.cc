#include "hvd/negotiation/leaders/direct_rounds.h"

#include <algorithm>
#include <cstring>

namespace hvd {

namespace {

constexpr std::uint32_t kDirect = 0xffffffff;
constexpr std::size_t kHeadBytes = 32;  // what follows is aligned as a vector's memory is
constexpr std::size_t kPadding = 16;    // and so is the next message's

constexpr std::size_t padded(std::size_t bytes) {
  return (bytes + kPadding - 1) / kPadding * kPadding;
}

// bytes of a message that is made without growing
constexpr std::size_t kMostOfOne = 256;
constexpr std::size_t kLengthAt = kHeadBytes - sizeof(std::uint64_t);

/// Appends a message that has nothing but its head.
void append_head(Bytes& bytes, std::uint64_t what, std::uint32_t number, std::uint64_t round) {
  bytes = Writer(std::move(bytes))
              .put(kDirect)
              .put(number)
              .put(round)
              .put(what)
              .put(std::uint64_t{0})
              .take();
}

bool is_direct_word(std::span<const std::byte> message) {
  std::uint32_t word = 0;
  if (message.size() < sizeof word) return false;
  std::memcpy(&word, message.data(), sizeof word);
  return word == kDirect;
}

std::size_t length_in(std::span<const std::byte> message) {
  std::uint64_t length = 0;
  std::memcpy(&length, message.data() + kLengthAt, sizeof length);
  return length;
}

}  // namespace

bool DirectRounds::is_direct(const Message& message) { return is_direct_word(message.bytes); }

std::uint32_t DirectRounds::number_of(const Part& message) {
  Reader reader(message.bytes());
  static_cast<void>(reader.get<std::uint32_t>());
  return reader.get<std::uint32_t>();
}

// ------------------------------------------------------------------------------ this domain's part

bool DirectRounds::may_promise(std::uint32_t number) const {
  const auto found = units_.find(number);
  if (found == units_.end()) return false;  // its first rounds are negotiated
  const Unit& unit = found->second;
  return !unit.promised && !unit.gathering().is_long && unit.over >= unit.left_out_until;
}

/// Returns the message to which the contribution of so many bytes is to be appended.
Bytes& DirectRounds::begin_contribution(const Unit& unit, std::uint32_t number, std::size_t length,
                                        std::size_t together) {
  const std::size_t size = kHeadBytes + padded(length);
  if (outgoing_.empty() || outgoing_.back().to != kAllOthers ||
      outgoing_.back().bytes->size() + size > kMostTogether) {
    outgoing_.push_back({kAllOthers, std::make_shared<Bytes>()});
    outgoing_.back().bytes->reserve(
        std::max({size, kMostOfOne, std::min(together, kMostTogether)}));
  }
  Bytes& bytes = *outgoing_.back().bytes;
  contribution_at_ = bytes.size();
  append_head(bytes, static_cast<std::uint64_t>(What::Contribution), number, unit.over);
  return bytes;
}

void DirectRounds::end_contribution(Unit& unit, std::uint32_t number, Clock::time_point now) {
  Bytes& bytes = *outgoing_.back().bytes;
  const std::uint64_t length = bytes.size() - contribution_at_ - kHeadBytes;
  std::memcpy(bytes.data() + contribution_at_ + kLengthAt, &length, sizeof length);
  bytes.resize(padded(bytes.size()), std::byte{0});
  const auto& whole = outgoing_.back().bytes;
  put(unit, unit.over, self_, Part(whole, contribution_at_, whole->size() - contribution_at_));
  unit.promised = true;
  unit.waits_since = now;
  unit.patience = kPatience;
  promised_.push_back(number);
}

bool DirectRounds::is_promised(std::uint32_t number) const {
  const auto unit = units_.find(number);
  return unit != units_.end() && unit->second.promised;
}

void DirectRounds::go_long(std::uint32_t number) {
  Unit& unit = units_[number];
  if (!unit.promised) take_long_way(unit, number, unit.over);
}

/// Requires that this domain has not contributed to the round.
void DirectRounds::take_long_way(Unit& unit, std::uint32_t number, std::uint64_t round) {
  Gathered& gathered = unit.rounds[round % 2];
  if (std::exchange(gathered.is_long, true)) return;
  for (std::size_t domain = 0; domain < gathered.here.size(); ++domain)
    if (gathered.here[domain]) send(static_cast<int>(domain), What::Slow, number, round);
}

// -------------------------------------------------------------------------------------------- ends

std::vector<std::uint32_t> DirectRounds::complete() const {
  std::vector<std::uint32_t> complete;
  for (const auto number : promised_)
    if (units_.at(number).gathering().count == domains_) complete.push_back(number);
  return complete;
}

std::span<const std::span<const std::byte>> DirectRounds::contributions(std::uint32_t number) {
  contributions_.clear();
  for (const auto& message : units_.at(number).gathering().messages)
    contributions_.push_back(message.bytes().subspan(kHeadBytes, length_in(message.bytes())));
  return contributions_;
}

void DirectRounds::end(std::uint32_t number) {
  Unit& unit = units_[number];
  if (std::exchange(unit.promised, false)) {
    std::erase(promised_, number);
    unit.streak = 0;
  }
  Gathered& gathered = unit.gathering();
  std::fill(gathered.here.begin(), gathered.here.end(), false);
  std::ranges::fill(gathered.messages, Part());
  gathered.count = 0;
  gathered.is_long = false;
  ++unit.over;
}

void DirectRounds::forget(std::uint32_t number) {
  units_.erase(number);
  std::erase(promised_, number);
}

std::uint64_t DirectRounds::rounds_over(std::uint32_t number) const {
  const auto unit = units_.find(number);
  return unit == units_.end() ? 0 : unit->second.over;
}

// ---------------------------------------------------------------------------------------- messages

void DirectRounds::put(Unit& unit, std::uint64_t round, int from, Part message) {
  Gathered& gathered = unit.rounds[round % 2];
  gathered.messages.resize(domains_);
  gathered.here.resize(domains_);
  const auto place = static_cast<std::size_t>(from);
  if (gathered.here.at(place)) throw WireError("a second contribution to a round");
  gathered.here[place] = true;
  gathered.messages[place] = std::move(message);
  ++gathered.count;
}

void DirectRounds::send(int to, What what, std::uint32_t number, std::uint64_t round) {
  // With what else goes to that domain alone: what comes after a contribution stays behind it.
  auto message = std::ranges::find_if(outgoing_.rbegin(), outgoing_.rend(), [&](const auto& one) {
    return one.to == to || one.to == kAllOthers;
  });
  if (message == outgoing_.rend() || message->to == kAllOthers ||
      message->bytes->size() + kHeadBytes > kMostTogether) {
    outgoing_.push_back({to, std::make_shared<Bytes>()});
    message = outgoing_.rbegin();
  }
  append_head(*message->bytes, static_cast<std::uint64_t>(what), number, round);
}

std::size_t DirectRounds::length_of(std::span<const std::byte> messages) {
  if (messages.size() < kHeadBytes || !is_direct_word(messages))
    throw WireError("not a message between leaders");
  const std::size_t length = length_in(messages);
  if (length > messages.size() - kHeadBytes || padded(length) > messages.size() - kHeadBytes)
    throw WireError("a message between leaders that is cut off");
  return kHeadBytes + padded(length);
}

bool DirectRounds::receive(int from, Part message, bool is_known, bool cannot_come,
                           std::uint32_t& fallen_back) {
  Reader reader(message.bytes());
  static_cast<void>(reader.get<std::uint32_t>());
  const auto number = reader.get<std::uint32_t>();
  const auto round = reader.get<std::uint64_t>();
  const auto what = static_cast<What>(reader.get<std::uint64_t>());
  const auto length = reader.get<std::uint64_t>();
  if (length_of(message.bytes()) != message.size || (what != What::Contribution && length != 0))
    throw WireError("not a message between leaders");
  if (what > What::Ask) throw WireError("not a message between leaders");
  if (!is_known) {  // refused meanwhile, which the sender has still to hear
    if (what != What::Slow) send(from, What::Slow, number, round);
    return false;
  }
  Unit& unit = units_[number];
  // it is over here: what this domain has contributed to it went before
  if (round < unit.over) return false;
  if (round > unit.over + 1) {
    // The others went on without this domain, whose ranks had joined, and the decisions of those
    // rounds are still on the way through the tree.
    if (unit.promised) throw WireError("a message of a round that cannot be under way");
    unit.left_out_until = std::max(unit.left_out_until, round + 1);
    if (what != What::Slow) send(from, What::Slow, number, round);
    return false;
  }
  const bool is_gathering = round == unit.over;
  if (what == What::Slow) {
    if (!is_gathering || !unit.promised) return false;
    unit.promised = false;
    std::erase(promised_, number);
    // The domain's own contribution is of no use to anybody any more.
    Gathered& gathered = unit.gathering();
    gathered.here[static_cast<std::size_t>(self_)] = false;
    --gathered.count;
    unit.streak = std::min(unit.streak + 1, kMostStreak);
    unit.left_out_until = unit.over + 1 + (std::uint64_t{1} << unit.streak);
    fallen_back = number;
    return true;
  }
  if (what == What::Contribution) put(unit, round, from, std::move(message));
  if (is_gathering && unit.promised) return false;
  if (unit.rounds[round % 2].is_long) {
    send(from, What::Slow, number, round);
  } else if (what == What::Ask || cannot_come || round < unit.left_out_until) {
    take_long_way(unit, number, round);  // which tells the sender too: it has contributed
  }
  return false;
}

void DirectRounds::ask(Clock::time_point now) {
  for (const auto number : promised_) {
    Unit& unit = units_.at(number);
    if (now - unit.waits_since < unit.patience) continue;
    // An answer comes surely, but late where a leader is slow: more queries would make it slower.
    unit.waits_since = now;
    unit.patience *= 2;
    for (const int domain : missing(number)) send(domain, What::Ask, number, unit.over);
  }
}

std::vector<int> DirectRounds::missing(std::uint32_t number) const {
  std::vector<int> missing;
  if (!is_promised(number)) return missing;
  const Gathered& gathered = units_.at(number).gathering();
  for (std::size_t domain = 0; domain < gathered.here.size(); ++domain)
    if (!gathered.here[domain]) missing.push_back(static_cast<int>(domain));
  return missing;
}

void DirectRounds::send_next(Transport& transport) {
  const auto& [to, bytes] = outgoing_.front();
  if (to != kAllOthers) transport.send(to, bytes);
  // each begins with another one, so that not all send to the same
  for (std::size_t i = 1; to == kAllOthers && i < domains_; ++i)
    transport.send(static_cast<int>((static_cast<std::size_t>(self_) + i) % domains_), bytes);
  outgoing_.pop_front();
}

bool DirectRounds::flush(Transport& transport) {
  const bool any = !outgoing_.empty();
  while (!outgoing_.empty()) send_next(transport);
  return any;
}

void DirectRounds::flush_full(Transport& transport) {
  while (outgoing_.size() > 1) send_next(transport);
}

}  // namespace hvd
