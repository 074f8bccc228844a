/// The timeline: one file of all ranks, valid whenever its lock can be had; what it says, what it
/// leaves out, and what it costs when off.

#include "hvd/timeline/timeline.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <thread>

#include "hvd/base/text.h"
#include "tests/support/thread_world.h"
#include "tests/support/timeline_reader.h"

namespace hvd::test {
namespace {

/// A file name of this process's own, gone when the test is over.
class Path {
 public:
  explicit Path(const std::string& name) {
    const char* folder = std::getenv("TMPDIR");
    path_ = std::string(folder == nullptr ? "/tmp" : folder) + "/hvd_timeline_test." +
            std::to_string(::getpid()) + "." + name;
    ::unlink(path_.c_str());
  }
  ~Path() { ::unlink(path_.c_str()); }
  [[nodiscard]] const std::string& text() const { return path_; }
  [[nodiscard]] bool exists() const { return ::access(path_.c_str(), F_OK) == 0; }

 private:
  std::string path_;
};

/// Where ranks that are threads give each other bytes.
class Meeting {
 public:
  explicit Meeting(int ranks) : said_(static_cast<std::size_t>(ranks)), barrier_(ranks) {}
  Timeline::Exchange of(int rank) {
    return [this, rank](const Bytes& mine) {
      said_[static_cast<std::size_t>(rank)] = mine;
      barrier_.arrive_and_wait();
      auto all = said_;
      barrier_.arrive_and_wait();
      return all;
    };
  }

