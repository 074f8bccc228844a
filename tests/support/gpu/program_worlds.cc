#include "tests/support/gpu/program_worlds.h"

#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <span>
#include <stdexcept>
#include <utility>

#include "hvd/negotiation/board/board.h"
#include "ops/gpu/ipc/shared_gpu_backend.h"
#include "ops/gpu/staged/staged_backend.h"
#include "tests/support/gpu/nccl_world.h"

namespace hvd::gpu::test {

namespace {

/// What the drivers of all ranks have in common.
struct Common {
  World& world;
  const ProgramDraw& program;
  int& arrived;  ///< ranks that have come to where all meet
};

/// Ends the program where another rank's has failed.
void require_alive(const Common& common, Backend& backend) {
  if (!common.world.failed) return;
  backend.abort();
  throw std::runtime_error("another rank has failed");
}

/// Returns when all ranks have come here.
void meet(const Common& common, const Rank& self) {
  HappensBefore& order = common.world.cluster.order();
  order.tell(&common.arrived);
  const int round = common.arrived++ / common.program.ranks + 1;
  while (common.arrived < round * common.program.ranks && !common.world.failed)
    common.world.pass(self.rank);
  order.hear(&common.arrived);
}

Batch batch_of(std::size_t step, const BatchTraits& traits, std::vector<BatchMember> members) {
  Batch batch;
  batch.sequence = step + 1;
  batch.order = step;
  batch.traits = traits;
  batch.ranks = traits.set->ranks;
  batch.members = std::move(members);
  return batch;
}

class NcclDriver final : public ProgramDriver {
 public:
  NcclDriver(const Common& common, Rank& self) : common_(common), self_(self) {}
  std::unique_ptr<Execution> launch(std::size_t step, const BatchTraits& traits,
                                    std::vector<BatchMember> members) override {
    return self_.backend->launch(batch_of(step, traits, std::move(members)));
  }
  Progress advance(std::size_t /*step*/, Execution& execution) override {
    require_alive(common_, *self_.backend);
    return execution.advance();
  }
  std::shared_ptr<void> allocate(const BatchTraits& traits, std::size_t bytes) override {
    return self_.backend->allocate(traits, bytes);
  }
  bool abandon() override {
    meet(common_, self_);
    return self_.backend->abort();
  }
  void idle() override { common_.world.pass(self_.rank); }

 private:
  const Common common_;
  Rank& self_;
};

/// What ranks of a domain have in common on the host: the board, and what they tell each other of
/// their tensors.
class Domain {
 public:
  explicit Domain(int ranks)
      : ranks_(ranks),
        bytes_(Board::bytes_needed(ranks, kSlots)),
        memory_(static_cast<std::byte*>(::operator new(bytes_, kAlignment))) {
    std::memset(memory_.get(), 0, bytes_);
    Board::format(span(), ranks, kSlots);
    for (int rank = 0; rank < ranks; ++rank) controls_.emplace_back();
  }
  std::span<std::byte> span() { return {memory_.get(), bytes_}; }
  std::vector<SharedControl*> controls() {
    std::vector<SharedControl*> all;
    for (auto& control : controls_) all.push_back(&control);
    return all;
  }
  /// What hosts tell each other of a batch.
  const void* subject(std::size_t step) { return &said_.try_emplace(step).first->second; }
  struct Told {
    std::vector<std::vector<std::uint64_t>> locations;  ///< by tensor and rank
    int ranks = 0;                                      ///< that have told
  };
  Told& told(std::size_t step, std::size_t tensors) {
    Told& told = told_[step];
    told.locations.resize(tensors, std::vector<std::uint64_t>(static_cast<std::size_t>(ranks_)));
    return told;
  }
  /// Whether the caller is the first.
  bool opens(std::size_t step) { return opened_.insert(step).second; }
  [[nodiscard]] int ranks() const { return ranks_; }

