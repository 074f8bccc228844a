/// The parts of the core, each alone: signatures and verdicts, the planner, the table kept by records, the ledger's states, the board,
/// the configuration.

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <map>
#include <numeric>
#include <span>
#include <thread>

#include "hvd/base/affinity.h"
#include "hvd/base/text.h"
#include "hvd/config.h"
#include "hvd/engine/ledger.h"
#include "hvd/negotiation/board.h"
#include "hvd/negotiation/leader_tree.h"
#include "hvd/negotiation/negotiator.h"
#include "hvd/negotiation/planner.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

Signature signature_of(DataType dtype, Shape shape, OpKind kind = OpKind::Allreduce) {
  Signature signature;
  signature.kind = kind;
  signature.tensors.push_back({dtype, std::move(shape)});
  return signature;
}

/// Memory of a board whose ranks are of this process.
class BoardMemory {
 public:
  BoardMemory(int ranks, std::uint32_t slots)
      : bytes_(Board::bytes_needed(ranks, slots)),
        memory_(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    REQUIRE(memory_ != MAP_FAILED);
    Board::format(block(), ranks, slots);
  }
  ~BoardMemory() { ::munmap(memory_, bytes_); }
  BoardMemory(const BoardMemory&) = delete;
  BoardMemory& operator=(const BoardMemory&) = delete;
  [[nodiscard]] std::span<std::byte> block() const { return {static_cast<std::byte*>(memory_), bytes_}; }

 private:
  std::size_t bytes_;
  void* memory_;
};

SharedSignature shared(Signature signature) { return std::make_shared<const Signature>(std::move(signature)); }

AgreedUnit unit(std::uint32_t id, std::int64_t elements, DataType dtype = DataType::Float32) {
  return {id, 0, shared(signature_of(dtype, {elements})), {true}, {elements * static_cast<std::int64_t>(element_bytes(dtype))}};
}

std::vector<std::uint32_t> ids(const PlannedBatch& batch) {
  std::vector<std::uint32_t> result;
  for (const auto& tensor : batch.tensors) result.push_back(tensor.unit);
  return result;
}

class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

