#include "tests/support/thread_world.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <new>
#include <numeric>

#include "ops/host_ops.h"
#include "ops/kernels/reduce.h"
#include "ops/shm/shm_backend.h"

namespace hvd::test {

namespace {

/// Where the ranks of a batch that spans domains meet: the last to come computes for all.
struct Rendezvous {
  struct Meeting {
    std::map<int, Batch*> batches;
    std::size_t gone = 0;
    bool computed = false;
  };
  std::mutex mutex;
  std::map<std::pair<int, std::uint64_t>, Meeting> meetings;  // by process set and order
};

class RendezvousExecution final : public Execution {
 public:
  RendezvousExecution(Rendezvous& place, Batch batch, int rank)
      : place_(place), batch_(std::move(batch)), rank_(rank) {
    const std::lock_guard lock(place_.mutex);
    meeting().batches[rank_] = &batch_;
    if (meeting().batches.size() == batch_.ranks.size()) compute();
  }
  /// Of a world that has failed it may be given up before all have come: nobody is to find it then.
  ~RendezvousExecution() override {
    const std::lock_guard lock(place_.mutex);
    const auto found = place_.meetings.find(key());
    if (!left_ && found != place_.meetings.end()) found->second.batches.erase(rank_);
  }
  RendezvousExecution(const RendezvousExecution&) = delete;
  RendezvousExecution& operator=(const RendezvousExecution&) = delete;
  Progress advance() override {
    const std::lock_guard lock(place_.mutex);
    if (!meeting().computed) return Progress::Idle;
    if (!left_ && ++meeting().gone == batch_.ranks.size()) {
      place_.meetings.erase(key());
    }
    left_ = true;
    return Progress::Done;
  }

 private:
  [[nodiscard]] std::pair<int, std::uint64_t> key() const {
    return {batch_.traits.set->id, batch_.order};
  }
  Rendezvous::Meeting& meeting() { return place_.meetings[key()]; }
  [[nodiscard]] std::size_t bytes(std::int64_t count) const {
    return static_cast<std::size_t>(count) * element_bytes(batch_.traits.dtype);
  }
  void compute() {
    for (std::size_t m = 0; m < batch_.members.size(); ++m) {
      if (batch_.traits.kind == OpKind::Allgather || batch_.traits.kind == OpKind::Alltoall) {
        pull(m);
      } else if (batch_.traits.kind == OpKind::Broadcast) {
        const void* source = member(batch_.traits.root, m).input;
        for (const int rank : batch_.ranks)
          if (member(rank, m).count > 0)
            std::memmove(member(rank, m).output, source, bytes(member(rank, m).count));
      } else {
        reduce(m);
      }
    }
    meeting().computed = true;
  }
  const BatchMember& member(int rank, std::size_t m) { return meeting().batches[rank]->members[m]; }

  void pull(std::size_t m) {
    for (const int rank : batch_.ranks) {
      auto* to = static_cast<std::byte*>(member(rank, m).output);
      for (std::size_t i = 0; i < batch_.ranks.size(); ++i) {
        const auto& own = member(rank, m);
        const auto* from = static_cast<const std::byte*>(member(batch_.ranks[i], m).input);
        const std::size_t size = bytes(own.counts[i]);
        if (size > 0)
          std::memcpy(to, from + (own.offsets.empty() ? 0 : bytes(own.offsets[i])), size);
        to += size;
      }
    }
  }