 private:
  static constexpr std::uint32_t kSlots = 16;
  static constexpr std::align_val_t kAlignment{4096};
  struct Deleter {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
  };
  const int ranks_;
  const std::size_t bytes_;
  std::unique_ptr<std::byte, Deleter> memory_;
  std::deque<SharedControl> controls_;
  std::map<std::size_t, char> said_;
  std::map<std::size_t, Told> told_;
  std::set<std::size_t> opened_;
};

/// A driver of ranks that share memory on the host. What one rank knows, another learns by the
/// batch's state alone, or by the batch's end.
class DomainDriver : public ProgramDriver {
 public:
  DomainDriver(const Common& common, Rank& self, Domain& domain, Backend& backend, Board* board)
      : common_(common), self_(self), domain_(domain), backend_(backend), board_(board) {}

  void prepare(std::size_t step, const BatchTraits& traits,
               std::vector<BatchMember>& members) override {
    // whose places may be given to others
    for (const std::size_t over : finished_) order().hear(domain_.subject(over));
    Domain::Told& told = domain_.told(step, members.size());
    for (std::size_t tensor = 0; tensor < members.size(); ++tensor)
      told.locations[tensor][static_cast<std::size_t>(self_.rank)] =
          backend_.prepare(traits, members[tensor]);
    ++told.ranks;
    while (told.ranks < domain_.ranks()) wait();
    for (std::size_t tensor = 0; tensor < members.size(); ++tensor)
      members[tensor].locations = told.locations[tensor];
  }
  std::unique_ptr<Execution> launch(std::size_t step, const BatchTraits& traits,
                                    std::vector<BatchMember> members) override {
    if (board_ != nullptr && domain_.opens(step)) {
      const BoardLock lock(*board_);
      board_->batches().open(step + 1, 0);
    }
    order().hear(domain_.subject(step));
    auto execution = backend_.launch(batch_of(step, traits, std::move(members)));
    order().tell(domain_.subject(step));
    return execution;
  }
  Progress advance(std::size_t step, Execution& execution) override {
    require_alive(common_, backend_);
    order().hear(domain_.subject(step));
    return execution.advance();
  }
  void finish(std::size_t step) override {
    order().tell(domain_.subject(step));
    finished_.push_back(step);
    if (board_ != nullptr)
      board_->batches().depart(step + 1, static_cast<std::uint32_t>(domain_.ranks()));
  }
  std::shared_ptr<void> allocate(const BatchTraits& traits, std::size_t bytes) override {
    return backend_.allocate(traits, bytes);
  }
  bool abandon() override {
    meet(common_, self_);
    return backend_.abort();
  }
  void idle() override { common_.world.pass(self_.rank); }

 private:
  HappensBefore& order() { return common_.world.cluster.order(); }
  void wait() {
    require_alive(common_, backend_);
    idle();
  }

  const Common common_;
  Rank& self_;
  Domain& domain_;
  Backend& backend_;
  Board* const board_;
  std::vector<std::size_t> finished_;
};

/// What ranks bring to sums of host tensors, and roots to broadcasts.
class HostSums {
 public:
  explicit HostSums(int ranks) : ranks_(static_cast<std::size_t>(ranks)) {}
  std::vector<std::vector<double>>& given(std::uint64_t sequence, std::size_t member) {
    return given_[{sequence, member}];
  }
  [[nodiscard]] std::size_t ranks() const { return ranks_; }

 private:
  const std::size_t ranks_;
  std::map<std::pair<std::uint64_t, std::size_t>, std::vector<std::vector<double>>> given_;
};

/// A backend of host tensors by ranks that meet in this process. Says which memory of the host it
/// reads and writes.
class HostSummer final : public Backend {
 public:
  HostSummer(HostCluster& cluster, HostSums& sums) : cluster_(cluster), sums_(sums) {}
  std::string_view name() const override { return "sums"; }
  bool supports(const BatchTraits& traits) const override {
    const bool sums = traits.kind == OpKind::Allreduce && traits.op == ReduceOp::Sum;
    return traits.device.kind == DeviceKind::Cpu && (sums || traits.kind == OpKind::Broadcast);
  }
  std::unique_ptr<Execution> launch(Batch batch) override {
    return std::make_unique<Summing>(*this, std::move(batch));
  }

