#include "tests/support/gpu/stream_program.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>

#include "hvd/types.h"
#include "tests/support/gpu/nccl_world.h"
#include "tests/support/random.h"

namespace hvd::gpu::test {

namespace {

using hvd::test::Random;

constexpr int kUserStreams = 3;
constexpr std::size_t kSlots = 3;  // of tensors, which are used again
constexpr std::size_t kSlotBytes = std::size_t{6} << 20;

/// The number at a place of a tensor that a rank brings: a multiple of 12, so that halves, thirds
/// and quarters are exact, also in Float16.
double value_of(std::size_t step, std::size_t tensor, int rank, std::int64_t at) {
  const std::uint64_t mixed =
      Random::mixed((step * 31 + tensor) * 1000003 + static_cast<std::uint64_t>(rank) * 7919 +
                    static_cast<std::uint64_t>(at));
  return 12.0 * static_cast<double>(1 + mixed % 11);
}

/// How one tensor of a step is dealt: what each rank has of it.
struct Deal {
  std::vector<std::vector<std::int64_t>> sends;  ///< by sender and receiver, Alltoall
  std::vector<std::int64_t> counts;              ///< by rank
};

Deal deal_of(const StepDraw& step, std::int64_t base, int ranks) {
  Deal deal;
  const bool even = step.streams % 2 == 0;
  for (int rank = 0; rank < ranks; ++rank) {
    deal.counts.push_back(even ? base : base + rank);
    deal.sends.emplace_back();
    for (int other = 0; other < ranks; ++other)
      deal.sends.back().push_back(even ? base : base + (rank * 2 + other) % 3);
  }
  return deal;
}

std::int64_t sum_of(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

std::int64_t input_count(const StepDraw& step, const Deal& deal, std::int64_t base, int rank) {
  const auto own = static_cast<std::size_t>(rank);
  if (step.kind == OpKind::Allgather) return deal.counts[own];
  if (step.kind == OpKind::Alltoall) return sum_of(deal.sends[own]);
  return step.kind == OpKind::Reducescatter ? sum_of(deal.counts) : base;
}

/// The rank's own counts, and where its elements begin in the others' inputs.
void fill_counts(BatchMember& member, const StepDraw& step, const Deal& deal, int rank) {
  const auto own = static_cast<std::size_t>(rank);
  if (step.kind == OpKind::Allgather || step.kind == OpKind::Reducescatter)
    member.counts = deal.counts;
  if (step.kind != OpKind::Alltoall) return;
  member.sends = deal.sends[own];
  for (const auto& row : deal.sends) {
    member.counts.push_back(row[own]);
    member.offsets.push_back(std::accumulate(row.begin(), row.begin() + rank, std::int64_t{0}));
  }
}

double reduced(const StepDraw& step, std::size_t number, std::size_t tensor, int ranks,
               std::int64_t at) {
  double result = value_of(number, tensor, 0, at) * step.prescale;
  for (int rank = 1; rank < ranks; ++rank) {
    const double value = value_of(number, tensor, rank, at) * step.prescale;
    result = step.op == ReduceOp::Min   ? std::min(result, value)
             : step.op == ReduceOp::Max ? std::max(result, value)
                                        : result + value;
  }
  return (step.op == ReduceOp::Average ? result / ranks : result) * step.postscale;
}

/// What the rank is to get of a tensor.
std::vector<double> expected_of(const StepDraw& step, std::size_t number, std::size_t tensor,
                                int rank, int ranks) {
  const std::int64_t base = step.bases[tensor];
  const Deal deal = deal_of(step, base, ranks);
  const auto own = static_cast<std::size_t>(rank);
  std::vector<double> values;
  const auto append = [&](int from, std::int64_t begin, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i)
      values.push_back(value_of(number, tensor, from, begin + i));
  };
  if (step.kind == OpKind::Broadcast) append(step.root, 0, base);
  for (int other = 0; other < ranks; ++other) {
    const auto& row = deal.sends[static_cast<std::size_t>(other)];
    if (step.kind == OpKind::Allgather)
      append(other, 0, deal.counts[static_cast<std::size_t>(other)]);
    if (step.kind == OpKind::Alltoall)
      append(other, std::accumulate(row.begin(), row.begin() + rank, std::int64_t{0}), row[own]);
  }
  const std::int64_t first =
      step.kind == OpKind::Reducescatter
          ? std::accumulate(deal.counts.begin(), deal.counts.begin() + rank, std::int64_t{0})
          : 0;
  const std::int64_t count = step.kind == OpKind::Reducescatter ? deal.counts[own]
                             : step.kind == OpKind::Allreduce   ? base
                                                                : 0;
  for (std::int64_t i = 0; i < count; ++i)
    values.push_back(reduced(step, number, tensor, ranks, first + i));
  return values;
}

/// While it lives, the calling thread works on the rank's own GPU, as the user's code does.
class OnOwnGpu {
 public:
  OnOwnGpu(HostDevice& device, int rank)
      : device_(device),
        before_(std::exchange(device.current(), rank)),
        capturing_(std::exchange(device.capturing, false)) {
    device_.users = true;
  }
  ~OnOwnGpu() {
    device_.users = false;
    device_.current() = before_;
    device_.capturing = capturing_;
  }
  OnOwnGpu(const OnOwnGpu&) = delete;
  OnOwnGpu& operator=(const OnOwnGpu&) = delete;