 private:
  std::vector<Bytes> said_;
  std::barrier<> barrier_;
};

constexpr std::uint64_t kMuch = 1 << 30;

/// What the file of a run begins with.
std::string first_event(int run) {
  return ",\n{\"name\":\"run " + std::to_string(run) +
         "\",\"ph\":\"i\",\"pid\":0,\"tid\":0,\"ts\":0}";
}

/// Runs `body` on `size` ranks with a timeline.
ReadTimeline traced(const Path& path, int size, int domains,
                    const std::function<void(int, Engine&, ThreadWorld&)>& body,
                    TimelineOptions options = {}, std::uint64_t max_bytes = kMuch) {
  ThreadWorld world({.size = size, .domains = domains, .config = {}});
  Meeting meeting(size);
  world.run([&](int rank, Engine& engine) {
    engine.timeline().start(path.text(), options, max_bytes, engine.topology(), meeting.of(rank));
    body(rank, engine, world);
  });
  return read_timeline(path.text());
}

void reduce(Engine& engine, std::vector<float>& values, const std::string& name) {
  engine.wait(*engine.submit(allreduce_of(values, name, DataType::Float32)));
}

/// A timeline of a world of one rank.
struct Alone {
  explicit Alone(const std::string& path, std::size_t capacity = Timeline::kCapacity,
                 std::uint64_t max_bytes = kMuch)
      : timeline(capacity) {
    timeline.start(path, {}, max_bytes, Topology::single_domain(0, 1),
                   [](const Bytes& mine) { return std::vector<Bytes>{mine}; });
  }
  std::uint64_t submit(const std::string& name) {
    Submission submission;
    submission.tensors.push_back({nullptr, nullptr, DataType::Int8, {2, 3}});
    return timeline.submitted(submission, name, false, Timeline::now(), {});
  }
  void whole(const std::string& name) {
    const auto id = submit(name);
    timeline.agreed(id, 0, true);
    timeline.launched(id, "shm");
    timeline.finished(id, {});
  }
  Timeline timeline;
};

}  // namespace

TEST_CASE(
    "one file of all ranks: slices nest, and say operation, transport, type, shape and bytes") {
  for (const auto& [size, domains] : std::vector<std::pair<int, int>>{{1, 1}, {3, 1}, {4, 2}}) {
    CAPTURE(size);
    CAPTURE(domains);
    const Path path("all");
    const auto read =
        traced(path, size, domains,
               [](int, Engine& engine, ThreadWorld&) {
                 std::vector<float> values(51, 1.0F);
                 Submission matrix = allreduce_of(values, "matrix", DataType::Float32);
                 matrix.tensors.front().shape = {17, 3};
                 engine.wait(*engine.submit(std::move(matrix)));
                 Submission group = allreduce_of(values, "group", DataType::Float32);
                 std::vector<std::int16_t> shorts(4);
                 group.tensors.push_back({shorts.data(), shorts.data(), DataType::Int16, {4}});
                 engine.wait(*engine.submit(std::move(group)));
                 Submission broadcast = allreduce_of(values, "broadcast", DataType::Float32);
                 broadcast.kind = OpKind::Broadcast;
                 engine.wait(*engine.submit(std::move(broadcast)));
                 Submission barrier;
                 barrier.kind = OpKind::Barrier;
                 engine.wait(*engine.submit(std::move(barrier)));
               },
               {.mark_cycles = true});
    CHECK(read.open == 0);
    CHECK(read.count("process_name") == static_cast<std::size_t>(size));
    CHECK(read.count("CYCLE_START") >= static_cast<std::size_t>(4 * size));
    CHECK(read.count("queue length") > 0);
    CHECK(read.count("bytes in flight") > 0);
    for (int rank = 0; rank < size; ++rank) {
      CAPTURE(rank);
      const auto one = [&](const std::string& name, const std::string& lane) {
        const auto found = read.named(name, lane, rank);
        REQUIRE(found.size() == 1);
        return found.front();
      };
      const auto negotiation = one("NEGOTIATE_ALLREDUCE", "matrix");
      const auto whole = one("ALLREDUCE", "matrix");
      CHECK(negotiation.to == whole.from);
      CHECK(whole.args ==
            nlohmann::json{{"dtype", "float32"}, {"shape", "[17, 3]"}, {"bytes", 204}});
      CHECK(one("ALLREDUCE", "group").args ==
            nlohmann::json{
                {"dtype", "mixed"}, {"tensors", 2}, {"shape", "[51], [4]"}, {"bytes", 212}});
      CHECK(one("WAIT_FOR_DATA", "matrix").parent == "ALLREDUCE");
      const std::string transport = domains == 1 ? "SHM" : "RENDEZVOUS";
      CHECK(one(transport + "_ALLREDUCE", "matrix").parent == "ALLREDUCE");
      CHECK(one(transport + "_BROADCAST", "broadcast").parent == "BROADCAST");
      CHECK(one("NEGOTIATE_BARRIER", "").args.at("tensor") == "barrier.noname.0");
      CHECK(one("BARRIER", "").args.at("tensor") == "barrier.noname.0");
      CHECK(one("NEGOTIATE_BARRIER", "").to == one("BARRIER", "").from);
      CHECK(one("BARRIER", "").parent.empty());
      const auto copy_in = one("MEMCPY_IN_FUSION_BUFFER", "matrix");
      const auto copy_out = one("MEMCPY_OUT_FUSION_BUFFER", "matrix");
      CHECK(copy_in.parent == "ALLREDUCE");
      CHECK(copy_in.from == copy_in.to);  // copied before, or by the transport
      if (domains == 1)
        CHECK(one("MEMCPY_IN_SHARED_MEMORY", "matrix").parent == "NEGOTIATE_ALLREDUCE");
      CHECK(copy_out.parent == "ALLREDUCE");
      CHECK(copy_out.to == whole.to);
      if (domains > 1) CHECK(copy_out.from == copy_out.to);  // the transport copies
      CHECK(read.count("rank " + std::to_string(rank) + " ready") == 4);
    }
    std::size_t last = 0;
    for (int rank = 0; rank < size; ++rank)
      last += read.count("rank " + std::to_string(rank) + " was last");
    CHECK(last == static_cast<std::size_t>(4 * size));  // each rank says it, of each operation
  }
}

TEST_CASE("what lies in shared memory is not copied: the slices of its copies have no length") {
  const Path path("arena");
  const auto read = traced(path, 2, 1, [](int rank, Engine& engine, ThreadWorld& world) {
    auto* data = world.arena(rank).allocate(400);
    Submission submission;
    submission.name = "in place";
    submission.op = ReduceOp::Sum;
    submission.tensors.push_back({data, data, DataType::Float32, {100}});
    engine.wait(*engine.submit(std::move(submission)));
    world.arena(rank).free(data);
  });
  CHECK(read.named("SHM_ALLREDUCE", "in place").size() == 2);
  for (const auto* const copy : {"MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"}) {
    CHECK(read.named(copy, "in place").size() == 2);
    for (const auto& slice : read.named(copy)) {
      CHECK(slice.parent == "ALLREDUCE");
      CHECK(slice.from == slice.to);
    }
  }
  CHECK(read.count("CYCLE_START") == 0);
}

TEST_CASE(
    "a name again and again has one lane; names that never come back share lanes; a failure says "
    "why") {
  const Path path("lanes");
  const auto read = traced(path, 2, 1, [](int rank, Engine& engine, ThreadWorld&) {
    std::vector<float> values(8);
    for (int i = 0; i < 50; ++i) reduce(engine, values, "again");
    for (int i = 0; i < 50; ++i) reduce(engine, values, "");
    std::vector<float> other(rank == 0 ? 3U : 4U);
    CHECK_THROWS_AS(reduce(engine, other, "differs"), Mismatch);
  });
  CHECK(read.open == 0);
  CHECK(read.named("ALLREDUCE", "again").size() == 100);
  CHECK(read.named("ALLREDUCE").size() == 200);
  CHECK(read.count("thread_name") == 6);  // per rank: again, differs, and one for all the rest
  for (const auto& slice : read.named("NEGOTIATE_ALLREDUCE", "differs"))
    CHECK(slice.end_args.at("error").get<std::string>().find("the shape differs") !=
          std::string::npos);
}

TEST_CASE("names of all kinds are escaped") {
  const std::vector<std::pair<std::string, std::string>> names{
      {"a \"quoted\" \\ name", "a \"quoted\" \\ name"},
      {"line\nand\ttab\x01\x7f", "line\nand\ttab\x01\x7f"},
      {"Gewicht \xc3\xa4 \xf0\x9f\x98\x80", "Gewicht \xc3\xa4 \xf0\x9f\x98\x80"},
      {"broken \xff\xc3(\xe2\x82 \xed\xa0\x80\xc0\xaf\xf5",
       "broken \ufffd\ufffd(\ufffd\ufffd \ufffd\ufffd\ufffd\ufffd\ufffd\ufffd"},
      {std::string("nul\0!", 5), std::string("nul\0!", 5)},
      {std::string(5000, '"'), std::string(256, '"') + "..."},
      {"}\n]\n,\n{", "}\n]\n,\n{"}};
  const Path path("names");
  {
    Alone alone(path.text());
    for (const auto& [name, shown] : names) alone.whole(name);
  }
  const auto read = read_timeline(path.text());
  for (const auto& [name, shown] : names) CHECK(read.named("ALLREDUCE", shown).size() == 1);
  for (const auto& [name, shown] : names)
    CHECK(nlohmann::json::parse(json_string(name, 256)).get<std::string>() == shown);
}

TEST_CASE("the file grows to its limit and no further, and says so once") {
  const Path path("limit");
  constexpr std::uint64_t kLimit = 64 << 10;
  const auto read = traced(
      path, 3, 1,
      [](int, Engine& engine, ThreadWorld&) {
        std::vector<float> values(8);
        for (int i = 0; i < 300; ++i) reduce(engine, values, "tensor " + std::to_string(i));
      },
      {}, kLimit);
  CHECK(read.count("the timeline is full: HVD_TIMELINE_MAX_BYTES") == 1);
  CHECK(read.events.back().at("name") == "the timeline is full: HVD_TIMELINE_MAX_BYTES");
  const auto bytes = read_whole(path.text()).size();
  CHECK(bytes <= kLimit);
  CHECK(bytes > kLimit - 2 * TimelineFile::kMostEventBytes);
}

TEST_CASE("what finds no room in memory is left out whole, and counted") {
  const Path path("dropped");
  std::ptrdiff_t left_out = 0;
  {
    Alone alone(path.text(), 4096);  // room for some operations at a time
    std::vector<std::uint64_t> ids;
    for (int i = 0; i < 1000; ++i) ids.push_back(alone.submit("tensor " + std::to_string(i)));
    left_out = std::count(ids.begin(), ids.end(), 0U);
    CHECK(left_out > 0);
    for (const auto id : ids)
      if (id != 0) alone.timeline.finished(id, {});
  }
  const auto read = read_timeline(path.text());
  for (const char* const name : {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"})
    CHECK(read.named(name).size() == static_cast<std::size_t>(1000 - left_out));
  CHECK(read.open == 0);
  REQUIRE(read.count("operations left out") > 0);
  nlohmann::json last;
  for (const auto& event : read.events)
    if (event.value("name", "") == "operations left out") last = event;
  CHECK(last.at("args").at("operations") == left_out);
}

TEST_CASE("a torn file is put right by the next to write, wherever it is torn") {
  const Path path("torn");
  const auto lines = [](int from, int to) {
    std::string text;
    for (int i = from; i < to; ++i)
      text += ",\n{\"name\":\"" + std::to_string(i) +
              "\",\"ph\":\"i\",\"pid\":0,\"tid\":0,\"ts\":" + std::to_string(i) + "}";
    return text;
  };
  TimelineFile file(path.text(), first_event(123));
  CHECK(read_timeline(path.text()).events.size() == 1);
  const auto append = [&](const std::string& text) { return file.append(text, kMuch, ",\n{}"); };
  CHECK(append(lines(0, 500)) == TimelineFile::Outcome::Written);
  const std::string before = read_whole(path.text());
  CHECK(read_timeline_text(before).events.size() == 501);
  CHECK(append(lines(500, 503)) == TimelineFile::Outcome::Written);
  const std::string after = read_whole(path.text());
  for (std::size_t length = before.size() - 3; length <= after.size(); ++length) {
    CAPTURE(length);
    // As a killed writer leaves it: the old end is gone, the new one is not there.
    REQUIRE(::truncate(path.text().c_str(), static_cast<off_t>(length)) == 0);
    CHECK(append(lines(900, 901)) == TimelineFile::Outcome::Written);
    const auto read = read_timeline(path.text());
    CHECK(read.events.size() >= 501);
    CHECK(read.events.at(499).at("name") == "498");
    CHECK(read.events.back().at("name") == "900");
    std::ofstream(path.text(), std::ios::binary | std::ios::trunc) << after;
  }
  REQUIRE(::truncate(path.text().c_str(), 0) == 0);
  CHECK(append(lines(0, 2)) == TimelineFile::Outcome::Written);
  CHECK(read_timeline(path.text()).events.size() == 2);
}

/// What a program that copies files reads, and is not quick about: pieces, until there are no more.
/// With the file's lock.
std::string copy_in_pieces(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  REQUIRE(::flock(file, LOCK_SH) == 0);
  std::string copy;
  std::vector<char> piece(std::size_t{64} << 10);
  for (ssize_t bytes = 0; (bytes = ::read(file, piece.data(), piece.size())) > 0;) {
    copy.append(piece.data(), static_cast<std::size_t>(bytes));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ::close(file);
  return copy;
}

TEST_CASE("a copy that is made under the file's lock is valid, however fast ranks write") {
  const Path path("copied");
  const TimelineFile begun(path.text(), first_event(1));
  std::atomic<int> writing{3};
  std::atomic<int> unwritten{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank)
    ranks.emplace_back([&, rank] {
      TimelineFile file(path.text(), first_event(1));
      std::string events;
      for (int i = 0; i < 60; ++i)
        events += ",\n{\"ph\":\"i\",\"pid\":" + std::to_string(rank) +
                  ",\"tid\":0,\"ts\":" + std::to_string(i) + "}";
      for (int i = 0; i < 50; ++i) {
        unwritten += file.append(events, kMuch, "") == TimelineFile::Outcome::Written ? 0 : 1;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      --writing;
    });
  int wrong = 0;
  while (writing > 0) try {
      static_cast<void>(read_timeline_text(copy_in_pieces(path.text())));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // for them to write
    } catch (const std::exception&) {
      ++wrong;
    }
  for (auto& rank : ranks) rank.join();
  CHECK(unwritten == 0);
  CHECK(wrong == 0);
}

TEST_CASE(
    "files: begun once for a run, joined by the others, refused where they cannot be written") {
  const Path path("files");
  std::ofstream(path.text()) << "something else";
  const std::string first = first_event(1);
  const TimelineFile a(path.text(), first);
  TimelineFile b(path.text(), first);
  CHECK(b.append(",\n{\"ph\":\"i\",\"pid\":1,\"tid\":0,\"ts\":1}", kMuch, "") ==
        TimelineFile::Outcome::Written);
  const TimelineFile c(path.text(), first);  // another host that sees the same file
  CHECK(read_timeline(path.text()).events.size() == 2);
  const TimelineFile d(path.text(), first_event(2));
  CHECK(read_timeline(path.text()).events.size() == 1);
  CHECK_THROWS_AS(TimelineFile("/dev/null", first), InvalidArgument);
  CHECK_THROWS_AS(TimelineFile(path.text() + "/below/a/file", first), InvalidArgument);
}

TEST_CASE(
    "start fails on all ranks alike; off, nothing is noted and no file made; on again, a new "
    "file") {
  const Path path("start");
  ThreadWorld world({.size = 3, .domains = 1, .config = {}});
  Meeting meeting(3);
  world.run([&](int rank, Engine& engine) {
    std::vector<float> values(4);
    Timeline& timeline = engine.timeline();
    const auto start = [&](const std::string& where) {
      timeline.start(where, {}, kMuch, engine.topology(), meeting.of(rank));
    };
    reduce(engine, values, "before");
    CHECK_FALSE(timeline.on());
    CHECK_FALSE(path.exists());
    timeline.stop();
    CHECK_THROWS_WITH_AS(start("/proc/no/such/folder/file"),
                         "the timeline '/proc/no/such/folder/file' cannot be written: No such file "
                         "or directory (rank 0)",
                         InvalidArgument);
    CHECK_FALSE(timeline.on());
    for (int round = 0; round < 2; ++round) {
      start(path.text());
      CHECK(timeline.on());
      CHECK_THROWS_AS(start(path.text()), InvalidArgument);
      reduce(engine, values, round == 0 ? "first" : "second");
      timeline.stop();
      reduce(engine, values, "between");
      meeting.of(rank)({});
      const auto read = read_timeline(path.text());
      CHECK(read.named("ALLREDUCE", round == 0 ? "first" : "second").size() == 3);
      CHECK(read.named("ALLREDUCE").size() == 3);
      meeting.of(rank)({});
    }
  });
}

TEST_CASE("a timeline that is stopped with operations under way closes them") {
  const Path path("stopped");
  std::uint64_t id = 0;
  {
    Alone alone(path.text());
    id = alone.submit("pending");
    alone.timeline.stop();
    CHECK(read_timeline(path.text()).open == 0);
    alone.timeline.start(path.text(), {}, kMuch, Topology::single_domain(0, 1),
                         [](const Bytes& mine) { return std::vector<Bytes>{mine}; });
    alone.timeline.agreed(id, 0, true);  // of the file before
    alone.timeline.finished(id, {});
    alone.whole("next");
  }
  const auto read = read_timeline(path.text());
  CHECK(read.named("ALLREDUCE").size() == 1);
  CHECK(read.named("ALLREDUCE", "next").size() == 1);
}

}  // namespace hvd::test