 private:
  class Summing final : public Execution {
   public:
    Summing(HostSummer& owner, Batch batch) : owner_(owner), batch_(std::move(batch)) {}
    Progress advance() override {
      const bool broadcasts = batch_.traits.kind == OpKind::Broadcast;
      const bool brings = !broadcasts || batch_.traits.root == batch_.traits.set->rank;
      if (!std::exchange(given_, true) && brings) give();
      for (std::size_t member = 0; member < batch_.members.size(); ++member)
        if (owner_.sums_.given(batch_.sequence, member).size() <
            (broadcasts ? 1 : owner_.sums_.ranks()))
          return Progress::Idle;
      for (std::size_t member = 0; member < batch_.members.size(); ++member) take(member);
      return Progress::Done;
    }

   private:
    void use(UseOfMemory use) { owner_.cluster_.order().host_uses(use); }
    void give() {
      for (std::size_t m = 0; m < batch_.members.size(); ++m) {
        const BatchMember& member = batch_.members[m];
        const std::size_t bytes = bytes_of(batch_.traits, member.count);
        use({.name = "the host's backend",
             .reads = {{member.input, bytes}},
             .reads_results = true});
        const auto* const from = static_cast<const std::byte*>(member.input);
        owner_.sums_.given(batch_.sequence, m)
            .push_back(decoded(batch_.traits.dtype, {from, from + bytes}));
      }
    }
    void take(std::size_t m) {
      const BatchMember& member = batch_.members[m];
      std::vector<double> sum(static_cast<std::size_t>(member.count));
      for (const auto& values : owner_.sums_.given(batch_.sequence, m))
        for (std::size_t i = 0; i < sum.size(); ++i)
          sum[i] += values[i] * batch_.traits.prescale_factor;
      for (double& value : sum) value *= batch_.traits.postscale_factor;
      const auto result = encoded(batch_.traits.dtype, sum);
      use({.name = "the host's backend", .writes = {{member.output, result.size()}}});
      std::memcpy(member.output, result.data(), result.size());
    }
    HostSummer& owner_;
    const Batch batch_;
    bool given_ = false;
  };
  HostCluster& cluster_;
  HostSums& sums_;
};

void run_nccl(const Common& common) {
  common.world.run([&](Rank& self) {
    stand_where_the_user_does(common.program, self.device, self.rank);
    NcclDriver driver(common, self);
    run_stream_program(common.program, common.world.cluster, self.device,
                       common.world.table(self.rank), self.set, driver);
  });
}

void run_shared(const Common& common) {
  World& world = common.world;
  Domain domain(common.program.ranks);
  world.run([&](Rank& self) {
    stand_where_the_user_does(common.program, self.device, self.rank);
    Board board(domain.span(), self.rank);
    SharedGpuOptions options;
    options.rest_limit = std::chrono::seconds(2);
    SharedGpuBackend backend(world.table(self.rank), self.rank, board,
                             Topology::single_domain(self.rank, common.program.ranks),
                             domain.controls(), options);
    // Whatever happens: the backends' destructors wait for each other.
    const std::shared_ptr<Baton> turn(world.baton(),
                                      [&self](Baton* baton) { baton->leave(self.rank); });
    DomainDriver driver(common, self, domain, backend, &board);
    run_stream_program(common.program, world.cluster, self.device, world.table(self.rank), self.set,
                       driver);
    meet(common, self);
  });
}

void run_staged(const Common& common) {
  World& world = common.world;
  world.cluster.order().one_host = true;  // CUDA lets go of memory in threads of their own
  Domain domain(common.program.ranks);
  HostSums sums(common.program.ranks);
  const bool registers = common.program.seed % 3 != 0;
  world.run([&](Rank& self) {
    stand_where_the_user_does(common.program, self.device, self.rank);
    constexpr std::size_t kBytes = std::size_t{32} << 20;
    const PoisonedMemory memory(kBytes);
    const auto arena =
        std::make_shared<Arena>(std::span(static_cast<std::byte*>(memory.data()), kBytes));
    if (!registers)
      self.device.fail_call("cudaHostRegister", static_cast<int>(CudaCode::InvalidValue));
    HostSummer host(world.cluster, sums);
    StagedBackend backend(
        world.table(self.rank), self.rank, self.rank, {&host}, arena, self.rank,
        {[&world] {
           return world.failed ? Status{Status::Code::RankFailed, "a rank"} : Status();
         },
         nullptr});
    DomainDriver driver(common, self, domain, backend, nullptr);
    run_stream_program(common.program, world.cluster, self.device, world.table(self.rank), self.set,
                       driver);
    meet(common, self);
  });
}

/// Of NCCL's backend, by the program's seed.
void choose_options(World& world, const ProgramDraw& program) {
  const std::uint64_t bits = hvd::test::Random::mixed(program.seed + 77);
  NcclOptions& options = world.options;
  options.streams = 1 + static_cast<int>(bits % 3);
  constexpr std::array kAs{Registration::None, Registration::None, Registration::Buffer,
                           Registration::Window};
  options.registration = kAs.at(bits / 16 % kAs.size());
  options.sums_only = bits / 64 % 4 == 0;
  options.fusion_threshold_bytes = std::size_t{1} << 20;
  options.rest_limit = std::chrono::seconds(3);
  if (program.ranks == 4 && bits / 256 % 2 == 0) options.host_of_rank = {0, 0, 1, 1};
  for (auto& device : world.devices) {
    device->settle_polls = static_cast<int>(bits / 1024 % 3);
    device->no_windows = bits / 4096 % 4 == 0;
  }
}

}  // namespace

ProgramDraw draw_program_for(Route way, std::uint64_t seed) {
  ProgramLimits limits;
  limits.kinds = {OpKind::Allreduce, OpKind::Allreduce, OpKind::Broadcast,
                  OpKind::Allgather, OpKind::Alltoall,  OpKind::Reducescatter};
  limits.types = {DataType::Float32, DataType::Float32, DataType::Float64, DataType::Float16,
                  DataType::Int32,   DataType::Int64,   DataType::Int16};
  limits.ops = {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max};
  if (way == Route::Staged)
    limits.kinds = {OpKind::Allreduce, OpKind::Broadcast}, limits.ops = {ReduceOp::Sum};
  const int most = way == Route::Nccl ? 4 : 3;
  return draw_stream_program(
      seed, 2 + static_cast<int>(seed % static_cast<std::uint64_t>(most - 1)), limits);
}

std::string describe(Route way, const ProgramDraw& program, const Schedule& schedule) {
  return std::string(name_of(way)) + ", " + std::to_string(program.ranks) + " ranks, program " +
         std::to_string(program.seed) + ", schedule " + text_of(schedule);
}

ProgramReport run_program_on(Route way, const ProgramDraw& program, const Schedule& schedule,
                             const std::optional<Omissions::Call>& left_out) {
  World world(program.ranks);
  world.title = describe(way, program, schedule);
  world.set_schedule(schedule);
  world.cluster.order().knows_all_writes = true;
  if (left_out) world.cluster.omissions().leave_out(*left_out);
  if (program.away)
    for (int rank = 0; rank < program.ranks; ++rank) world.users_devices.insert(100 + rank);
  choose_options(world, program);
  ProgramReport report;
  int arrived = 0;
  const Common common{world, program, arrived};
  try {
    if (way == Route::Nccl) run_nccl(common);
    if (way == Route::SharedGpu) run_shared(common);
    if (way == Route::Staged) run_staged(common);
  } catch (const std::exception& error) {
    report.errors.emplace_back(error.what());
  }
  for (const auto& misuse : world.cluster.misuses()) report.errors.push_back(misuse);
  report.left_out = world.cluster.omissions().place();
  for (const auto kind : Omissions::kinds())
    for (int rank = 0; rank < program.ranks; ++rank)
      report.calls.push_back({{kind, rank, 0}, world.cluster.omissions().count(kind, rank)});
  return report;
}

}  // namespace hvd::gpu::test