 private:
  HostDevice& device_;
  const int before_;
  const bool capturing_;
};

/// What a user has on a GPU.
class User {
 public:
  User(HostDevice& device, const GpuApi& table, int rank)
      : device_(device), table_(table), rank_(rank) {
    const OnOwnGpu here(device_, rank_);
    for (auto& stream : streams_) table_.stream_create(&stream);
  }
  /// Everything is to be over.
  ~User() {
    const OnOwnGpu here(device_, rank_);
    for (CudaEvent* event : events_) table_.event_destroy(event);
    for (CudaStream* stream : streams_) table_.stream_destroy(stream);
    for (void* memory : memory_) table_.device_free(memory);
  }
  User(const User&) = delete;
  User& operator=(const User&) = delete;

  std::byte* allocate(std::size_t bytes) {
    const OnOwnGpu here(device_, rank_);
    void* memory = nullptr;
    expect(table_.device_malloc(&memory, bytes) == CudaCode::Success, "memory");
    memory_.push_back(memory);
    return static_cast<std::byte*>(memory);
  }
  void copy(int stream, const void* from, void* to, std::size_t bytes) {
    const OnOwnGpu here(device_, rank_);
    const CopyItem item{from, to, static_cast<std::int64_t>(bytes)};
    const CopyJob job{.items = {&item, 1}, .from = DataType::UInt8, .to = DataType::UInt8};
    expect(bytes == 0 || table_.batched_copy(job, at(stream)) == CudaCode::Success,
           "the user's kernel to be launched");
  }
  CudaEvent* record(int stream) {
    const OnOwnGpu here(device_, rank_);
    CudaEvent* event = nullptr;
    expect(table_.event_create(&event) == CudaCode::Success, "an event");
    events_.push_back(event);
    expect(table_.event_record(event, at(stream)) == CudaCode::Success,
           "the user's event to be recorded");
    return event;
  }
  void wait(int stream, void* event) {
    const OnOwnGpu here(device_, rank_);
    table_.stream_wait_event(at(stream), static_cast<CudaEvent*>(event));
  }
  /// Returns when all its streams have done what they were given.
  void synchronize() {
    for (int stream = 0; stream < kUserStreams; ++stream) {
      CudaEvent* const event = record(stream);
      const OnOwnGpu here(device_, rank_);
      while (table_.event_query(event) == CudaCode::NotReady) continue;
    }
  }

 private:
  CudaStream* at(int stream) { return streams_.at(static_cast<std::size_t>(stream)); }

  HostDevice& device_;
  const GpuApi& table_;
  const int rank_;
  std::array<CudaStream*, kUserStreams> streams_{};
  std::vector<CudaEvent*> events_;
  std::vector<void*> memory_;
};

class Run {
 public:
  Run(const ProgramDraw& program, HostCluster& cluster, HostDevice& device, const GpuApi& table,
      const ProcessSetInfo& set, ProgramDriver& driver)
      : program_(program),
        cluster_(cluster),
        device_(device),
        set_(set),
        driver_(driver),
        user_(device, table, set.rank) {
    for (Slot& slot : slots_) {
      slot.input = user_.allocate(kSlotBytes);
      slot.output = user_.allocate(kSlotBytes);
      slot.lent.bytes = kSlotBytes / 8;
    }
  }