std::string refusal() {
  try {
    Config::from_environment();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a signature survives its encoding, and a cut or altered one is refused") {
  Signature signature = signature_of(DataType::BFloat16, {3, 0, 5}, OpKind::Broadcast);
  signature.tensors.push_back({DataType::Int64, {}});
  signature.root = 3;
  signature.prescale_factor = 0.1;
  Writer writer;
  encode(writer, signature);
  Reader reader(writer.bytes());
  CHECK(decode_signature(reader) == signature);
  CHECK(reader.at_end());
  for (std::size_t length = 0; length < writer.bytes().size(); ++length) {
    Reader cut_reader(std::span(writer.bytes()).first(length));
    CHECK_THROWS_AS(decode_signature(cut_reader), WireError);
  }
  Bytes altered = writer.bytes();
  altered[0] = std::byte{200};
  Reader altered_reader(altered);
  CHECK_THROWS_AS(decode_signature(altered_reader), WireError);
}

TEST_CASE("the verdict names what differs first, and groups the ranks by what they sent") {
  const std::vector<int> ranks{0, 1, 2, 5};
  const auto a = shared(signature_of(DataType::Float32, {17, 3}));
  const auto b = shared(signature_of(DataType::Float32, {18, 3}));
  const auto c = shared(signature_of(DataType::Float64, {18, 3}));
  CHECK(verdict("x", ranks, std::vector{a, a, a, a}).ok());
  const Status shape = verdict("x", ranks, std::vector{a, a, a, b});
  CHECK(shape.code() == Status::Code::Mismatch);
  CHECK(shape.text() == "allreduce 'x': the shape differs between ranks: ranks 0-2: float32 [17, 3]; rank 5: float32 [18, 3]");
  const Status dtype = verdict("x", ranks, std::vector{a, c, b, c});  // dtype and shape differ: dtype is told
  CHECK(
      dtype.text() ==
      "allreduce 'x': the data type differs between ranks: rank 0: float32 [17, 3]; ranks 1, 5: float64 [18, 3]; rank 2: float32 [18, 3]");
  // Only the first dimension of a gather may differ.
  const auto g1 = shared(signature_of(DataType::Int8, {4, 2}, OpKind::Allgather));
  const auto g2 = shared(signature_of(DataType::Int8, {0, 2}, OpKind::Allgather));
  const auto g3 = shared(signature_of(DataType::Int8, {4, 3}, OpKind::Allgather));
  CHECK(verdict("g", ranks, std::vector{g1, g2, g1, g2}).ok());
  CHECK_FALSE(verdict("g", ranks, std::vector{g1, g2, g3, g2}).ok());
  // A tensor deep in a group is shown, not the group's first ones.
  Signature many = signature_of(DataType::Float32, {1});
  for (int i = 0; i < 30; ++i) many.tensors.push_back({DataType::Float32, {i}});
  Signature other = many;
  other.tensors[20].shape = {999};
  CHECK(verdict("group", ranks, std::vector{shared(many), shared(many), shared(many), shared(other)}).text().find("[999]") !=
        std::string::npos);
}

TEST_CASE("rank lists are short") {
  CHECK(rank_list(std::vector{0, 1, 2, 5, 7, 8}) == "0-2, 5, 7-8");
  CHECK(rank_list(std::vector<int>{}).empty());
}

TEST_CASE("the planner fuses what can travel together, in order, up to the threshold") {
  std::deque<AgreedUnit> queue{unit(1, 100), unit(2, 100, DataType::Int32), unit(3, 100), unit(4, 1000), unit(5, 1)};
  auto batches = cut(queue, 1200);
  REQUIRE(batches.size() == 2);  // 400 + 400 + 400 bytes; the fourth is too large, and nothing overtakes it
  CHECK(ids(batches[0]) == std::vector<std::uint32_t>{1, 3});
  CHECK(ids(batches[1]) == std::vector<std::uint32_t>{2});
  batches = cut(queue, 1200);
  CHECK(ids(batches.at(0)) == std::vector<std::uint32_t>{4});  // larger than the threshold: alone
  CHECK(ids(cut(queue, 1200).at(0)) == std::vector<std::uint32_t>{5});
  CHECK(cut(queue, 1200).empty());

  queue = {unit(1, 10), unit(2, 10)};
  CHECK(ids(cut(queue, 0).at(0)) == std::vector<std::uint32_t>{1});  // no fusion
  CHECK(queue.size() == 1);

  // Other scales do not travel together, but what fits further back does.
  queue = {unit(1, 10), unit(2, 10), unit(3, 10)};
  Signature scaled = *queue[1].signature;
  scaled.postscale_factor = 2;
  queue[1].signature = shared(scaled);
  CHECK(ids(cut(queue, 1 << 20).at(0)) == std::vector<std::uint32_t>{1, 3});
  CHECK(ids(cut(queue, 1 << 20).at(0)) == std::vector<std::uint32_t>{2});
}

TEST_CASE("the planner keeps groups apart where it is asked to") {
  AgreedUnit group = unit(2, 10);
  Signature two = *group.signature;
  two.tensors.push_back(two.tensors.front());
  group = {2, 0, shared(two), {true, true}, {40, 40}, {}};
  std::deque<AgreedUnit> queue{unit(1, 10), group, unit(3, 10)};
  CHECK(ids(cut(queue, 1 << 20, true).at(0)) == std::vector<std::uint32_t>{1, 3});
  CHECK(ids(cut(queue, 1 << 20, true).at(0)) == std::vector<std::uint32_t>{2, 2});
  queue = {group, unit(3, 10)};
  CHECK(ids(cut(queue, 1 << 20, true).at(0)) == std::vector<std::uint32_t>{2, 2});
  queue = {group, unit(3, 10)};
  CHECK(ids(cut(queue, 1 << 20, false).at(0)) == std::vector<std::uint32_t>{2, 2, 3});
}

TEST_CASE("every pair of state and event") {
  using S = EntryState;
  using E = EntryEvent;
  const std::map<std::pair<S, E>, S> allowed{{{S::Waiting, E::Agree}, S::Agreed}, {{S::Agreed, E::Launch}, S::InFlight},
                                             {{S::InFlight, E::Finish}, S::Done}, {{S::Agreed, E::Finish}, S::Done},
                                             {{S::Waiting, E::Fail}, S::Failed},  {{S::Agreed, E::Fail}, S::Failed},
                                             {{S::InFlight, E::Fail}, S::Failed}};
  for (const auto state : {S::Waiting, S::Agreed, S::InFlight, S::Done, S::Failed})
    for (const auto event : {E::Agree, E::Launch, E::Finish, E::Fail}) {
      const auto next = allowed.find({state, event});
      if (next == allowed.end()) {
        CHECK_THROWS_AS(advance(state, event), std::logic_error);
      } else {
        CHECK(advance(state, event) == next->second);
      }
    }
}

TEST_CASE("two tables that read the same records are equal, and ids are used again") {
  const Topology topology = Topology::single_domain(0, 2);
  Negotiator writer(topology, {{0, {0, 1}, 0}}, 1 << 20, 8);
  Negotiator reader(topology, {{0, {0, 1}, 0}}, 1 << 20, 8);
  std::uint64_t position = 0;
  const auto say = [&](const Bytes& record) {
    position += record.size();
    Outcomes mine;
    Outcomes theirs;
    writer.apply(record, position, mine);
    reader.apply(record, position, theirs);
    CHECK(mine.batches.size() == theirs.batches.size());
    return mine;
  };
  const auto no_generation = [](std::uint32_t) { return 0U; };
  const UnitKey key{0, OpKind::Allreduce, "a"};
  const Signature signature = signature_of(DataType::Float32, {5});
  say(*writer.introduction(key, 0, signature, no_generation));
  say(*writer.introduction(key, 1, signature, no_generation));
  REQUIRE(reader.find(key) != nullptr);
  const auto id = reader.find(key)->id;
  CHECK(writer.find(key)->id == id);
  CHECK(reader.introduced(*reader.find(key), 1, signature));

  const auto agreed = say(Negotiator::agreement(id, {{true}, {}, -1}));
  REQUIRE(agreed.agreed.size() == 1);
  CHECK(agreed.agreed[0].verdict.ok());
  CHECK(reader.has_agreed(Scope::Domain));
  CHECK(reader.sets_with_agreed(Scope::Domain) == std::vector<int>{0});
  REQUIRE(reader.batches_of_next_cut(0) == 1);
  const auto batches = say(Negotiator::cut_record(0, std::vector<std::uint64_t>{77})).batches;
  REQUIRE(batches.size() == 1);
  CHECK(batches[0].sequence == 77);
  CHECK(batches[0].order == 1);
  CHECK_FALSE(reader.has_agreed(Scope::Domain));
  CHECK_FALSE(reader.has_agreed(0));

  // Eight slots: a group of seven does not fit beside 'a', but after it is forgotten.
  Signature group = signature;
  for (int i = 0; i < 7; ++i) group.tensors.push_back({DataType::Float32, {5}});
  CHECK_FALSE(writer.introduction({0, OpKind::Allreduce, "group"}, 0, group, no_generation).has_value());
  CHECK(writer.oldest([](std::uint32_t) { return true; }) == id);
  say(Negotiator::eviction(id));
  CHECK(reader.find(key) == nullptr);
  say(*writer.introduction({0, OpKind::Allreduce, "group"}, 0, group, no_generation));
  CHECK(reader.find({0, OpKind::Allreduce, "group"})->slots == 8);
  CHECK_FALSE(reader.has_free_slots(1));
}

TEST_CASE("records that make no sense are refused") {
  Negotiator table(Topology::single_domain(0, 2), {{0, {0, 1}, 0}}, 1 << 20, 8);
  Outcomes outcomes;
  CHECK_THROWS_AS(table.apply({}, 0, outcomes), WireError);
  CHECK_THROWS_AS(table.apply(Bytes(3, std::byte{77}), 0, outcomes), WireError);
  CHECK_THROWS(table.apply(Negotiator::agreement(5, {{true}, {}, -1}), 0, outcomes));
  CHECK_THROWS_AS(table.apply(Negotiator::eviction(5), 0, outcomes), WireError);
}

TEST_CASE("the board's log: all read the same, round and round; it is full until the slowest has read") {
  const BoardMemory memory(2, 16);
  Board writer(memory.block(), 0);
  Board reader(memory.block(), 1);
  std::uint64_t written = 0;
  std::uint64_t read = 0;
  bool was_full = false;
  for (int i = 0; i < 3000; ++i) {
    const Bytes record(1000 + static_cast<std::size_t>(i) * 7 % 5000, static_cast<std::byte>(i));
    const BoardLock lock(writer);
    if (!writer.has_room(record.size())) {
      was_full = true;
      while (auto one = reader.read_next()) {
        CHECK((*one)[0] == static_cast<std::byte>(read));
        CHECK(one->size() == 1000 + read * 7 % 5000);
        ++read;
      }
      REQUIRE(writer.has_room(record.size()));
    }
    writer.append(record);
    ++written;
  }
  while (reader.read_next()) ++read;
  CHECK(was_full);
  CHECK(read == written);
  CHECK_FALSE(writer.read_next().has_value());  // an appender has read what it wrote
}

TEST_CASE("the board's log: a record counts as read when its reader comes for the next, having acted on it") {
  const BoardMemory memory(2, 16);
  Board writer(memory.block(), 0);
  Board reader(memory.block(), 1);
  std::uint64_t after_first = 0;
  {
    const BoardLock lock(writer);
    writer.append(Bytes(7));
    after_first = writer.tail();
    writer.append(Bytes(9));
  }
  CHECK(reader.read_next()->size() == 7);
  CHECK(writer.read_position(1) == 0);
  CHECK(reader.read_next()->size() == 9);
  CHECK(writer.read_position(1) == after_first);
  CHECK_FALSE(reader.read_next().has_value());
  CHECK(writer.read_position(1) == writer.tail());
  CHECK(writer.slowest_reader() == writer.tail());
}

TEST_CASE("slots: arrivals, generations, and locations of two rounds") {
  const BoardMemory memory(2, 16);
  Board a(memory.block(), 0);
  Board b(memory.block(), 1);
  a.set_location(3, 11);
  CHECK(a.arrive(3, 0) == 1);
  CHECK_FALSE(a.has_arrived_too(3, 1));
  b.set_location(3, 12);
  CHECK(b.arrive(3, 0) == 2);
  CHECK(b.coming_location(3, 0) == 11);
  {
    const BoardLock lock(b);
    b.reset_arrivals(3, 1);
  }
  CHECK(a.has_arrived_too(3, 1));  // still asked about the round that is over
  a.set_location(3, 21);           // already in the next round
  CHECK(a.arrive(3, 0) == 1);
  CHECK(b.location(3, 0) == 11);  // what a late reader of the last round needs
  CHECK(b.coming_location(3, 0) == 21);
  {
    const BoardLock lock(b);
    CHECK_FALSE(b.evict(3));  // somebody is there
    CHECK(b.evict(4));
  }
  CHECK(a.arrive(4, 0) == 0);  // an old generation
  CHECK(a.arrive(4, 1) == 1);
}

TEST_CASE("the board's failure: known to whoever has said one, when two ranks say theirs at once") {
  constexpr int kRanks = 2;
  for (int round = 0; round < 2000; ++round) {
    const BoardMemory memory(kRanks, 1);
    std::array<Status, kRanks> seen;
    std::atomic<int> ready{0};
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < kRanks; ++rank)
      ranks.emplace_back([&, rank] {
        Board board(memory.block(), rank);
        const Status own{Status::Code::BackendError, "rank " + std::to_string(rank) + std::string(2000, '.')};
        ++ready;
        while (ready.load() < kRanks) std::this_thread::yield();
        board.set_failure(own);
        seen[static_cast<std::size_t>(rank)] = board.failure();
      });
    ranks.clear();
    for (const Status& status : seen) {
      REQUIRE(status.code() == Status::Code::BackendError);
      REQUIRE(status.text() == seen[0].text());
    }
  }
}

