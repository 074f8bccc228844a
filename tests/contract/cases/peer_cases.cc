// send and recv: types, sizes, tags, order, any source, self, many in flight, both ways at once,
// mismatches. All is host memory.

#include <algorithm>
#include <memory>

#include "tests/contract/refusal.h"

namespace hvd::contract {

namespace {

constexpr int kMixedTag = 40;

/// A message of this rank's, or its place: memory, and what must be in it.
struct Mail {
  Block memory;
  Letter letter;
  Mail(DataType dtype, std::size_t count, Block content, int peer, int tag)
      : memory(std::move(content)),
        letter{dtype,
               {static_cast<std::int64_t>(count)},
               memory.empty() ? nullptr : memory.data(),
               peer,
               tag} {}
};

Block content_of(DataType dtype, int from, std::size_t count, int salt) {
  return make_bytes(dtype, from, count, static_cast<std::uint64_t>(salt));
}
std::unique_ptr<Mail> outgoing(const Context& context, DataType dtype, std::size_t count, int salt,
                               int to, int tag) {
  return std::make_unique<Mail>(dtype, count, content_of(dtype, context.rank, count, salt), to,
                                tag);
}
std::unique_ptr<Mail> incoming(DataType dtype, std::size_t count, int from, int tag) {
  return std::make_unique<Mail>(dtype, count, Block(count * type_bytes(dtype), std::byte{0xee}),
                                from, tag);
}
void check(Context& context, const Mail& mail, int from, int came, int salt) {
  context.equal(came, from, "the rank that a message came from");
  const Block expected = content_of(mail.letter.dtype, from,
                                    static_cast<std::size_t>(mail.letter.shape.front()), salt);
  context.expect(mail.memory == expected,
                 "a message from rank " + std::to_string(from) + " has other bytes");
}
int next_of(const Context& context, int by) { return (context.rank + by) % context.size; }
int before_of(const Context& context, int by) {
  return (context.rank + context.size - by % context.size) % context.size;
}

/// Each rank sends to one and receives from another; by = 0: to itself. `waits`: which of the two
/// is waited for at once.
enum class Waits : std::uint8_t { Recv, Send, Neither };
void shift(Context& context, DataType dtype, std::size_t count, int by, Waits waits) {
  const int to = next_of(context, by), from = before_of(context, by), salt = by;
  const auto out = outgoing(context, dtype, count, salt, to, by),
             in = incoming(dtype, count, from, by);
  if (waits == Waits::Recv) {
    const auto sent = context.endpoint.start_send(out->letter);
    check(context, *in, from, context.endpoint.recv(in->letter), salt);
    sent();
  } else if (waits == Waits::Send) {
    const auto received = context.endpoint.start_recv(in->letter);
    context.endpoint.send(out->letter);
    check(context, *in, from, received(), salt);
  } else {
    const auto sent = context.endpoint.start_send(out->letter);
    const auto received = context.endpoint.start_recv(in->letter);
    sent();
    check(context, *in, from, received(), salt);
  }
}

void all_types(Context& context) {
  for (const DataType dtype : kAllTypes)
    for (const std::size_t count :
         {std::size_t{0}, std::size_t{1}, std::size_t{3}, std::size_t{1311}, std::size_t{20'000}})
      for (int by = 0; by < context.size; ++by)
        shift(context, dtype, count, by,
              static_cast<Waits>((count + static_cast<std::size_t>(by)) % 3));
}

void all_sizes(Context& context) {
  // About what travels with the head, the eager limit, a ring, a part that is got at once; up to 4
  // MiB.
  for (const std::size_t bytes : {0, 1, 23, 24, 25, 63, 64, 65, 8191, 8192, 8193, 16 << 10, 65'535,
                                  65'536, 65'537, 262'144, 1'000'003, 4 << 20})
    for (const Waits waits : {Waits::Recv, Waits::Send, Waits::Neither})
      shift(context, DataType::UInt8, bytes, 1, waits);
}

/// 64 MiB from rank 0 to rank 1 and back, both at once, both sending first.
void large_both_ways(Context& context) {
  if (context.size < 2) throw Skip{"one rank"};
  if (context.rank > 1) return;
  const int other = 1 - context.rank;
  constexpr std::size_t kCount = std::size_t{64} << 20;
  const auto out = outgoing(context, DataType::UInt8, kCount, 1, other, 5),
             in = incoming(DataType::UInt8, kCount, other, 5);
  const auto sent = context.endpoint.start_send(out->letter);
  check(context, *in, other, context.endpoint.recv(in->letter), 1);
  sent();
}

void in_order(Context& context) {
  constexpr int kMessages = 30, kTags = 3;
  const auto count_of = [](int number) {
    return number % 6 == 5 ? std::size_t{30'000} : static_cast<std::size_t>(number);
  };
  std::vector<std::unique_ptr<Mail>> out;
  std::vector<std::function<void()>> sent;
  for (int number = 0; number < kMessages; ++number)
    for (int tag = 0; tag < kTags; ++tag) {
      out.push_back(outgoing(context, DataType::Int32, count_of(number), number * kTags + tag,
                             next_of(context, 1), 10 + tag));
      sent.push_back(context.endpoint.start_send(out.back()->letter));
    }
  const int from = before_of(context, 1);
  for (int tag = kTags - 1; tag >= 0; --tag)
    for (int number = 0; number < kMessages; ++number) {
      const auto in = incoming(DataType::Int32, count_of(number), from, 10 + tag);
      check(context, *in, from, context.endpoint.recv(in->letter), number * kTags + tag);
    }
  for (const auto& one : sent) one();
}

/// All ranks send to each, itself included; it takes them as they come.
void from_any(Context& context) {
  constexpr int kEach = 20;
  for (const std::size_t count : {std::size_t{3}, std::size_t{5000}}) {
    const int tag = count == 3 ? 20 : 21;  // a rank may be further than another
    std::vector<std::unique_ptr<Mail>> out;
    std::vector<std::function<void()>> sent;
    for (int number = 0; number < kEach; ++number)
      for (int to = 0; to < context.size; ++to) {
        out.push_back(outgoing(context, DataType::Float32, count, number, to, tag));
        sent.push_back(context.endpoint.start_send(out.back()->letter));
      }
    std::vector<int> seen(static_cast<std::size_t>(context.size));
    for (int i = 0; i < kEach * context.size; ++i) {
      const auto in = incoming(DataType::Float32, count, kAnyPeer, tag);
      const int from = i % 2 == 0 ? context.endpoint.recv(in->letter)
                                  : context.endpoint.start_recv(in->letter)();
      if (!context.expect(from >= 0 && from < context.size, "a message from no rank")) return;
      check(context, *in, from, from, seen[static_cast<std::size_t>(from)]++);
    }
    for (const auto& one : sent) one();
    for (const int number : seen) context.equal(number, kEach, "the messages of a rank");
  }
}

/// More than a rank sends before it is asked for, both ways, in a burst.
void many_in_flight(Context& context) {
  constexpr int kMessages = 1500;
  constexpr std::size_t kCount = 1000;  // of bytes
  std::vector<std::unique_ptr<Mail>> out, in;
  std::vector<std::function<void()>> sent;
  std::vector<std::function<int()>> received;
  const int to = next_of(context, 1), from = before_of(context, 1);
  for (int number = 0; number < kMessages; ++number) {
    out.push_back(outgoing(context, DataType::UInt8, kCount, number, to, 30));
    sent.push_back(context.endpoint.start_send(out.back()->letter));
  }
  for (int number = 0; number < kMessages; ++number) {
    in.push_back(incoming(DataType::UInt8, kCount, from, 30));
    received.push_back(context.endpoint.start_recv(in.back()->letter));
  }
  for (int number = 0; number < kMessages; ++number) {
    const auto at = static_cast<std::size_t>(number);
    check(context, *in[at], from, received[at](), number);
    sent[at]();
  }
}

void beside_collectives(Context& context) {
  for (int round = 0; round < 5; ++round) {
    const auto out = outgoing(context, DataType::Float64, 4000, round, next_of(context, 1), 31);
    const auto in = incoming(DataType::Float64, 4000, before_of(context, 1), 31);
    const auto received = context.endpoint.start_recv(in->letter);
    context.endpoint.barrier(0);
    const auto sent = context.endpoint.start_send(out->letter);
    context.endpoint.barrier(0);
    sent();
    check(context, *in, before_of(context, 1), received(), round);
  }
}

/// What does not fit is a Mismatch at the receiver, and at a sender that has waited for it; what
/// follows fits.
void mismatches(Context& context) {
  const int to = next_of(context, 1), from = before_of(context, 1);
  for (const std::size_t count : {std::size_t{8}, std::size_t{40'000}})
    for (const bool type : {true, false}) {
      const auto bad = outgoing(context, DataType::Float32, count, 1, to, kMixedTag),
                 good = outgoing(context, DataType::Float32, count, 2, to, kMixedTag);
      const auto bad_sent = context.endpoint.start_send(bad->letter);
      const auto good_sent = context.endpoint.start_send(good->letter);
      const auto other = type ? incoming(DataType::Int32, count, from, kMixedTag)
                              : incoming(DataType::Float32, count + 1, from, kMixedTag);
      const Block before = other->memory;
      try {
        context.endpoint.recv(other->letter);
        context.fail("a message that does not fit was received");
      } catch (const Mismatch& error) {
        context.expect(contains(error.what(), "float32") &&
                           contains(error.what(), "rank " + std::to_string(from)),
                       error.what());
      }
      context.expect(other->memory == before, "something was written");
      const auto in = incoming(DataType::Float32, count, from, kMixedTag);
      check(context, *in, from, context.endpoint.recv(in->letter), 2);
      good_sent();
      try {
        bad_sent();
        context.expect(count == 8,
                       "the sender of a large message that does not fit was told nothing");
      } catch (const Mismatch&) {
        context.expect(count != 8, "the sender of a small message was told that it does not fit");
      }
    }
}

void wrong_calls(Context& context) {
  Block memory(4);
  const auto refused = [&](bool is_send, const Letter& letter, const std::string& word) {
    try {
      if (is_send) {
        context.endpoint.send(letter);
      } else {
        context.endpoint.recv(letter);
      }
      context.fail("not refused: " + word);
    } catch (const InvalidArgument& error) {
      context.expect(contains(error.what(), word), error.what());
    }
  };
  for (const bool is_send : {true, false}) {
    refused(is_send, {DataType::UInt8, {4}, memory.data(), context.size, 0},
            "peer " + std::to_string(context.size));
    refused(is_send, {DataType::UInt8, {4}, memory.data(), -2, 0}, "peer -2");
    refused(is_send, {DataType::UInt8, {4}, memory.data(), 0, -1}, "tag -1");
    refused(is_send, {DataType::UInt8, {4}, nullptr, 0, 0}, "null");
  }
  refused(true, {DataType::UInt8, {4}, memory.data(), kAnyPeer, 0}, "kAnyPeer");
}

}  // namespace

void add_peer_cases(Cases& cases, const Setting& /*setting*/) {
  cases.push_back({"send and recv/types", all_types});
  cases.push_back({"send and recv/sizes", all_sizes});
  cases.push_back({"send and recv/64 MiB both ways", large_both_ways});
  cases.push_back({"send and recv/order and tags", in_order});
  cases.push_back({"send and recv/any source", from_any});
  cases.push_back({"send and recv/many in flight", many_in_flight});
  cases.push_back({"send and recv/beside collectives", beside_collectives});
  cases.push_back({"send and recv/mismatch", mismatches});
  cases.push_back({"send and recv/refused", wrong_calls});
}

}  // namespace hvd::contract
