// Ranks, as threads, that meet over TCP or by a file; strangers at the store's port; and meetings
// that cannot come about.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "ops/rendezvous/meeting_file.h"
#include "ops/rendezvous/sockets.h"
#include "ops/rendezvous/store_meeting.h"
#include "tests/ops/rendezvous/meeting_rounds.h"
#include "tests/support/random.h"

namespace hvd::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

SocketAddress loopback(int port) {
  std::string problem;
  return resolve("127.0.0.1", problem).at(0).with_port(port);
}

/// A port that nobody has, most likely for as long as the test runs: the system hands them out in
/// turn.
int free_port() {
  int error = 0;
  const auto listener = listen_at(loopback(0), error);
  REQUIRE(listener);
  return port_of(*listener);
}

StoreAddress at_port(int port) {
  StoreAddress address;
  address.host = "127.0.0.1";
  address.first_port = port;
  address.job = "job";
  return address;
}

Launch launch_of(int rank, int size, const StoreAddress& address) {
  Launch launch;
  launch.way = Launch::Way::Store;
  launch.hints.rank = rank;
  launch.hints.size = size;
  launch.store = address;
  return launch;
}

/// Each of the ranks in a thread of its own meets the others and does `work`; what it throws is
/// returned, by place.
using Work = std::function<void(Meeting& ranks)>;
std::vector<std::string> meet_all(const std::vector<Launch>& launches, const Work& work,
                                  std::chrono::milliseconds patience = 30s) {
  std::vector<std::string> said(launches.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < launches.size(); ++i)
    threads.emplace_back([&, i] {
      try {
        const auto ranks = meet_in_store(launches[i], patience);
        work(*ranks);
        ranks->barrier();
      } catch (const Error& error) {
        said[i] = error.what();
      }
    });
  for (auto& thread : threads) thread.join();
  return said;
}

std::vector<Launch> world_of(int size, const StoreAddress& address) {
  std::vector<Launch> launches;
  for (int rank = 0; rank < size; ++rank) launches.push_back(launch_of(rank, size, address));
  return launches;
}

void check_all_well(const std::vector<std::string>& said) {
  for (const auto& text : said) CHECK(text.empty());
}
void check_all_say(const std::vector<std::string>& said, const std::string& words) {
  for (const auto& text : said) {
    CAPTURE(text);
    CAPTURE(words);
    CHECK(text.find(words) != std::string::npos);
  }
}

std::string temporary_path() {
  return formatted("{}/hvd-meeting-{}", std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp",
                   ::getpid());
}

Bytes raw_words(std::string_view text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

}  // namespace

TEST_CASE("meeting: ranks meet over TCP, by a file, and at the first free of some ports") {
  for (const int size : {1, 2, 3, 8}) {
    CAPTURE(size);
    check_all_well(meet_all(world_of(size, at_port(free_port())), use));
    StoreAddress file;
    file.path = temporary_path();
    check_all_well(meet_all(world_of(size, file), use));
    CHECK(::access(file.path.c_str(), F_OK) != 0);
  }
  // Two of three ports are somebody else's: one says nothing, the other is a store of another job.
  int error = 0;
  for (int attempt = 0; attempt < 20; ++attempt) {
    StoreAddress address = at_port(free_port());
    address.ports = 3;
    const auto silent = listen_at(loopback(address.first_port), error);
    auto taken = listen_at(loopback(address.first_port + 1), error);
    if (!silent || !taken || !listen_at(loopback(address.first_port + 2), error)) continue;
    StoreServer::Options options;
    options.size = 2;
    options.key = make_key("", "another job");
    const StoreServer other(std::move(*taken), options);
    check_all_well(meet_all(world_of(3, address), use));
    return;
  }
  FAIL("no three ports in a row");
}