TEST_CASE("the configuration: values, Horovod's names, and what is not allowed") {
  CHECK(Config::from_environment().fusion_threshold_bytes == std::uint64_t{128} << 20);
  {
    const Variable horovod("HOROVOD_FUSION_THRESHOLD", "1000");
    CHECK(Config::from_environment().fusion_threshold_bytes == 1000);
    const Variable ours("HVD_FUSION_THRESHOLD", "0");
    CHECK(Config::from_environment().fusion_threshold_bytes == 0);
  }
  {
    const Variable wrong("HVD_FUSION_THRESHOLD", "abc");
    CHECK(refusal().find("HVD_FUSION_THRESHOLD: 'abc'") != std::string::npos);
    CHECK(refusal().find("bytes") != std::string::npos);
  }
  for (const char* value : {"-1", "1.5", "12x", "99999999999999999999999"}) {
    const Variable wrong("HVD_FUSION_THRESHOLD", value);
    CHECK(refusal().find(value) != std::string::npos);
  }
  {
    const Variable wrong("HVD_LOG_LEVEL", "loud");
    CHECK(refusal().find("trace, debug, info, warning, error, fatal, off") != std::string::npos);
  }
  {
    const Variable off("HOROVOD_STALL_CHECK_DISABLE", "1");
    CHECK(Config::from_environment().stall_check_disable);
  }
}