  void reduce(std::size_t m) {
    const auto& t = batch_.traits;
    const auto count = static_cast<std::size_t>(batch_.members[m].count);
    Bytes result(bytes(batch_.members[m].count));
    std::vector<const void*> inputs;
    const Bytes zeros(result.size(), std::byte{0});
    const bool adasum = t.op == ReduceOp::Adasum;
    for (const int rank : t.set->ranks) {
      const bool takes_part = std::binary_search(batch_.ranks.begin(), batch_.ranks.end(), rank);
      inputs.push_back(takes_part ? member(rank, m).input : zeros.data());
    }
    std::vector<void*> outputs{result.data()};
    adasum ? kernels::adasum(reduction_of(t), inputs, outputs, count)
           : kernels::reduce(reduction_of(t), inputs, outputs, count);
    for (const int rank : batch_.ranks) {
      const auto& own = member(rank, m);
      if (t.kind == OpKind::Reducescatter) {
        const int place = meeting().batches[rank]->traits.set->rank;
        const auto begin =
            bytes(std::accumulate(own.counts.begin(), own.counts.begin() + place, std::int64_t{0}));
        const auto size = bytes(own.counts[static_cast<std::size_t>(place)]);
        if (size > 0) std::memcpy(own.output, result.data() + begin, size);
      } else if (count > 0) {
        std::memcpy(own.output, result.data(), result.size());
      }
    }
  }
  Rendezvous& place_;
  Batch batch_;
  int rank_;
  bool left_ = false;
};

/// Blocks of small operations that come back on all ranks of several domains: ordinary memory, for
/// all ranks are threads. A domain contributes its ranks' inputs.
class CommonMemory final : public LeaderMemory {
 public:
  explicit CommonMemory(Topology topology) : topology_(std::move(topology)) {}
  std::optional<std::uint64_t> keep(const BatchTraits& traits, std::size_t bytes) override {
    if (traits.op == ReduceOp::Adasum && traits.kind == OpKind::Allreduce) return std::nullopt;
    auto block = std::make_unique<Bytes>(bytes);
    const std::uint64_t location = reinterpret_cast<std::uint64_t>(block->data()) | kKept;
    const std::lock_guard lock(mutex_);
    blocks_.emplace(location, std::move(block));
    return location;
  }
  void drop(std::uint64_t location) noexcept override {
    const std::lock_guard lock(mutex_);
    blocks_.erase(location);
  }
  bool is_free(std::uint64_t /*location*/) override { return true; }
  std::byte* kept(int /*index*/, std::uint64_t location) override {
    return (location & kKept) != 0 ? reinterpret_cast<std::byte*>(location & ~kKept) : nullptr;
  }
  std::size_t contribution_bytes(const BatchTraits& traits, std::int64_t count) override {
    return static_cast<std::size_t>(topology_.size) * bytes(traits, count);
  }
  void contribute(const BatchTraits& traits, std::int64_t count,
                  std::span<const std::byte* const> blocks, Bytes& message) override {
    for (const std::byte* const block : blocks)
      message.insert(message.end(), block, block + bytes(traits, count));
  }
  void combine(const BatchTraits& traits, std::int64_t count,
               std::span<const std::span<const std::byte>> contributions,
               std::span<std::byte* const> blocks, std::span<const std::int64_t> parts) override {
    const std::size_t each = bytes(traits, count);
    std::vector<const void*> inputs;
    Bytes all;
    for (int rank = 0; rank < topology_.size; ++rank) {
      const auto& of_rank = topology_.domain_of_rank;
      const auto domain = static_cast<std::size_t>(of_rank[static_cast<std::size_t>(rank)]);
      const auto before =
          std::count(of_rank.begin(), of_rank.begin() + rank, static_cast<int>(domain));
      const std::byte* const input =
          contributions[domain].data() + static_cast<std::size_t>(before) * each;
      inputs.push_back(input);
      all.insert(all.end(), input, input + each);
    }
    if (each == 0) return;
    if (traits.kind == OpKind::Allgather) {
      for (std::byte* const block : blocks) std::memcpy(block, all.data(), all.size());
    } else if (traits.kind == OpKind::Broadcast) {
      for (std::byte* const block : blocks)
        std::memcpy(block, inputs[static_cast<std::size_t>(traits.root)], each);
    } else if (traits.kind == OpKind::Alltoall) {
      for (std::size_t here = 0; here < blocks.size(); ++here) {
        const int own = topology_.domain_ranks[here];
        const std::size_t before =
            bytes(traits, std::accumulate(parts.begin(), parts.begin() + own, std::int64_t{0}));
        const std::size_t part = bytes(traits, parts[static_cast<std::size_t>(own)]);
        for (std::size_t from = 0; part > 0 && from < inputs.size(); ++from)
          std::memcpy(blocks[here] + from * part,
                      static_cast<const std::byte*>(inputs[from]) + before, part);
      }
    } else {
      const std::vector<void*> outputs(blocks.begin(), blocks.end());
      kernels::reduce(reduction_of(traits), inputs, outputs, static_cast<std::size_t>(count));
    }
  }