TEST_CASE("meeting: a host whose own name is loopback listens at all addresses") {
  std::string problem;
  const auto is_moved = [&](const std::string& host, const std::string& number) {
    const auto address = resolve(number, problem).at(0).with_port(1);
    const auto heard = address_to_listen_at(host, address);
    CHECK(heard.length == address.length);
    CHECK(heard.storage.ss_family == address.storage.ss_family);
    return std::memcmp(&heard.storage, &address.storage, address.length) != 0;
  };
  for (const char* loopback : {"127.0.1.1", "127.0.0.1", "::1"}) {
    CAPTURE(loopback);
    CHECK(is_moved("first", loopback));
    CHECK_FALSE(is_moved(loopback, loopback));
    for (const char* name : {"localhost", "ip6-localhost", "localhost.localdomain"})
      CHECK_FALSE(is_moved(name, loopback));
  }
  for (const char* other : {"192.0.2.7", "2001:db8::7"}) CHECK_FALSE(is_moved("first", other));
  // Who comes to another address of this host finds who listens there.
  int error = 0;
  const auto own = resolve("127.0.1.1", problem).at(0);
  const auto listener = listen_at(address_to_listen_at("first", own), error);
  REQUIRE(listener);
  CHECK(connect_to(own.with_port(port_of(*listener)), Clock::now() + 5s));
  CHECK(connect_to(loopback(port_of(*listener)), Clock::now() + 5s));
}

TEST_CASE("meeting: strangers at the store's port harm nobody") {
  const int port = free_port();
  std::atomic<bool> is_over{false};
  std::thread strangers([&] {
    Random random(7);
    std::vector<FileDescriptor> kept;
    for (unsigned turn = 0; !is_over; ++turn) {
      auto connection = connect_to(loopback(port), Clock::now() + 100ms);
      if (!connection) {
        std::this_thread::sleep_for(1ms);
        continue;
      }
      Bytes said;
      if (turn % 5 == 0) said = raw_words("GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n");
      if (turn % 5 == 1)
        for (int i = 0; i < 3000; ++i) said.push_back(static_cast<std::byte>(random.below(256)));
      if (turn % 5 == 2)
        put_frame(said, FrameKind::Hello,
                  make_hello({1, 3, "x"}, make_key("wrong", "job"), make_nonce(), make_nonce()));
      if (turn % 5 == 3) {  // half of it, and then nothing
        put_frame(said, FrameKind::Hello,
                  make_hello({1, 3, "x"}, make_key("", "job"), make_nonce(), make_nonce()));
        said.resize(said.size() / 2);
      }
      static_cast<void>(send_some(*connection, said));
      // the others go at once
      if (turn % 5 >= 3 && kept.size() < 50) kept.push_back(std::move(*connection));
    }
  });
  check_all_well(meet_all(world_of(3, at_port(port)), [](Meeting& ranks) {
    for (int i = 0; i < 20; ++i) {
      use(ranks);
      std::this_thread::sleep_for(2ms);
    }
  }));
  is_over = true;
  strangers.join();
}

TEST_CASE("meeting: strangers that say nothing keep no rank out, however many they are") {
  const StoreAddress address = at_port(free_port());
  std::vector<std::string> said;
  std::thread first([&] { said = meet_all({launch_of(0, 3, address)}, use); });
  std::vector<FileDescriptor> strangers;
  for (const auto last = Clock::now() + 20s; strangers.size() < 400 && Clock::now() < last;)
    if (auto connection = connect_to(loopback(address.first_port), Clock::now() + 1s))
      strangers.push_back(std::move(*connection));
  CHECK(strangers.size() == 400);
  check_all_well(meet_all({launch_of(1, 3, address), launch_of(2, 3, address)}, use));
  first.join();
  check_all_well(said);
}

TEST_CASE("meeting: a store whose process has no descriptor left sleeps until it has one again") {
  int error = 0;
  auto listener = listen_at(loopback(0), error);
  REQUIRE(listener);
  const SocketAddress there = loopback(port_of(*listener));
  const StoreServer server(std::move(*listener), {.size = 2, .key = make_key("secret", "job")});
  const FileDescriptor stranger(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  rlimit none_left = before;
  none_left.rlim_cur =
      static_cast<rlim_t>(FileDescriptor(::fcntl(stranger.get(), F_DUPFD_CLOEXEC, 0)).get());
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none_left) == 0);
  ::connect(stranger.get(), reinterpret_cast<const sockaddr*>(&there.storage), there.length);
  const std::clock_t busy = std::clock();
  std::this_thread::sleep_for(500ms);
  const double seconds = static_cast<double>(std::clock() - busy) / CLOCKS_PER_SEC;
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(seconds < 0.1);
  CHECK(wait_for(stranger, POLLIN, Clock::now() + 30s));  // its greeting
}

