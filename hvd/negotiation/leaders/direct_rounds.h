#pragma once
/// Rounds of repeated small operations, which the leaders end among themselves: each sends all
/// others what its domain contributes, and who has all contributions has the result. That takes one
/// hop, where an agreement takes two up to the root and back, and its batch more.
///
/// A round is ended so only if every leader contributes to it. One that has contributed has
/// prepared the round, as in a two-phase commit. One that cannot contribute, as its domain has the
/// round negotiated (through the log and the leader tree), tells those that have prepared it that
/// the round is Slow, and they negotiate it too: nobody can have ended it. One that has prepared a
/// round and hears nothing queries those that it misses (Ask): they negotiate that round unless
/// they have prepared it. So each round is ended in one way everywhere, and whatever looks after
/// operations that wait (ranks that join, leave, fail, disagree) finds those that wait for long in
/// negotiation.
///
/// Rounds are counted for each number of the leader tree: by its decisions and by what is ended
/// here, alike in all domains. A message is
///
///   0xffffffff u32, number u32, round u64, what u64, length u64, and of a Contribution so many
///   bytes, and zeros up to a multiple of 16
///
/// where the first word tells it from a message of the leader tree. What a leader contributes to
/// several rounds at a time travels as one: such messages one after the other, up to some 60 KiB.
/// So does what else it says to one domain. A value without a lock, of the thread that drives the
/// leader. Throws WireError on malformed messages.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hvd/base/wire.h"
#include "hvd/transport.h"

namespace hvd {

class DirectRounds {
 public:
  using Clock = std::chrono::steady_clock;
  /// The time after which a leader queries what it misses; twice as long before each next query.
  static constexpr std::chrono::milliseconds kPatience{20};

  /// `domain`: this leader's, of so many.
  DirectRounds(int domain, int domains)
      : self_(domain), domains_(static_cast<std::size_t>(domains)) {}

  /// A Part is one message of those that have travelled as one, which it keeps.
  struct Part {
    Part() = default;
    Part(SharedBytes whole_, std::size_t at_, std::size_t size_)
        : whole(std::move(whole_)), at(at_), size(size_) {}
    explicit Part(Bytes alone)
        : whole(std::make_shared<const Bytes>(std::move(alone))), size(whole->size()) {}
    [[nodiscard]] std::span<const std::byte> bytes() const {
      return std::span(*whole).subspan(at, size);
    }
    SharedBytes whole;
    std::size_t at = 0, size = 0;
  };

  /// Returns whether the message is one of these, or several of them.
  [[nodiscard]] static bool is_direct(const Message& message);
  /// Calls `take` with each of those that have travelled as `message`. Throws WireError where it is
  /// not made of such.
  template <class Take>
  static void split(Message message, Take take) {
    const auto whole = std::make_shared<const Bytes>(std::move(message.bytes));
    for (std::size_t at = 0, size = 0; at < whole->size(); at += size) {
      size = length_of(std::span(*whole).subspan(at));
      take(Part(whole, at, size));
    }
  }

  // ---- this domain's part in the round that is gathering
  /// Returns whether this domain may contribute to it: it has not, and does not negotiate it.
  [[nodiscard]] bool may_promise(std::uint32_t number) const;
  /// Contributes to it: it is not to be ended in another way, unless `receive` says so.
  /// `contribute` appends the contribution, of about `length` bytes, to the bytes that it is given.
  /// `together`: bytes of what follows at once, with it, about.
  template <class Contribute>
  void promise(std::uint32_t number, Clock::time_point now, std::size_t length,
               std::size_t together, Contribute contribute) {
    Unit& unit = units_.at(number);
    Bytes& bytes = begin_contribution(unit, number, length, together);
    contribute(bytes);
    end_contribution(unit, number, now);
  }
  [[nodiscard]] bool is_promised(std::uint32_t number) const;
  [[nodiscard]] bool has_promised() const { return !promised_.empty(); }
  /// This domain negotiates it.
  void go_long(std::uint32_t number);