TEST_CASE("every knob is read under both names, and refuses what it does not understand") {
  struct Knob {
    std::string name, good, wrong, allowed;
    std::function<bool(const Config&)> holds;
  };
  using namespace std::chrono_literals;
  const std::vector<Knob> knobs{
      {"FUSION_THRESHOLD", "7", "x", "bytes, 0 to", [](const Config& c) { return c.fusion_threshold_bytes == 7; }},
      {"CACHE_CAPACITY", "99", "15", "tensors, 16 to", [](const Config& c) { return c.cache_capacity == 99; }},
      {"CYCLE_TIME", "3.5", "1e9", "milliseconds, 0 to 10000", [](const Config& c) { return c.cycle_time == 3500us; }},
      {"DISABLE_GROUP_FUSION", "1", "2", "one of 0, 1", [](const Config& c) { return c.disable_group_fusion; }},
      {"STALL_CHECK_TIME_SECONDS", "5", "0", "seconds, 1 to", [](const Config& c) { return c.stall_check_time == 5s; }},
      {"STALL_CHECK_DISABLE", "true", "no", "one of 0, 1", [](const Config& c) { return c.stall_check_disable; }},
      {"STALL_SHUTDOWN_TIME_SECONDS", "6", "-6", "seconds, 0 to", [](const Config& c) { return c.stall_shutdown_time == 6s; }},
      {"LOG_LEVEL", "debug", "DEBUGGING", "one of trace", [](const Config& c) { return c.log_level == LogLevel::Debug; }},
      {"TIMELINE_MARK_CYCLES", "1", "y", "one of 0, 1", [](const Config& c) { return c.timeline_mark_cycles; }},
      {"TIMELINE_MAX_BYTES", "70000", "1", "bytes, 65536 to", [](const Config& c) { return c.timeline_max_bytes == 70000; }},
      {"THREAD_AFFINITY", "0,12,3", "0,,3", "list of cores",
       [](const Config& c) {
         return c.thread_affinity == std::vector{0, 12, 3};
       }},
      {"NUM_NCCL_STREAMS", "4", "0", "streams, 1 to", [](const Config& c) { return c.num_nccl_streams == 4; }},
      {"NCCL_REGISTRATION", "window", "symmetric", "one of none, buffer, window",
       [](const Config& c) { return c.nccl_registration == NcclRegistration::Window; }},
      {"AUTOTUNE", "1", "on", "one of 0, 1", [](const Config& c) { return c.autotune; }},
      {"HIERARCHICAL_ALLREDUCE", "1", "?", "one of 0, 1", [](const Config& c) { return c.hierarchical_allreduce; }},
      {"ELASTIC", "1", "maybe", "one of 0, 1", [](const Config& c) { return c.elastic; }},
      {"SHARED_MEMORY", "off", "on", "one of auto, off", [](const Config& c) { return c.shared_memory == SharedMemory::Off; }},
      {"DIRECT_COPIES", "off", "on", "one of auto, off", [](const Config& c) { return c.direct_copies == DirectCopies::Off; }},
      {"GPU_BACKEND", "staged", "nvlink", "one of auto, nccl, shared, staged",
       [](const Config& c) { return c.gpu_backend == GpuBackend::Staged; }},
      {"ARENA_BYTES", "1048576", "1", "bytes, 1048576 to", [](const Config& c) { return c.arena_bytes == 1 << 20; }},
      {"TIMELINE", "a/b", "", "", [](const Config& c) { return c.timeline == "a/b"; }},
      {"AUTOTUNE_LOG", "c", "", "", [](const Config& c) { return c.autotune_log == "c"; }},
  };
  for (const auto& knob : knobs) {
    CAPTURE(knob.name);
    CHECK_FALSE(knob.holds(Config::from_environment()));
    for (const std::string prefix : {"HOROVOD_", "HVD_"}) {
      const std::string name = prefix + knob.name;
      {
        const Variable good(name.c_str(), knob.good.c_str());
        CHECK(knob.holds(Config::from_environment()));
      }
      if (knob.wrong.empty()) continue;
      const Variable wrong(name.c_str(), knob.wrong.c_str());
      CHECK(refusal().find(name + ": '" + knob.wrong + "' is not allowed") == 0);
      CHECK(refusal().find(knob.allowed) != std::string::npos);
    }
  }
  for (const char* value : {"0,", ",", "0 1", "1024", "-1", "0;1", "a"}) {
    const Variable wrong("HVD_THREAD_AFFINITY", value);
    CHECK(refusal().find(value) != std::string::npos);
  }
  for (const char* value : {"nan", "inf", "-1", "1ms", "10000.1"}) {
    const Variable wrong("HVD_CYCLE_TIME", value);
    CHECK(refusal().find(value) != std::string::npos);
  }
  const Variable later("HOROVOD_TIMELINE", "DYNAMIC");
  CHECK(Config::from_environment().timeline.empty());
}