TEST_CASE("meeting: in a pod a name that nobody knows yet is waited for until the deadline") {
  StoreAddress address = at_port(free_port());
  address.host = "no-such-host.invalid";
  address.may_be_named_later = true;
  const auto began = Clock::now();
  check_all_say(meet_all({launch_of(1, 2, address)}, use, 4s), "is not found");
  CHECK(Clock::now() >= began + 4s);
}

TEST_CASE(
    "meeting: a stranger that says nothing is put out, and one with the wrong key learns no more "
    "than that") {
  int error = 0;
  auto listener = listen_at(loopback(0), error);
  REQUIRE(listener);
  const int port = port_of(*listener);
  StoreServer::Options options;
  options.size = 2;
  options.key = make_key("secret", "job");
  const StoreServer server(std::move(*listener), options);
  const Attempt wrong = try_to_meet(loopback(port), {0, 2, "x"}, make_key("guess", "job"),
                                    Clock::now() + 10s, Clock::now() + 10s);
  CHECK(wrong.result == Attempt::Result::OtherJob);
  CHECK(wrong.text.empty());
  const auto silent = connect_to(loopback(port), Clock::now() + 10s);
  REQUIRE(silent);
  std::vector<std::byte> buffer(1000);
  REQUIRE(wait_for(*silent, POLLIN, Clock::now() + 10s));
  CHECK(receive_some(*silent, buffer).value_or(0) > 0);  // its greeting
  REQUIRE(wait_for(*silent, POLLIN, Clock::now() + 60s));
  CHECK_FALSE(receive_some(*silent, buffer));  // the end
  CHECK(
      try_to_meet(loopback(port), {0, 2, "x"}, options.key, Clock::now() + 10s, Clock::now() + 10s)
          .result == Attempt::Result::Welcome);
}

TEST_CASE("meeting: who listens at one of the ports and knows no key is believed nothing") {
  // It says that the rank is wrong or too many, claims a frame of 200 MiB, or a welcome that it
  // cannot prove.
  std::vector<std::function<void(Bytes&)>> lies;
  for (const Refusal why : {Refusal::Wrong, Refusal::Complete})
    lies.emplace_back([why](Bytes& said) {
      put_frame(said, FrameKind::Refused,
                Writer().put(why).put_string("a stranger's text").bytes());
    });
  lies.emplace_back([](Bytes& said) {
    said = Writer().put(std::uint32_t{200} << 20).put(FrameKind::Failed).take();
  });
  lies.emplace_back(
      [](Bytes& said) { put_frame(said, FrameKind::Welcome, Writer().put(Digest{}).bytes()); });
  for (const auto& lie : lies) {
    int error = 0;
    StoreAddress address = at_port(free_port());
    address.ports = 2;
    address.token = "secret";
    const auto taken = listen_at(loopback(address.first_port), error);
    // somebody else's by now
    if (!taken || !listen_at(loopback(address.first_port + 1), error)) continue;
    std::atomic<bool> is_over{false};
    std::thread stranger([&] {
      std::vector<FileDescriptor> kept;
      while (!is_over) {
        auto connection = accept_from(*taken);
        if (!connection) {
          std::this_thread::sleep_for(1ms);
          continue;
        }
        Bytes greeting;
        put_frame(greeting, FrameKind::Greeting, make_greeting(make_nonce()));
        static_cast<void>(send_some(*connection, greeting));
        std::vector<std::byte> buffer(1000);
        if (wait_for(*connection, POLLIN, Clock::now() + 1s))
          static_cast<void>(receive_some(*connection, buffer));
        Bytes said;
        lie(said);
        static_cast<void>(send_some(*connection, said));
        kept.push_back(std::move(*connection));
      }
    });
    check_all_well(meet_all(world_of(3, address), use));
    is_over = true;
    stranger.join();
  }
}

