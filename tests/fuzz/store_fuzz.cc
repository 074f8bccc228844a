// The ranks' store and the frames that it is told: a stranger is never taken for a rank, whatever
// it says, and a rank that says what it may not harms only itself: what the others are told are
// whole frames of the protocol.
#include <array>

#include "ops/rendezvous/store.h"
#include "tests/fuzz/fuzz_support.h"

namespace hvd::fuzz {

namespace {

constexpr int kRanks = 3;
constexpr Nonce kNonce{};

Bytes some(test::Random& random, int most) {
  Bytes made(static_cast<std::size_t>(random.below(most)));
  for (std::byte& byte : made) byte = static_cast<std::byte>(random.below(256));
  return made;
}

Bytes frame(test::Random& random) {
  Bytes made;
  const std::string key(1, static_cast<char>('a' + random.below(3)));
  switch (random.below(4)) {
    case 0:
      put_frame(
          made, FrameKind::Hello,
          make_hello({random.below(4), kRanks, "x"}, make_key("guess", "job"), kNonce, kNonce));
      break;
    case 1:
      put_frame(made, FrameKind::Put,
                Writer()
                    .put_string(key)
                    .put(static_cast<std::uint32_t>(random.below(4)))
                    .put_bytes(some(random, 40))
                    .bytes());
      break;
    case 2: put_frame(made, FrameKind::Get, Writer().put_string(key).bytes()); break;
    default: put_frame(made, FrameKind::Gather, some(random, 40));
  }
  return made;
}

void take_stranger(Reader& input) {
  const Digest key = make_key("token", "job");
  FrameReader reader;
  while (!input.at_end()) {
    reader.add(input.get_bytes());
    while (const auto next = reader.next()) {
      try {
        static_cast<void>(read_greeting(*next));
      } catch (const WireError&) {
      }
      if (read_hello(*next, key, kNonce)) std::abort();
    }
  }
}

void take_ranks(Reader& input) {
  Store store(kRanks);
  for (int rank = 0; rank < kRanks; ++rank)
    if (store.come({rank, kRanks, "process"})) std::abort();
  std::array<FrameReader, kRanks> readers;
  for (auto& reader : readers) reader.trust();
  std::array<bool, kRanks> gone{};
  while (!input.at_end()) {
    const auto rank = static_cast<std::size_t>(input.get<std::uint8_t>() % kRanks);
    const auto said = input.get_bytes();
    if (gone[rank]) continue;
    try {
      readers[rank].add(said);
      while (const auto next = readers[rank].next()) store.take(static_cast<int>(rank), *next);
    } catch (const WireError&) {
      gone[rank] = true;
      store.leave(static_cast<int>(rank));
    }
    for (const auto& reply : store.take_replies()) {
      if (reply.rank < 0 || reply.rank >= kRanks) std::abort();
      Bytes sent;
      put_frame(sent, reply.frame.kind, reply.frame.payload);
      FrameReader reader;
      reader.trust();
      reader.add(sent);
      if (const auto again = reader.next(); !again || again->payload != reply.frame.payload)
        std::abort();
    }
  }
}

}  // namespace

Bytes example(test::Random& random) {
  Writer writer;
  const bool is_stranger = random.one_in(4);
  writer.put(static_cast<std::uint8_t>(is_stranger));
  for (int i = 0; i < 8; ++i) {
    if (!is_stranger) writer.put(static_cast<std::uint8_t>(random.below(kRanks)));
    writer.put_bytes(frame(random));
  }
  return writer.take();
}

void take(Reader& input) {
  if (input.get<std::uint8_t>() == 1) {
    take_stranger(input);
  } else {
    take_ranks(input);
  }
}

}  // namespace hvd::fuzz