  // ---- ends
  /// Returns the numbers of the rounds that this domain has contributed to and has all
  /// contributions of.
  [[nodiscard]] std::vector<std::uint32_t> complete() const;
  /// Returns the contributions by domain, until it is called again. Requires a complete round,
  /// which has not been ended.
  [[nodiscard]] std::span<const std::span<const std::byte>> contributions(std::uint32_t number);
  /// The round is over, one way or another.
  void end(std::uint32_t number);
  /// The number is given up.
  void forget(std::uint32_t number);
  /// Returns how many rounds of the number are over.
  [[nodiscard]] std::uint64_t rounds_over(std::uint32_t number) const;

  // ---- messages
  /// Acts on a message. Returns true if this domain is to negotiate the round that it has prepared,
  /// whose number `fallen_back` then is. `is_known`: whether the number is still known.
  /// `cannot_come`: this domain will not contribute to the number's rounds.
  bool receive(int from, Part message, bool is_known, bool cannot_come, std::uint32_t& fallen_back);
  /// Returns the number in a message. Throws WireError if it is too short for one.
  [[nodiscard]] static std::uint32_t number_of(const Part& message);
  /// Queries what has been missed for long.
  void ask(Clock::time_point now);
  /// Sends what has gathered. Returns whether there was anything.
  bool flush(Transport& transport);
  /// Sends what has gathered, but for a message that has room for more.
  void flush_full(Transport& transport);
  /// Returns the domains whose contributions are missed; none unless this one has contributed.
  [[nodiscard]] std::vector<int> missing(std::uint32_t number) const;
  /// Returns how many numbers it keeps something of.
  [[nodiscard]] std::size_t numbers_kept() const { return units_.size(); }

 private:
  enum class What : std::uint64_t { Contribution, Slow, Ask };
  /// The contributions to one round.
  struct Gathered {
    std::vector<Part> messages;  ///< by domain
    std::vector<bool> here;
    std::size_t count = 0;
    bool is_long = false;  ///< this domain negotiates it
  };
  struct Unit {
    std::uint64_t over = 0;            ///< rounds that are
    std::array<Gathered, 2> rounds;    ///< by parity: the round that gathers, and the next one
    bool promised = false;             ///< this domain has contributed to the one that is gathering
    Clock::time_point waits_since{};   ///< when it has contributed, or queried
    Clock::duration patience{};        ///< until it queries
    unsigned streak = 0;               ///< rounds that fell back, one after the other
    std::uint64_t left_out_until = 0;  ///< this domain contributes to no round before that one
    Gathered& gathering() { return rounds[over % 2]; }
    [[nodiscard]] const Gathered& gathering() const { return rounds[over % 2]; }
  };
  struct Outgoing {
    int to;  ///< a domain, or all others
    std::shared_ptr<Bytes> bytes;
  };
  static constexpr int kAllOthers = -1;
  static constexpr std::size_t kMostTogether = 60 << 10;  ///< what MPI takes at once, less its head
  static constexpr unsigned kMostStreak = 10;

  static std::size_t length_of(std::span<const std::byte> messages);
  Bytes& begin_contribution(const Unit& unit, std::uint32_t number, std::size_t length,
                            std::size_t together);
  void end_contribution(Unit& unit, std::uint32_t number, Clock::time_point now);
  void put(Unit& unit, std::uint64_t round, int from, Part message);
  void send_next(Transport& transport);
  void send(int to, What what, std::uint32_t number, std::uint64_t round);
  void take_long_way(Unit& unit, std::uint32_t number, std::uint64_t round);

  const int self_;
  const std::size_t domains_;
  std::unordered_map<std::uint32_t, Unit> units_;
  std::vector<std::uint32_t> promised_;
  std::deque<Outgoing> outgoing_;
  std::size_t contribution_at_ = 0;  ///< in the last of them, of what is being contributed
  std::vector<std::span<const std::byte>> contributions_;
};

}  // namespace hvd