TEST_CASE("what ranks must agree on is told apart; what does nothing is remarked on") {
  const auto usual = shared_part({});
  for (const auto& change : std::vector<std::function<void(Config&)>>{
           [](Config& c) { c.fusion_threshold_bytes = 1; }, [](Config& c) { c.cache_capacity = 17; },
           [](Config& c) { c.disable_group_fusion = true; }, [](Config& c) { c.shared_memory = SharedMemory::Off; },
           [](Config& c) { c.process_sets = {{0}}; }, [](Config& c) { c.timeline = "t"; }, [](Config& c) { c.num_nccl_streams = 2; },
           [](Config& c) { c.elastic = true; }, [](Config& c) { c.gpu_backend = GpuBackend::Shared; },
           [](Config& c) { c.hierarchical_allreduce = true; }, [](Config& c) { c.nccl_registration = NcclRegistration::Buffer; }}) {
    Config config;
    change(config);
    CHECK(shared_part(config) != usual);
  }
  Config config;
  CHECK(remarks(config).empty());
  config.autotune = config.elastic = true;
  REQUIRE(remarks(config).size() == 2);
  CHECK(remarks(config)[0].find("HVD_AUTOTUNE") == 0);
}

TEST_CASE("cores to pin to: one for each rank of the host, of those there are") {
  CHECK(affinity_problem({}, 3, 4).empty());
  CHECK(affinity_problem({0}, 0, 2).find("'0' is not allowed; it must be a core for each of the 2 ranks") != std::string::npos);
  CHECK(affinity_problem({0, 1023}, 1, 2).find("'0,1023' is not allowed; it must be of the cores that the process may use: ") !=
        std::string::npos);
}