  void steps() {
    for (std::size_t number = 0; number < program_.steps.size(); ++number) {
      begin(number);
      follow_enqueued();
      while (pending_.size() >= static_cast<std::size_t>(program_.in_flight)) finish_oldest();
      expect(device_.current() == standing_, "the user's current GPU to be as it was");
    }
    if (program_.abandons) {
      expect(driver_.abandon(), "nothing to be under way after an abort");
      pending_.clear();
    }
    while (!pending_.empty()) finish_oldest();
    user_.synchronize();
    compare();
  }
  /// What was lent goes back.
  void give_back() {
    for (Slot& slot : slots_) slot.lent.memory.reset();
  }

 private:
  struct Lent {
    std::shared_ptr<void> memory;
    std::size_t bytes = 0;
    bool asked = false;
  };
  struct Slot {
    std::byte *input = nullptr, *output = nullptr;
    Lent lent;
    CudaEvent* free = nullptr;  ///< when the slot's tensors may be written again
  };
  struct Pending {
    std::size_t number = 0;
    std::vector<BatchMember> members;
    std::unique_ptr<Execution> execution;
    bool followed = false;  ///< the user's stream has gone on behind it
  };
  struct Result {
    std::size_t number = 0, tensor = 0;
    std::byte* copy = nullptr;
    std::size_t bytes = 0;
  };

  BatchTraits traits_of(const StepDraw& step) const {
    BatchTraits traits;
    traits.kind = step.kind;
    traits.dtype = step.dtype;
    traits.op = step.op;
    traits.device = {DeviceKind::Cuda, set_.rank};
    traits.prescale_factor = step.prescale;
    traits.postscale_factor = step.postscale;
    traits.root = step.root;
    traits.set = &set_;
    return traits;
  }
  int ranks() const { return static_cast<int>(set_.ranks.size()); }
  int stream_of(const StepDraw& step, std::size_t tensor) const {
    return static_cast<int>((step.streams >> (step.one_stream ? 0 : 4 * tensor)) % kUserStreams);
  }
  /// The user's values, in memory of the host that nobody watches and that stays.
  const std::vector<std::byte>& host_values(DataType dtype, const std::vector<double>& numbers) {
    return host_.emplace_back(encoded(dtype, numbers));
  }

  /// Where the step's tensors are; in memory of the backend's where it lends any.
  std::vector<BatchMember> lay_out(std::size_t number, const BatchTraits& traits) {
    const StepDraw& step = program_.steps[number];
    Slot& slot = slots_[number % kSlots];
    const bool lends = step.lent && step.kind == OpKind::Allreduce;
    if (lends && !std::exchange(slot.lent.asked, true))
      slot.lent.memory = driver_.allocate(traits, slot.lent.bytes);
    auto* lent = lends ? static_cast<std::byte*>(slot.lent.memory.get()) : nullptr;
    std::vector<BatchMember> members;
    std::size_t in = 0, out = 0;
    for (std::size_t tensor = 0; tensor < step.bases.size(); ++tensor) {
      const Deal deal = deal_of(step, step.bases[tensor], ranks());
      BatchMember member;
      member.name = names_.emplace_back("step " + std::to_string(number) + " tensor " +
                                        std::to_string(tensor));
      member.count = input_count(step, deal, step.bases[tensor], set_.rank);
      fill_counts(member, step, deal, set_.rank);
      const std::size_t bytes = aligned_to_member(bytes_of(traits, member.count));
      const bool has_room = lent != nullptr && in + bytes <= slot.lent.bytes;
      const bool in_place =
          has_room ||
          (step.in_place && (step.kind == OpKind::Allreduce || step.kind == OpKind::Broadcast));
      std::byte* const input = (has_room ? lent : slot.input) + in;
      member.input = input;
      member.output = in_place ? input : slot.output + out;
      member.padded = true;
      in += bytes;
      out += aligned_to_member(bytes_of(traits, output_of(step, member)));
      members.push_back(std::move(member));
    }
    if (in > kSlotBytes || out > kSlotBytes) throw std::logic_error("a step of too many bytes");
    return members;
  }
  std::int64_t output_of(const StepDraw& step, const BatchMember& member) const {
    if (step.kind == OpKind::Allgather || step.kind == OpKind::Alltoall)
      return sum_of(member.counts);
    return step.kind == OpKind::Reducescatter ? member.counts[static_cast<std::size_t>(set_.rank)]
                                              : member.count;
  }

