// The store without sockets: what is proved, what is read of strangers, who comes and goes, and
// what ranks give each other.
#include <doctest/doctest.h>

#include <string>
#include <string_view>

#include "hvd/base/text.h"
#include "ops/rendezvous/store.h"

namespace hvd::test {
namespace {

Bytes spoken(std::string_view text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

std::string hex(const Digest& digest) {
  std::string text;
  for (const std::byte byte : digest) text += formatted("{:02x}", std::to_integer<unsigned>(byte));
  return text;
}

Hello rank(int number, int size) { return {number, size, formatted("process {}", 100 + number)}; }

void come_all(Store& store, int size) {
  for (int number = 0; number < size; ++number) CHECK_FALSE(store.come(rank(number, size)));
  const auto replies = store.take_replies();
  CHECK(replies.size() == static_cast<std::size_t>(size));
  for (const auto& reply : replies) CHECK(reply.frame.kind == FrameKind::Complete);
}

Frame gather(std::string_view text) { return {FrameKind::Gather, spoken(text)}; }
Frame put(const std::string& key, int takers, std::string_view value) {
  return {FrameKind::Put, Writer()
                              .put_string(key)
                              .put(static_cast<std::uint32_t>(takers))
                              .put_bytes(spoken(value))
                              .take()};
}
Frame get(const std::string& key) { return {FrameKind::Get, Writer().put_string(key).take()}; }

std::string failure(const Frame& frame) {
  CHECK(frame.kind == FrameKind::Failed);
  Reader reader(frame.payload);
  static_cast<void>(reader.get<Status::Code>());
  return reader.get_string();
}

bool mentions(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

}  // namespace

TEST_CASE("store: HMAC-SHA256 gives what the standard's examples say") {
  CHECK(hex(hmac_sha256(spoken("Jefe"), spoken("what do ya want for nothing?"))) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(hmac_sha256(Bytes(131, std::byte{0xaa}),
                        spoken("Test Using Larger Than Block-Size Key - Hash Key First"))) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST_CASE("store: a hello is taken only with the right key, and for the nonce that was given") {
  const Digest key = make_key("token", "job");
  const Nonce server = make_nonce();
  const Nonce client = make_nonce();
  CHECK(server != client);
  const Frame hello{FrameKind::Hello, make_hello(rank(2, 4), key, server, client)};
  const auto found = read_hello(hello, key, server);
  REQUIRE(found);
  CHECK(found->hello.rank == 2);
  CHECK(found->hello.size == 4);
  CHECK(found->hello.who == "process 102");
  CHECK(is_same(found->proof, proof_of_server(key, server, client)));
  CHECK_FALSE(read_hello(hello, make_key("tokem", "job"), server));
  CHECK_FALSE(read_hello(hello, make_key("token", "jop"), server));
  CHECK_FALSE(read_hello(hello, make_key("tokenj", "ob"), server));
  CHECK_FALSE(read_hello(hello, key, make_nonce()));  // what was overheard is of no use
  for (std::size_t place = 24; place < hello.payload.size(); ++place) {
    Frame changed = hello;
    changed.payload[place] ^= std::byte{1};
    bool is_taken = false;
    try {
      is_taken = read_hello(changed, key, server).has_value();
    } catch (const WireError&) {
    }
    CHECK_FALSE(is_taken);
  }
  for (std::size_t length = 0; length < hello.payload.size(); ++length) {
    const Frame half{
        FrameKind::Hello,
        Bytes(hello.payload.begin(), hello.payload.begin() + static_cast<std::ptrdiff_t>(length))};
    CHECK_THROWS_AS(static_cast<void>(read_hello(half, key, server)), WireError);
  }
  CHECK_THROWS_AS(static_cast<void>(read_hello({FrameKind::Gather, hello.payload}, key, server)),
                  WireError);
  CHECK(read_greeting({FrameKind::Greeting, make_greeting(server)}) == server);
  CHECK_THROWS_AS(static_cast<void>(read_greeting(
                      {FrameKind::Greeting, spoken("SSH-2.0-OpenSSH_9.2p1 Debian-2")})),
                  WireError);
}

TEST_CASE("store: frames arrive in any pieces, and those of strangers are short") {
  Bytes all;
  put_frame(all, FrameKind::Get, spoken("one"));
  put_frame(all, FrameKind::Complete, {});
  put_frame(all, FrameKind::Put, spoken("three"));
  for (std::size_t piece = 1; piece <= all.size(); ++piece) {
    FrameReader reader;
    std::vector<Frame> frames;
    for (std::size_t at = 0; at < all.size(); at += piece) {
      reader.add(std::span(all).subspan(at, std::min(piece, all.size() - at)));
      while (auto frame = reader.next()) frames.push_back(std::move(*frame));
    }
    REQUIRE(frames.size() == 3);
    CHECK(frames[0].payload == spoken("one"));
    CHECK(frames[1].kind == FrameKind::Complete);
    CHECK(frames[2].payload == spoken("three"));
  }
  const auto header = [](std::uint32_t length, std::uint8_t kind) {
    return Writer().put(length).put(kind).take();
  };
  for (const bool trusted : {false, true}) {
    FrameReader reader;
    if (trusted) reader.trust();
    reader.add(header(2000, 1));
    if (trusted) {
      CHECK_FALSE(reader.next());
    } else {
      CHECK_THROWS_AS(static_cast<void>(reader.next()), WireError);
    }
  }
  for (const auto& wrong : {header(0xffffffff, 1), header(1, 200), spoken("GET / HTTP/1.1\r\n")}) {
    FrameReader reader;
    reader.trust();
    reader.add(wrong);
    CHECK_THROWS_AS(static_cast<void>(reader.next()), WireError);
  }
}

TEST_CASE("store: every rank's bytes go to all, round after round") {
  Store store(3);
  CHECK(store.missing() == std::vector<int>{0, 1, 2});
  come_all(store, 3);
  for (int round = 0; round < 3; ++round) {
    for (const int number : {2, 0, 1}) {
      CHECK(store.take_replies().empty());
      store.take(number, gather(std::string(static_cast<std::size_t>(number + round),
                                            static_cast<char>('a' + number))));
    }
    const auto replies = store.take_replies();
    REQUIRE(replies.size() == 3);
    for (const auto& reply : replies) {
      CHECK(reply.frame.kind == FrameKind::Gathered);
      Reader reader(reply.frame.payload);
      for (int number = 0; number < 3; ++number)
        CHECK(reader.get_bytes() == spoken(std::string(static_cast<std::size_t>(number + round),
                                                       static_cast<char>('a' + number))));
      CHECK(reader.at_end());
    }
  }
  store.take(1, gather("x"));
  CHECK_THROWS_AS(store.take(1, gather("x")), WireError);
  CHECK_THROWS_AS(store.take(2, {FrameKind::Complete, {}}), WireError);
  CHECK_THROWS_AS(store.take(2, {FrameKind::Put, spoken("x")}), WireError);
}

TEST_CASE(
    "store: who comes wrongly ends the meeting while others are missing, and is turned away "
    "later") {
  const std::vector<std::pair<Hello, std::string>> wrong{
      {rank(1, 3), "two processes say that they are rank 1 of 3: process 101, and process 101"},
      {rank(2, 4), "WORLD_SIZE is 4 for rank 2 (process 102), and 3 for rank 0"},
      {rank(-1, 3), "process 99 says that it is rank -1 of 3"},
      {rank(3, 3), "process 103 says that it is rank 3 of 3"},
  };
  for (const auto& [hello, words] : wrong) {
    Store early(3);
    CHECK_FALSE(early.come(rank(0, 3)));
    CHECK_FALSE(early.come(rank(1, 3)));
    const auto refused = early.come(hello);
    REQUIRE(refused);
    CHECK(refused->first == Refusal::Wrong);
    CHECK(mentions(refused->second, words));
    const auto replies = early.take_replies();
    REQUIRE(replies.size() == 2);
    for (const auto& reply : replies) CHECK(mentions(failure(reply.frame), words));
    // Who comes after it learns the same.
    const auto late = early.come(rank(2, 3));
    REQUIRE(late);
    CHECK(mentions(late->second, words));

    Store full(3);
    come_all(full, 3);
    const auto turned_away = full.come(hello);
    REQUIRE(turned_away);
    CHECK(turned_away->first == Refusal::Complete);
    CHECK(mentions(turned_away->second, words));
    CHECK(full.take_replies().empty());
    for (int number = 0; number < 3; ++number) full.take(number, gather("well"));
    CHECK(full.take_replies().size() == 3);
  }
}

TEST_CASE("store: a rank that goes is named to those who wait for it, and to nobody else") {
  {
    Store store(3);
    CHECK_FALSE(store.come(rank(0, 3)));
    CHECK_FALSE(store.come(rank(2, 3)));
    store.leave(2);
    const auto replies = store.take_replies();
    REQUIRE(replies.size() == 1);
    CHECK(mentions(failure(replies[0].frame), "rank 2 (process 102) has ended while it waited"));
  }
  {
    Store store(3);
    come_all(store, 3);
    store.take(0, gather("a"));
    store.leave(1);
    for (const auto& reply : store.take_replies())
      CHECK(mentions(failure(reply.frame), "rank 1 has ended while others wait for it"));
  }
  {  // It has done its part, and is not waited for. In the next round it is.
    Store store(3);
    come_all(store, 3);
    store.take(1, gather("b"));
    store.leave(1);
    CHECK(store.take_replies().empty());
    store.take(0, gather("a"));
    store.take(2, gather("c"));
    auto replies = store.take_replies();
    REQUIRE(replies.size() == 2);
    CHECK(replies[0].frame.kind == FrameKind::Gathered);
    store.take(2, gather("c"));
    replies = store.take_replies();
    REQUIRE(replies.size() == 2);
    CHECK(mentions(failure(replies[0].frame), "rank 1 has ended"));
  }
  {  // Nobody waits: all leave one after the other.
    Store store(3);
    come_all(store, 3);
    for (const int number : {1, 0, 2}) store.leave(number);
    CHECK(store.take_replies().empty());
  }
}

TEST_CASE("store: a value waits for those who are to take it, and they for it") {
  Store store(3);
  come_all(store, 3);
  const auto value_of = [](const Store::Reply& reply) {
    CHECK(reply.frame.kind == FrameKind::Value);
    Reader reader(reply.frame.payload);
    static_cast<void>(reader.get_string());
    return reader.get_bytes();
  };
  store.take(1, get("a"));
  CHECK(store.take_replies().empty());
  store.take(0, put("a", 2, "first"));
  auto replies = store.take_replies();
  REQUIRE(replies.size() == 1);
  CHECK(replies[0].rank == 1);
  CHECK(value_of(replies[0]) == spoken("first"));
  store.take(2, get("a"));
  replies = store.take_replies();
  REQUIRE(replies.size() == 1);
  CHECK(value_of(replies[0]) == spoken("first"));
  // It is gone, and the key can be used again.
  store.take(0, put("a", 1, "second"));
  CHECK_THROWS_AS(store.take(0, put("a", 1, "third")), WireError);
  store.take(2, get("a"));
  CHECK(value_of(store.take_replies().at(0)) == spoken("second"));
}

}  // namespace hvd::test