TEST_CASE("the relay: 1 to 9 domains agree, whoever is ready first") {
  for (int domains = 2; domains <= 9; ++domains) {
    CAPTURE(domains);
    auto mail = std::make_shared<Mailboxes>(domains);
    struct Leader {
      std::unique_ptr<MailTransport> transport;
      std::unique_ptr<LeaderTree> relay;
      std::map<std::string, int> introduced;
      std::vector<std::string> agreed;
      int cuts = 0;
      int ends = 0;
      std::vector<std::string> conflicts;
      std::vector<bool> present;
      std::vector<int> absent;
      std::vector<int> left;
    };
    std::vector<int> all(static_cast<std::size_t>(domains));
    std::iota(all.begin(), all.end(), 0);
    std::vector<Leader> leaders(static_cast<std::size_t>(domains));
    for (int d = 0; d < domains; ++d) {
      Leader& leader = leaders[static_cast<std::size_t>(d)];
      leader.transport = std::make_unique<MailTransport>(mail, d, domains);
      LeaderTreeActions actions;
      actions.introduce = [&leader](const UnitKey& key, const Runs& ranks, const Signature&) {
        for (const Run run : ranks) leader.introduced[key.name] += run.count;
      };
      actions.agree = [&leader](const UnitKey& key, const Agreement& what) {
        leader.agreed.push_back(key.name);
        leader.present = what.present;
        leader.absent = what.absent;
      };
      actions.end = [&leader] { ++leader.ends; };
      actions.conflict = [&leader](int, const std::string& name, const std::vector<StuckRank>&) { leader.conflicts.push_back(name); };
      actions.credit = [](int, int, std::uint64_t) {};
      actions.cut = [&leader](int) { return ++leader.cuts > 0; };
      actions.refuse = [](const UnitKey&, int) {};
      actions.leave = [&leader](int rank) { leader.left.push_back(rank); };
      actions.fail = [](const Status&) {};
      actions.drop = [](const UnitKey&) { return true; };
      actions.ranks_of = [&all](int) { return &all; };
      actions.domain_of = [](int rank) { return rank; };
      leader.relay = std::make_unique<LeaderTree>(*leader.transport, std::move(actions));
    }
    const auto settle = [&] {
      for (bool any = true; any;) {
        any = false;
        for (auto& leader : leaders) any = leader.relay->advance() || any;
      }
    };
    const Signature signature = signature_of(DataType::Float32, {4});
    for (int round = 0; round < 2; ++round)
      for (int d = domains - 1; d >= 0; --d) {
        auto& relay = *leaders[static_cast<std::size_t>(d)].relay;
        const UnitKey key{0, OpKind::Allreduce, "t"};
        if (round == 0) relay.tell({LocalEvent::Kind::Introduced, key, d, std::make_shared<const Signature>(signature)});
        relay.tell({LocalEvent::Kind::Ready, key, -1, nullptr, {{d == 1}, {}, -1}});
        settle();
        CHECK(leaders[0].agreed.size() == static_cast<std::size_t>(d == 0 ? round + 1 : round));
      }
    // One rank joins: it is waited for no more, whether it does so before the others are ready or after.
    const UnitKey key{0, OpKind::Allreduce, "t"};
    for (const bool before : {true, false}) {
      if (before) leaders[1].relay->tell({LocalEvent::Kind::Joined, {0, OpKind::Join, {}}, 1});
      for (int d = 0; d < domains; ++d)
        if (d != 1) leaders[static_cast<std::size_t>(d)].relay->tell({LocalEvent::Kind::Ready, key, -1, nullptr, {{true}, {}, -1}});
      settle();
      CHECK(leaders[0].agreed.size() == (before ? 3 : 4));
      CHECK(leaders[0].absent == std::vector<int>{1});
    }
    // Ranks that wait for different operations under one name: found when all have said so. What was said before a decision is stale.
    const auto stuck_rank = [&](int d, OpKind kind) { leaders[static_cast<std::size_t>(d)].relay->stuck(0, "x", {{d, kind}}); };
    for (int d = 0; d < domains; ++d) {
      settle();
      CHECK(leaders[0].conflicts.empty());
      stuck_rank(d, d == 1 ? OpKind::Broadcast : OpKind::Allreduce);
    }
    settle();
    for (const auto& leader : leaders) CHECK(leader.conflicts == std::vector<std::string>{"x"});
    leaders[0].relay->announce_cut(0);
    for (int d = 0; d < domains; ++d) {
      CHECK_FALSE(leaders[0].relay->all_left());
      leaders[static_cast<std::size_t>(d)].relay->tell({LocalEvent::Kind::Left, {}, d});
      settle();
    }
    CHECK(leaders[0].relay->all_left());
    leaders[0].relay->announce_end();
    settle();
    for (int d = 0; d < domains; ++d) {
      const Leader& leader = leaders[static_cast<std::size_t>(d)];
      CHECK(leader.agreed == std::vector<std::string>{"t", "t", "t", "t"});
      CHECK(leader.present == std::vector<bool>{true});
      CHECK(leader.cuts == (d == 0 ? 0 : 1));
      CHECK(leader.introduced.at("t") >= domains - 1);  // of all other domains' ranks
      CHECK(leader.left.size() == static_cast<std::size_t>(domains - 1));
      CHECK(leader.ends == (d == 0 ? 0 : 1));
    }
  }
}

}  // namespace hvd::test