  /// The user's kernels write the inputs, gaps between them too.
  void produce(std::size_t number, std::vector<BatchMember>& members, std::size_t element) {
    const StepDraw& step = program_.steps[number];
    const Slot& slot = slots_[number % kSlots];
    std::map<int, CudaEvent*> events;
    for (std::size_t tensor = 0; tensor < members.size(); ++tensor) {
      const int stream = stream_of(step, tensor);
      if (slot.free != nullptr) user_.wait(stream, slot.free);
      std::vector<double> values;
      for (std::int64_t i = 0; i < members[tensor].count; ++i)
        values.push_back(value_of(number, tensor, set_.rank, i));
      values.resize(aligned_to_member(values.size() * element) / element);
      const auto& bytes = host_values(step.dtype, values);
      user_.copy(stream, bytes.data(), const_cast<void*>(members[tensor].input), bytes.size());
    }
    for (std::size_t tensor = 0; tensor < members.size(); ++tensor)
      events[stream_of(step, tensor)] = nullptr;
    for (auto& [stream, event] : events) event = user_.record(stream);
    for (std::size_t tensor = 0; tensor < members.size(); ++tensor)
      members[tensor].ready_event = events[stream_of(step, tensor)];
  }

  void begin(std::size_t number) {
    const BatchTraits traits = traits_of(program_.steps[number]);
    // Two steps of a slot are not under way at once: the user goes on behind the first one's
    // completion.
    while (std::any_of(pending_.begin(), pending_.end(), [&](const Pending& other) {
      return other.number % kSlots == number % kSlots && !other.followed;
    }))
      advance_all();
    Pending pending{number, lay_out(number, traits), nullptr, false};
    produce(number, pending.members, element_bytes(traits.dtype));
    driver_.prepare(number, traits, pending.members);
    pending.execution = driver_.launch(number, traits, pending.members);
    pending_.push_back(std::move(pending));
  }

  void advance_all() {
    bool idle = true;
    for (Pending& pending : pending_)
      idle = driver_.advance(pending.number, *pending.execution) == Progress::Idle && idle;
    follow_enqueued();
    if (idle) driver_.idle();
  }
  void finish_oldest() {
    Pending& oldest = pending_.front();
    for (;;) {
      const Progress progress = driver_.advance(oldest.number, *oldest.execution);
      follow_enqueued();
      if (progress == Progress::Done) break;
      if (progress == Progress::Idle) driver_.idle();
    }
    if (!oldest.followed) follow(oldest);
    driver_.finish(oldest.number);
    finished_.insert(oldest.number);
    pending_.pop_front();
  }
  void follow_enqueued() {
    for (Pending& pending : pending_)
      if (!pending.followed && pending.execution->is_enqueued()) follow(pending);
  }

  /// The user's stream reads the results behind the completion event, and writes something else
  /// there.
  void follow(Pending& pending) {
    pending.followed = true;
    const StepDraw& step = program_.steps[pending.number];
    Slot& slot = slots_[pending.number % kSlots];
    const auto stream = static_cast<int>(step.streams >> 40) % kUserStreams;
    if (void* const event = pending.execution->completion_event(); event != nullptr)
      user_.wait(stream, event);
    for (std::size_t tensor = 0; tensor < pending.members.size(); ++tensor) {
      const BatchMember& member = pending.members[tensor];
      const std::size_t bytes =
          static_cast<std::size_t>(output_of(step, member)) * element_bytes(step.dtype);
      std::byte* const copy = user_.allocate(bytes);
      user_.copy(stream, member.output, copy, bytes);
      const auto& junk = host_.emplace_back(bytes, std::byte{0x31});
      user_.copy(stream, junk.data(), member.output, bytes);
      results_.push_back({pending.number, tensor, copy, bytes});
    }
    slot.free = user_.record(stream);
  }