 private:
  static constexpr std::uint64_t kKept = std::uint64_t{1} << 61;
  static std::size_t bytes(const BatchTraits& traits, std::int64_t count) {
    return static_cast<std::size_t>(count) * element_bytes(traits.dtype);
  }
  const Topology topology_;
  std::mutex mutex_;
  std::map<std::uint64_t, std::unique_ptr<Bytes>> blocks_;
};

class RendezvousBackend final : public Backend {
 public:
  RendezvousBackend(std::shared_ptr<Rendezvous> place, const Topology& topology)
      : place_(std::move(place)), rank_(topology.rank), memory_(topology) {}
  LeaderMemory* leader_memory() override { return &memory_; }
  std::string_view name() const override { return "rendezvous"; }
  bool supports(const BatchTraits& traits) const override {
    return traits.device.kind == DeviceKind::Cpu && host_supports(traits);
  }
  std::unique_ptr<Execution> launch(Batch batch) override {
    return std::make_unique<RendezvousExecution>(*place_, std::move(batch), rank_);
  }

 private:
  std::shared_ptr<Rendezvous> place_;
  int rank_;
  CommonMemory memory_;
};

std::vector<ProcessSetInfo> make_sets(const WorldOptions& options, int rank) {
  std::vector<int> everyone(static_cast<std::size_t>(options.size));
  std::iota(everyone.begin(), everyone.end(), 0);
  std::vector<ProcessSetInfo> sets{{0, everyone, rank}};
  for (const auto& ranks : options.config.process_sets) {
    const auto place = std::find(ranks.begin(), ranks.end(), rank);
    sets.push_back({static_cast<int>(sets.size()), ranks,
                    place == ranks.end() ? -1 : static_cast<int>(place - ranks.begin())});
  }
  return sets;
}

DomainMemory map_memory(int ranks, std::uint32_t slots, std::size_t arena_bytes) {
  const std::size_t board = Board::bytes_needed(ranks, slots);
  const std::size_t total = board + static_cast<std::size_t>(ranks) * arena_bytes;
  void* base = ::mmap(nullptr, total, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  DomainMemory memory;
  auto* bytes = static_cast<std::byte*>(base);
  memory.board = {bytes, board};
  for (int rank = 0; rank < ranks; ++rank)
    memory.arenas.push_back(
        {bytes + board + static_cast<std::size_t>(rank) * arena_bytes, arena_bytes});
  memory.owner = std::shared_ptr<void>(base, [total](void* address) { ::munmap(address, total); });
  return memory;
}

}  // namespace

Watchdog::Watchdog(std::string what, std::chrono::seconds limit, std::function<std::string()> state)
    : thread_([this, what = std::move(what), limit, state = std::move(state)] {
        std::unique_lock lock(mutex_);
        if (!done_.wait_for(lock, limit, [this] { return over_; })) {
          std::fprintf(stderr, "WATCHDOG: %s hangs: %s\n", what.c_str(),
                       state ? state().c_str() : "");
          std::_Exit(99);
        }
      }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  done_.notify_all();
  thread_.join();
}

void Mailboxes::put(int to, Message message) {
  const std::lock_guard lock(mutex_);
  boxes_.at(static_cast<std::size_t>(to)).push_back(std::move(message));
}

std::optional<Message> Mailboxes::take(int owner) {
  const std::lock_guard lock(mutex_);
  auto& box = boxes_.at(static_cast<std::size_t>(owner));
  if (box.empty()) return std::nullopt;
  Message message = std::move(box.front());
  box.pop_front();
  return message;
}

void MailTransport::send(int to, SharedBytes message) { mail_->put(to, {domain_, *message}); }

ThreadWorld::ThreadWorld(WorldOptions options) : options_(std::move(options)) {
  const int size = options_.size;
  const int domains = std::min(options_.domains, size);
  auto mail = std::make_shared<Mailboxes>(domains);
  auto peer_mail = std::make_shared<Mailboxes>(size);
  auto meeting_place = std::make_shared<Rendezvous>();
  if (options_.config.cache_capacity == Config().cache_capacity)
    options_.config.cache_capacity = 4096;
  engines_.resize(static_cast<std::size_t>(size));
  arenas_.resize(static_cast<std::size_t>(size));
  std::vector<int> domain_of(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank)
    domain_of[static_cast<std::size_t>(rank)] = rank * domains / size;
  for (int domain = 0; domain < domains; ++domain) {
    std::vector<int> ranks;
    for (int rank = 0; rank < size; ++rank)
      if (domain_of[static_cast<std::size_t>(rank)] == domain) ranks.push_back(rank);
    DomainMemory memory =
        map_memory(static_cast<int>(ranks.size()), options_.config.cache_capacity,
                   std::min<std::size_t>(options_.config.arena_bytes, std::size_t{256} << 20));
    memory.direct_copies = options_.config.direct_copies != DirectCopies::Off;
    memory.slow_copies = options_.config.direct_copies == DirectCopies::Relayed;
    Board::format(memory.board, static_cast<int>(ranks.size()), options_.config.cache_capacity);
    for (std::size_t index = 0; index < ranks.size(); ++index) {
      const int rank = ranks[index];
      EngineParts parts;
      parts.config = options_.config;
      parts.memory = memory.owner;
      Topology& topology = parts.topology;
      topology.cores = options_.cores;
      topology.rank = rank;
      topology.size = size;
      topology.local_rank = topology.domain_index = static_cast<int>(index);
      topology.local_size = static_cast<int>(ranks.size());
      topology.domains = topology.cross_size = domains;
      topology.domain = topology.cross_rank = domain;
      topology.domain_of_rank = domain_of;
      topology.domain_ranks = ranks;
      parts.process_sets = make_sets(options_, rank);
      parts.board = std::make_unique<Board>(memory.board, static_cast<int>(index));
      auto arena = make_arena(memory, static_cast<int>(index));
      arenas_[static_cast<std::size_t>(rank)] = arena;
      parts.backends.push_back(
          std::make_unique<ShmBackend>(memory, arena, *parts.board, topology, parts.stats));
      parts.backends.push_back(std::make_unique<RendezvousBackend>(meeting_place, topology));
      if (domains > 1)
        (index == 0 ? parts.transport : parts.alarm) =
            std::make_unique<MailTransport>(mail, domain, domains, index == 0);
      if (domains > 1) parts.peers = std::make_unique<MailTransport>(peer_mail, rank, size);
      if (options_.add_backends) options_.add_backends(rank, parts, arena);
      if (options_.customize) options_.customize(rank, parts);
      engines_[static_cast<std::size_t>(rank)] = std::make_unique<Engine>(std::move(parts));
    }
  }
}

ThreadWorld::~ThreadWorld() = default;

void ThreadWorld::run(const std::function<void(int, Engine&)>& body, bool shut_down) {
  std::vector<std::atomic<int>> stages(static_cast<std::size_t>(size()));
  const Watchdog watchdog("a thread world", options_.limit, [&] {
    std::string text;
    for (int rank = 0; rank < size(); ++rank) {
      const int stage = stages[static_cast<std::size_t>(rank)].load();
      text += "rank " + std::to_string(rank) +
              (stage == 0   ? " in its body; "
               : stage == 1 ? " in shutdown; "
                            : " done; ");
    }
    return text;
  });
  std::exception_ptr first;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size(); ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank, engine(rank));
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
      stages[static_cast<std::size_t>(rank)] = 1;
      if (shut_down) engine(rank).shutdown();
      stages[static_cast<std::size_t>(rank)] = 2;
    });
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace hvd::test