TEST_CASE("meeting: a rank that gave up before a busy store answered is not missed") {
  const StoreAddress address = at_port(free_port());
  const Digest key = make_key(address.token, address.job);
  std::thread impatient([&] {
    FrameReader in;
    std::optional<FileDescriptor> connection;
    while (!(connection = connect_to(loopback(address.first_port), Clock::now() + 1s)))
      std::this_thread::sleep_for(1ms);
    std::vector<std::byte> buffer(1000);
    std::optional<Frame> greeting;
    while (!greeting && wait_for(*connection, POLLIN, Clock::now() + 10s)) {
      in.add(std::span(buffer).first(receive_some(*connection, buffer).value_or(0)));
      greeting = in.next();
    }
    if (!greeting) return;
    Bytes said;
    put_frame(said, FrameKind::Hello,
              make_hello({1, 3, "x"}, key, read_greeting(*greeting), make_nonce()));
    static_cast<void>(send_some(*connection, said));
    // so that the store has read it
    static_cast<void>(wait_for(*connection, POLLIN, Clock::now() + 10s));
  });
  std::vector<std::string> said;
  std::thread others([&] {
    said = meet_all({launch_of(0, 3, address), launch_of(2, 3, address)}, use);
  });
  impatient.join();
  const auto last = meet_all({launch_of(1, 3, address)}, use);
  others.join();
  check_all_well(said);
  check_all_well(last);
}

TEST_CASE("meeting: tokens") {
  StoreAddress with = at_port(free_port());
  with.token = "secret";
  check_all_well(meet_all(world_of(2, with), use));
  StoreAddress other = at_port(free_port());
  StoreAddress same = other;
  other.token = "secret";
  const auto said = meet_all({launch_of(0, 2, other), launch_of(1, 2, same)}, use, 6s);
  check_all_say({said[0]}, "rank 1 of 2 did not come to 127.0.0.1:");
  check_all_say({said[1]}, "another HVD_INIT_TOKEN");
}

TEST_CASE("meeting: ranks that do not come are named, on all that did") {
  const int port = free_port();
  check_all_say(meet_all({launch_of(0, 5, at_port(port)), launch_of(2, 5, at_port(port))}, use, 1s),
                "ranks 1, 3-4 of 5 did not come");
  check_all_say(meet_all({launch_of(1, 2, at_port(free_port()))}, use, 1s),
                "rank 0 did not come to 127.0.0.1:");
  StoreAddress file;
  file.path = temporary_path();
  check_all_say(meet_all({launch_of(0, 2, file)}, use, 1s), "rank 1 of 2 did not come");
  check_all_say(meet_all({launch_of(1, 2, file)}, use, 1s), "rank 0 did not come");
  CHECK(::access(file.path.c_str(), F_OK) != 0);
}

TEST_CASE("meeting: ranks that contradict each other") {
  StoreAddress address = at_port(free_port());
  check_all_say(
      meet_all({launch_of(0, 3, address), launch_of(1, 3, address), launch_of(1, 3, address)}, use),
      "two processes say that they are rank 1");
  address = at_port(free_port());
  check_all_say(
      meet_all({launch_of(0, 3, address), launch_of(1, 3, address), launch_of(2, 4, address)}, use),
      "WORLD_SIZE is 4 for rank 2");
  // Two of rank 0, at one port and at several; and where a file says where.
  StoreAddress several = at_port(free_port());
  several.ports = 4;
  StoreAddress file;
  file.path = temporary_path();
  for (const auto& place : {at_port(free_port()), several, file}) {
    const auto said = meet_all({launch_of(0, 2, place), launch_of(0, 2, place)}, use, 20s);
    for (const auto& text : said) {
      CAPTURE(text);
      CHECK(text.find("rank 0") != std::string::npos);
    }
  }
}

TEST_CASE("meeting: a rank too many is turned away, and the others go on") {
  const StoreAddress address = at_port(free_port());
  std::string said;
  check_all_well(meet_all(world_of(2, address), [&](Meeting& ranks) {
    if (ranks.rank() == 1) said = meet_all({launch_of(1, 2, address)}, use, 20s).front();
    use(ranks);
  }));
  check_all_say({said}, "all 2 ranks of the job are there already");
}

TEST_CASE("meeting: places that are none") {
  StoreAddress address = at_port(free_port());
  address.host = "192.0.2.7";  // nobody's, by RFC 5737
  check_all_say(meet_all({launch_of(0, 2, address)}, use),
                "the address must be one of the host that rank 0 runs on");
  address.host = "no-such-host.invalid";
  check_all_say(meet_all(world_of(2, address), use),
                "the host 'no-such-host.invalid', at which the ranks are to meet, is not found");
  int error = 0;
  address = at_port(free_port());
  const auto taken = listen_at(loopback(address.first_port), error);
  REQUIRE(taken);
  const auto said = meet_all(world_of(2, address), use);
  check_all_say({said[0]}, "another program has it");
  check_all_say({said[1]}, "who answers there is no rank 0 of hvd");
  StoreAddress file;
  file.path = "/no/such/folder/file";
  check_all_say(meet_all(world_of(2, file), use), "/no/such/folder/file");
}