  void compare() {
    for (const Result& result : results_) {
      if (!finished_.contains(result.number)) continue;
      const StepDraw& step = program_.steps[result.number];
      cluster_.order().host_uses({.name = "the user's host",
                                  .reads = {{result.copy, result.bytes}},
                                  .reads_results = true});
      const auto got =
          decoded(step.dtype, std::vector<std::byte>(result.copy, result.copy + result.bytes));
      const auto wanted = expected_of(step, result.number, result.tensor, set_.rank, ranks());
      const auto [is, should] = std::mismatch(got.begin(), got.end(), wanted.begin(), wanted.end());
      if (should == wanted.end()) continue;
      const std::string of =
          "step " + std::to_string(result.number) + " (" + std::string(name_of(step.kind)) + ", " +
          std::string(name_of(step.dtype)) + ") tensor " + std::to_string(result.tensor) + "[" +
          std::to_string(should - wanted.begin()) + "] of rank " + std::to_string(set_.rank);
      expect(false, of + " to be " + std::to_string(*should) + ", found " + std::to_string(*is));
    }
  }

  const ProgramDraw& program_;
  HostCluster& cluster_;
  HostDevice& device_;
  const ProcessSetInfo& set_;
  ProgramDriver& driver_;
  const int standing_ = device_.current();
  std::deque<std::vector<std::byte>> host_;
  std::deque<std::string> names_;
  std::vector<Result> results_;
  std::set<std::size_t> finished_;
  User user_;
  std::array<Slot, kSlots> slots_;
  std::deque<Pending> pending_;
};

}  // namespace

ProgramDraw draw_stream_program(std::uint64_t seed, int ranks, const ProgramLimits& limits) {
  Random random(seed);
  ProgramDraw program;
  program.seed = seed;
  program.ranks = ranks;
  program.in_flight = random.between(1, 3);
  program.away = random.one_in(2);
  program.capturing = random.one_in(2);
  for (int number = 0; number < limits.steps; ++number) {
    StepDraw step;
    step.kind = random.pick(limits.kinds);
    step.dtype = random.pick(limits.types);
    const bool reduces = step.kind == OpKind::Allreduce || step.kind == OpKind::Reducescatter;
    step.op = random.pick(limits.ops);
    if (step.kind == OpKind::Reducescatter && step.op != ReduceOp::Average) step.op = ReduceOp::Sum;
    if (reduces && step.op == ReduceOp::Sum && random.one_in(2)) step.prescale = 0.5;
    if (reduces && step.op == ReduceOp::Sum && random.one_in(2)) step.postscale = 2;
    step.root = random.below(ranks);
    const bool one_size = step.kind == OpKind::Allreduce || step.kind == OpKind::Broadcast;
    const bool large = one_size && random.one_in(5);  // more than a fusion buffer has at first
    for (int tensor = random.between(1, 4); tensor > 0; --tensor)
      step.bases.push_back(large && tensor < 3 ? 300'000 : random.between(5, 70));
    step.in_place = random.one_in(2);
    step.lent = random.one_in(3);
    step.one_stream = random.one_in(3);
    step.streams = random.next() >> 1;
    program.steps.push_back(std::move(step));
  }
  return program;
}

void stand_where_the_user_does(const ProgramDraw& program, HostDevice& device, int rank) {
  constexpr int kOther = 100;
  device.current() = kOther + rank;
  if (program.away) device.contexts.insert(kOther + rank);
  device.contexts.insert(rank);
  device.capturing = program.capturing;
}

void run_stream_program(const ProgramDraw& program, HostCluster& cluster, HostDevice& device,
                        const GpuApi& table, const ProcessSetInfo& set, ProgramDriver& driver) {
  Run run(program, cluster, device, table, set, driver);
  run.steps();
  run.give_back();
}

}  // namespace hvd::gpu::test