TEST_CASE("meeting: a file that is there already") {
  StoreAddress file;
  file.path = temporary_path();
  std::ofstream(file.path) << "";  // as mktemp makes them
  check_all_well(meet_all(world_of(2, file), use));
  CHECK(::access(file.path.c_str(), F_OK) != 0);
  std::ofstream(file.path) << "hvd-rendezvous-1 1 00 a host that is no more";
  check_all_well(meet_all(world_of(2, file), use));
  std::ofstream(file.path) << "somebody's";
  const auto said = meet_all(world_of(2, file), use, 1s);
  check_all_say({said[0]}, "there is such a file, which is none of hvd's");
  std::string kept;
  std::getline(std::ifstream(file.path), kept);
  CHECK(kept == "somebody's");
  ::unlink(file.path.c_str());
  REQUIRE(::mkfifo(file.path.c_str(), S_IRUSR | S_IWUSR) == 0);
  check_all_say(meet_all(world_of(2, file), use, 1s), "it is no plain file");
  ::unlink(file.path.c_str());
}

TEST_CASE("meeting: a rank that goes while others wait is named") {
  const auto said = meet_all(world_of(3, at_port(free_port())), [](Meeting& ranks) {
    if (ranks.rank() == 1) throw BackendError("goes");
  });
  CHECK(said[1] == "goes");
  check_all_say({said[0], said[2]}, "rank 1 has ended while others wait for it");
}

TEST_CASE(
    "meeting: who waits for a gift that does not come ends when told to, and can take it later") {
  check_all_well(meet_all(world_of(2, at_port(free_port())), [](Meeting& ranks) {
    if (ranks.rank() == 1) {
      int asked = 0;
      try {
        static_cast<void>(ranks.give_from_first({0, 1}, {}, 3, [&] { return ++asked == 2; }));
        throw BackendError("it came");
      } catch (const BackendError& error) {
        if (std::string(error.what()).find("waited in vain") == std::string::npos) throw;
      }
    }
    ranks.barrier();
    const Bytes gift = ranks.give_from_first({0, 1}, ranks.rank() == 0 ? part_of(5, 5) : Bytes(), 3,
                                             [] { return false; });
    if (gift != part_of(5, 5)) throw BackendError("a wrong gift");
  }));
}

TEST_CASE("meeting: what a store that is stopped does not take is not given, but an error") {
  int error = 0;
  const auto stopped = listen_at(loopback(0), error);
  REQUIRE(stopped);
  auto connection = connect_to(loopback(port_of(*stopped)), Clock::now() + 10s);
  REQUIRE(connection);
  Attempt made;
  made.connection = std::move(*connection);
  StoreMeeting rank(0, 2, std::move(made), 100ms);
  const auto give = [&](const Bytes& bytes) {
    return rank.give_from_first({0, 1}, bytes, 3, [] { return false; });
  };
  CHECK(give(part_of(5, 5)) == part_of(5, 5));  // the system's buffers have room
  // half a frame may have gone: nothing must follow it
  for (const std::size_t bytes : {std::size_t{64} << 20, std::size_t{1}})
    CHECK_THROWS_WITH_AS(static_cast<void>(give(Bytes(bytes))),
                         "rank 0, which holds the ranks' store, takes nothing of what rank 0 says",
                         BackendError);
}

TEST_CASE("meeting: a gift that nobody took is none of a later world's") {
  check_all_well(meet_all(world_of(2, at_port(free_port())), [](Meeting& ranks) {
    const auto never = [] { return false; };
    ranks.begin();
    ranks.barrier();
    // rank 1 has given up
    if (ranks.rank() == 0)
      static_cast<void>(ranks.give_from_first({0, 1}, part_of(5, 5), 3, never));
    ranks.barrier();
    ranks.begin();
    ranks.barrier();
    if (ranks.give_from_first({0, 1}, ranks.rank() == 0 ? part_of(6, 6) : Bytes(), 3, never) !=
        part_of(6, 6))
      throw BackendError("the gift of another world");
  }));
}

}  // namespace hvd::test
