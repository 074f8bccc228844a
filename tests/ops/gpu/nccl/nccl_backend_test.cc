// What the NCCL backend computes and in which order it enqueues, on the host table. Failures are in
// nccl_failure_test.cc.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hvd/errors.h"
#include "ops/gpu/nccl/reduction_plan.h"
#include "tests/support/gpu/nccl_world.h"
#include "tests/support/sanitized.h"

namespace hvd::gpu::test {
namespace {

/// Small integers, different for each rank, tensor and element: exact in every type, also summed or
/// multiplied.
double number(DataType dtype, int rank, int tensor, std::int64_t i) {
  const auto mixed = static_cast<unsigned>(rank * 7 + tensor * 5 + i * 3 + 1) * 2654435761u >> 16;
  if (dtype == DataType::Bool) return static_cast<double>(mixed % 2);
  const int value = static_cast<int>(mixed % 4);
  return dtype == DataType::UInt8 ? value : value - 2;
}

std::int64_t lanes_of(DataType dtype) { return is_complex(dtype) ? 2 : 1; }

std::vector<double> numbers(DataType dtype, int rank, int tensor, std::int64_t count) {
  std::vector<double> made;
  for (std::int64_t i = 0; i < count * lanes_of(dtype); ++i)
    made.push_back(number(dtype, rank, tensor, i));
  return made;
}

/// Tensors as batches have them: one element, odd, a multiple of 16 bytes, none, more than a
/// kernel's chunk.
const std::vector<std::int64_t> kCounts{1, 7, 64, 0, 1025};

std::vector<Tensor> tensors_of(DataType dtype, int rank, const std::vector<std::int64_t>& counts,
                               bool in_place = false) {
  std::vector<Tensor> made;
  for (std::size_t t = 0; t < counts.size(); ++t) {
    Tensor tensor;
    tensor.name = "t" + std::to_string(t);
    tensor.input = encoded(dtype, numbers(dtype, rank, static_cast<int>(t), counts[t]));
    tensor.output.resize(tensor.input.size());
    tensor.in_place = in_place;
    made.push_back(std::move(tensor));
  }
  return made;
}

/// What every rank must hold, computed in double from the numbers, not from the bytes.
double expected(const BatchTraits& traits, int tensor, std::int64_t i) {
  const std::size_t ranks = traits.set->ranks.size();
  const bool integer = is_integer(traits.dtype);
  const double before = traits.dtype == DataType::Bool ? 1 : traits.prescale_factor,
               after = traits.dtype == DataType::Bool ? 1 : traits.postscale_factor;
  double result = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    double value = number(traits.dtype, traits.set->ranks[r], tensor, i) * before;
    if (integer) value = std::trunc(value);
    if (r == 0) {
      result = value;
    } else if (traits.op == ReduceOp::Min) {
      result = std::min(result, value);
    } else if (traits.op == ReduceOp::Max) {
      result = std::max(result, value);
    } else if (traits.op == ReduceOp::Product) {
      result *= value;
    } else {
      result += value;
    }
  }
  if (traits.op == ReduceOp::Average) result /= static_cast<double>(ranks);
  if (integer) result = std::trunc(result);
  result *= after;
  return integer ? std::trunc(result) : result;
}

double tolerance(DataType dtype) {
  if (dtype == DataType::Float16) return 4e-3;
  if (dtype == DataType::BFloat16) return 2e-2;
  if (dtype == DataType::Float32 || dtype == DataType::Complex64) return 1e-6;
  if (dtype == DataType::Float64 || dtype == DataType::Complex128) return 1e-14;
  return 0;
}

void expect_reduced(const BatchTraits& traits, const std::vector<Tensor>& tensors) {
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const auto got = decoded(traits.dtype, tensors[t].result());
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double wanted = expected(traits, static_cast<int>(t), static_cast<std::int64_t>(i));
      if (std::fabs(got[i] - wanted) <= tolerance(traits.dtype) * std::max(1.0, std::fabs(wanted)))
        continue;
      expect(false, std::string(name_of(traits.dtype)) + " " + std::string(name_of(traits.op)) +
                        " " + tensors[t].name + "[" + std::to_string(i) +
                        "] = " + std::to_string(wanted) + ", got " + std::to_string(got[i]));
    }
  }
}

const std::vector<DataType> kTypes{DataType::UInt8,    DataType::Int8,      DataType::Int16,
                                   DataType::Int32,    DataType::Int64,     DataType::Float16,
                                   DataType::BFloat16, DataType::Float32,   DataType::Float64,
                                   DataType::Bool,     DataType::Complex64, DataType::Complex128};
const std::vector<ReduceOp> kOps{ReduceOp::Average, ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max,
                                 ReduceOp::Product};

/// Devices of every temper.
void make_slow(World& world, int delay, int settle_polls) {
  for (auto& device : world.devices) {
    device->delay = delay;
    device->settle_polls = settle_polls;
  }
}

int count(const std::vector<std::string>& list, const std::string& what) {
  return static_cast<int>(std::count(list.begin(), list.end(), what));
}

}  // namespace

TEST_CASE("nccl: allreduce of every type and operation, fused and alone, on 1 to 4 ranks") {
  for (const int ranks : {1, 2, 3, 4}) {
    CAPTURE(ranks);
    World world(ranks);
    make_slow(world, ranks % 2, ranks == 3 ? 2 : 0);
    world.run([&](Rank& self) {
      for (const DataType dtype : kTypes) {
        for (const ReduceOp op : kOps) {
          if (!self.backend->supports(self.traits(OpKind::Allreduce, dtype, op))) continue;
          auto traits = self.traits(OpKind::Allreduce, dtype, op);
          for (const bool scaled : {false, true}) {
            traits.prescale_factor = scaled ? 0.5 : 1;
            traits.postscale_factor = scaled ? 2 : 1;
            for (const bool in_place : {false, true}) {
              auto fused = tensors_of(dtype, self.rank, kCounts, in_place);
              self.run(traits, fused);
              expect_reduced(traits, fused);
              auto alone = tensors_of(dtype, self.rank, {65}, in_place);
              self.run(traits, alone);
              expect_reduced(traits, alone);
            }
          }
        }
      }
    });
  }
}

TEST_CASE("nccl: fused and unfused results are the same bits") {
  // Holds on the host table, whose sums do not depend on the position in the buffer; NCCL's may.
  for (const int ranks : {2, 3}) {
    CAPTURE(ranks);
    World world(ranks);
    world.run([&](Rank& self) {
      for (const DataType dtype : kTypes) {
        for (const ReduceOp op : {ReduceOp::Average, ReduceOp::Max}) {
          const auto traits = self.traits(OpKind::Allreduce, dtype, op);
          if (!self.backend->supports(traits)) continue;
          auto fused = tensors_of(dtype, self.rank, kCounts);
          self.run(traits, fused);
          for (std::size_t t = 0; t < kCounts.size(); ++t) {
            std::vector<Tensor> alone{tensors_of(dtype, self.rank, kCounts)[t]};
            self.run(traits, alone);
            expect(alone[0].output == fused[t].output,
                   "equal bits of " + std::string(name_of(dtype)) + " " + fused[t].name);
          }
        }
      }
    });
  }
}

TEST_CASE(
    "nccl: over windows, and where switches sum, NCCL sums alone; averages have the bits of its "
    "own") {
  for (const int ranks : {2, 3, 4})
    for (const bool windows : {true, false}) {
      CAPTURE(ranks);
      CAPTURE(windows);
      std::vector<std::vector<std::vector<std::byte>>> results(
          2, std::vector<std::vector<std::byte>>(static_cast<std::size_t>(ranks)));
      for (const bool alone : {false, true}) {
        World world(ranks);
        if (alone && windows) world.options.registration = Registration::Window;
        if (alone && !windows) world.options.sums_only = true;
        world.run([&](Rank& self) {
          auto& kept = results[alone ? 1 : 0][static_cast<std::size_t>(self.rank)];
          for (const DataType dtype : {DataType::Float32, DataType::Float64, DataType::Float16,
                                       DataType::BFloat16, DataType::Complex64})
            for (const auto& counts : {kCounts, std::vector<std::int64_t>{33}})
              for (const double prescale : {1.0, 0.5}) {
                auto traits = self.traits(OpKind::Allreduce, dtype, ReduceOp::Average);
                traits.prescale_factor = prescale;
                auto tensors = tensors_of(dtype, self.rank, counts);
                self.run(traits, tensors);
                expect_reduced(traits, tensors);
                for (const Tensor& tensor : tensors)
                  kept.insert(kept.end(), tensor.output.begin(), tensor.output.end());
              }
          for (const Contribution& part : self.device.collectives)
            expect(!alone || part.extra == static_cast<int>(NcclOp::Sum), "nothing but sums");
        });
      }
      CHECK(results[0] == results[1]);
    }
}

TEST_CASE("nccl: profilers are told what a batch is, and NCCL what a communicator is for") {
  World world(4);
  world.run([](Rank& self) {
    auto tensors = tensors_of(DataType::Float32, self.rank, {3, 4, 5});
    self.run(self.traits(OpKind::Allreduce, DataType::Float32), tensors);
    expect(self.device.ranges == std::vector<std::string>{"hvd allreduce 't0' and 2 more"},
           "a batch's range");
    expect(self.device.names == std::vector<std::string>{"hvd 0-3 stream 0"},
           "a name for all ranks' communicator");
    if (self.rank == 2) return;
    ProcessSetInfo some{1, {0, 1, 3}, self.rank == 3 ? 2 : self.rank};
    auto traits = self.traits(OpKind::Broadcast, DataType::Float32);
    traits.set = &some;
    auto alone = tensors_of(DataType::Float32, self.rank, {3});
    self.run(traits, alone);
    expect(self.device.ranges.back() == "hvd broadcast 't0'", "a range for a tensor alone");
    expect(self.device.names.back() == "hvd 0-1, 3 stream 0", "a name for a set's communicator");
  });
}

TEST_CASE("nccl: integer averages are exact where a sum in the type would wrap") {
  World world(4);
  world.run([&](Rank& self) {
    for (const auto& [dtype, value] :
         std::vector<std::pair<DataType, double>>{{DataType::Int8, -127},
                                                  {DataType::UInt8, 255},
                                                  {DataType::Int16, 32767},
                                                  {DataType::Int32, 2147483647.0}}) {
      std::vector<Tensor> tensors(1);
      tensors[0].input = encoded(dtype, {value, self.rank == 0 ? value - 1 : value});
      tensors[0].output.resize(tensors[0].input.size());
      self.run(self.traits(OpKind::Allreduce, dtype, ReduceOp::Average), tensors);
      const auto got = decoded(dtype, tensors[0].output);
      expect(got[0] == value, "the average of equal values");
      expect(got[1] == std::trunc(value - 0.25), "truncation toward zero");
    }
  });
}

TEST_CASE("nccl: a Float16 average does not overflow in the sum") {
  World world(3);
  world.run([&](Rank& self) {
    for (const std::size_t number_of_tensors : {1u, 2u}) {
      std::vector<Tensor> tensors(number_of_tensors);
      for (auto& tensor : tensors) {
        tensor.input = encoded(DataType::Float16, {60000, 30000});
        tensor.output.resize(tensor.input.size());
      }
      self.run(self.traits(OpKind::Allreduce, DataType::Float16, ReduceOp::Average), tensors);
      expect(std::fabs(decoded(DataType::Float16, tensors[0].output)[0] - 60000) < 100,
             "an average of 60000");
    }
  });
}

TEST_CASE("nccl: a batch is one launch each way; a single tensor is none") {
  World world(2);
  world.run([](Rank& self) {
    const auto traits = self.traits(OpKind::Allreduce, DataType::Float32, ReduceOp::Average);
    std::vector<std::int64_t> resnet(161, 11);
    auto fused = tensors_of(DataType::Float32, self.rank, resnet);
    self.run(traits, fused);
    expect(self.device.launches.size() == 2, "one pack and one unpack");
    expect(
        self.device.launches[0].items.size() == 161 && self.device.launches[1].items.size() == 161,
        "all tensors in each launch");
    for (const CopyItem& item : self.device.launches[0].items) {
      expect(reinterpret_cast<std::uintptr_t>(item.dst) % kMemberAlignment == 0,
             "pieces on boundaries");
    }
    expect(self.device.enqueued == std::vector<std::string>{"launch_batched_copy", "ncclAllReduce",
                                                            "launch_batched_copy", "launch_poison",
                                                            "cudaEventRecord"},
           "pack, reduce, unpack, event");

    self.device.enqueued.clear();
    auto alone = tensors_of(DataType::Float32, self.rank, {11});
    self.run(traits, alone);
    expect(self.device.enqueued ==
               std::vector<std::string>{"ncclAllReduce", "launch_poison", "cudaEventRecord"},
           "no copies for a tensor alone");

    self.device.enqueued.clear();
    auto scaled = traits;
    scaled.postscale_factor = 3;
    self.run(scaled, alone);
    expect(self.device.enqueued == std::vector<std::string>{"ncclAllReduce", "launch_batched_copy",
                                                            "launch_poison", "cudaEventRecord"},
           "scaled in place");
    expect(self.device.calls("ncclMemAlloc") == 1, "one fusion buffer, for the fused batch only");
  });
}

namespace {

/// Tensors of `counts` in memory that the backend lends, as a reducer lays them out; `apart`: with
/// a hole after the first.
class Lent {
 public:
  Lent(Rank& self, const BatchTraits& traits, const std::vector<std::int64_t>& counts,
       bool apart = false)
      : traits_(traits) {
    std::size_t bytes = apart ? 2 * kMemberAlignment : 0;
    for (const auto count : counts)
      bytes += aligned_to_member(static_cast<std::size_t>(count) * element_bytes(traits.dtype));
    memory_ = self.backend->allocate(traits, bytes);
    expect(memory_ != nullptr, "memory to be lent");
    auto* at = static_cast<std::byte*>(memory_.get());
    expect(reinterpret_cast<std::uintptr_t>(at) % kMemberAlignment == 0, "aligned memory");
    tensors_ = tensors_of(traits.dtype, self.rank, counts);
    for (auto& tensor : tensors_) {
      places_.push_back(at);
      std::copy(tensor.input.begin(), tensor.input.end(), at);
      at += aligned_to_member(tensor.input.size()) +
            (apart && places_.size() == 1 ? 2 * kMemberAlignment : 0);
    }
  }
  [[nodiscard]] Batch batch() {
    Batch made = Rank::batch(traits_, tensors_);
    for (std::size_t t = 0; t < places_.size(); ++t) {
      made.members[t].input = made.members[t].output = places_[t];
      made.members[t].padded = true;
    }
    return made;
  }
  [[nodiscard]] std::vector<Tensor>& results() {
    for (std::size_t t = 0; t < places_.size(); ++t)
      tensors_[t].output.assign(places_[t], places_[t] + tensors_[t].input.size());
    return tensors_;
  }
  [[nodiscard]] const void* data() const { return memory_.get(); }
  /// What lies there is nobody's.
  void spoil() const {
    for (std::size_t t = 0; t < places_.size(); ++t)
      std::fill_n(places_[t], tensors_[t].input.size(), std::byte{0x7b});
  }

 private:
  BatchTraits traits_;
  std::shared_ptr<void> memory_;
  std::vector<Tensor> tensors_;
  std::vector<std::byte*> places_;
};

}  // namespace

TEST_CASE(
    "nccl: scaled gradients in lent memory take a pass of the kernel's, and one more where their "
    "average is not NCCL's") {
  for (const int ranks : {2, 3}) {
    World world(ranks);
    make_slow(world, 1, 2);
    world.run([&](Rank& self) {
      for (const DataType dtype : {DataType::Float32, DataType::BFloat16}) {
        auto traits = self.traits(OpKind::Allreduce, dtype, ReduceOp::Average);
        traits.prescale_factor = 0.25;
        Lent lent(self, traits, {100, 7});
        self.device.enqueued.clear();
        self.finish(*self.backend->launch(lent.batch()));
        expect_reduced(traits, lent.results());
        std::vector<std::string> calls{"launch_batched_copy", "ncclAllReduce", "launch_poison",
                                       "cudaEventRecord"};
        if (ranks == 3) calls.insert(calls.begin() + 2, "launch_batched_copy");
        expect(self.device.enqueued == calls, "passes for the prescale and the division alone");
      }
    });
  }
}

TEST_CASE(
    "nccl: tensors in lent memory are reduced where they are; what the other ranks do is their own "
    "affair") {
  for (const int ranks : {2, 3, 4}) {
    CAPTURE(ranks);
    World world(ranks);
    make_slow(world, 1, ranks == 3 ? 2 : 0);
    world.run([&](Rank& self) {
      for (const DataType dtype : kTypes) {
        for (const ReduceOp op : kOps) {
          auto traits = self.traits(OpKind::Allreduce, dtype, op);
          if (!self.backend->supports(traits)) continue;
          const ReductionPlan plan = plan_reduction({dtype, op, 1, 1}, ranks);
          const bool other_type = plan.wire != plan.type;
          for (const int odd_one : {-1, 0}) {  // a rank that has its tensors elsewhere, or apart
            for (const bool apart : {false, true}) {
              Lent lent(self, traits, kCounts, apart && self.rank == odd_one);
              auto ordinary = tensors_of(dtype, self.rank, kCounts);
              const bool elsewhere = self.rank == odd_one && !apart;
              self.device.enqueued.clear();
              self.finish(
                  *self.backend->launch(elsewhere ? Rank::batch(traits, ordinary) : lent.batch()));
              expect_reduced(traits, elsewhere ? ordinary : lent.results());
              const int scaled = plan.after.none() && plan.before.none() ? 0 : 1;
              const int copies = self.rank == odd_one || other_type ? 2 : scaled;
              expect(count(self.device.enqueued, "launch_batched_copy") == copies,
                     "no pack and no unpack in lent memory");
            }
          }
        }
      }
      auto scaled = self.traits(OpKind::Allreduce, DataType::Float32, ReduceOp::Sum);
      scaled.prescale_factor = 0.5;
      scaled.postscale_factor = 2;
      Lent lent(self, scaled, kCounts);
      self.finish(*self.backend->launch(lent.batch()));
      expect_reduced(scaled, lent.results());
      Lent alone(self, scaled, {65});
      self.finish(*self.backend->launch(alone.batch()));
      expect_reduced(scaled, alone.results());
    });
  }
}

TEST_CASE(
    "nccl: tensors are packed straight into lent memory that their outputs lie in, some or all, "
    "scaled or not") {
  for (const int ranks : {2, 3}) {
    World world(ranks);
    make_slow(world, 2, 1);
    world.run([&](Rank& self) {
      for (const DataType dtype :
           {DataType::Float32, DataType::Float16, DataType::Int32, DataType::Complex64}) {
        for (const double prescale : {1.0, 0.5, 1.0 / 3}) {
          for (const bool all : {true, false}) {
            auto traits = self.traits(OpKind::Allreduce, dtype, ReduceOp::Sum);
            traits.prescale_factor = prescale;
            Lent lent(self, traits, kCounts);
            auto elsewhere = tensors_of(dtype, self.rank, kCounts);
            Batch batch = lent.batch();
            for (std::size_t t = 0; t < batch.members.size(); ++t)
              if (all || t % 2 == 0) batch.members[t].input = elsewhere[t].input.data();
            if (all) lent.spoil();
            const auto before = elsewhere;
            self.device.enqueued.clear();
            self.finish(*self.backend->launch(std::move(batch)));
            expect_reduced(traits, lent.results());
            for (std::size_t t = 0; t < before.size(); ++t)
              expect(elsewhere[t].input == before[t].input, "the input as it was");
            expect(count(self.device.enqueued, "launch_batched_copy") == 1,
                   "one launch, into place");
          }
        }
      }
    });
  }
}

TEST_CASE("nccl: what lies between slices of lent memory stays as it is, unless it is padding") {
  World world(2);
  world.run([](Rank& self) {
    const auto traits = self.traits(OpKind::Allreduce, DataType::Float32);
    const std::size_t step = kMemberAlignment / sizeof(float);
    for (const std::size_t length : {step - 1, step}) {
      const auto memory = self.backend->allocate(traits, 3 * kMemberAlignment);
      auto* numbers = static_cast<float*>(memory.get());
      std::fill_n(numbers, 3 * step, static_cast<float>(self.rank + 1));
      auto tensors = tensors_of(DataType::Float32, self.rank,
                                std::vector<std::int64_t>(3, static_cast<std::int64_t>(length)));
      auto batch = Rank::batch(traits, tensors);
      for (std::size_t t = 0; t < 3; ++t)
        batch.members[t].input = batch.members[t].output = numbers + t * step;
      self.device.enqueued.clear();
      self.finish(*self.backend->launch(std::move(batch)));
      for (std::size_t i = 0; i < 3 * step; ++i)
        expect(numbers[i] == (i % step < length ? 3.0F : static_cast<float>(self.rank + 1)),
               "slices summed, the rest as it was");
      const int copies = length == step ? 0 : 2;
      expect(count(self.device.enqueued, "launch_batched_copy") == copies,
             "in place where there is nothing between");
    }
  });
}

TEST_CASE("nccl: lent memory is lent again, registered with nobody, and may outlive the backend") {
  World world(2);
  std::vector<std::shared_ptr<void>> kept(2);
  world.run([&](Rank& self) {
    const auto traits = self.traits(OpKind::Allreduce, DataType::Float32, ReduceOp::Average);
    const void* place = nullptr;
    for (int round = 0; round < 3; ++round) {
      Lent lent(self, traits, kCounts);
      expect(place == nullptr || lent.data() == place, "the block that came back");
      place = lent.data();
      self.finish(*self.backend->launch(lent.batch()));
    }
    expect(self.device.calls("cudaMalloc") == 1 && self.device.calls("ncclCommRegister") == 0,
           "one block, not registered");
    self.device.memory_bytes = 0;
    expect(self.backend->allocate(traits, std::size_t{64} << 20) == nullptr,
           "nothing when the GPU is full");
    ProcessSetInfo myself{1, {self.rank}, 0};
    auto alone = traits;
    alone.set = &myself;
    expect(self.backend->allocate(alone, 64) == nullptr, "nothing for a rank alone");
    auto& mine = kept[static_cast<std::size_t>(self.rank)];
    mine = self.backend->allocate(traits, 4096);
    expect(mine != nullptr, "room in what idle blocks have given back");
    auto elsewhere = traits;
    elsewhere.device.index = self.rank + 1;
    expect(self.backend->allocate(elsewhere, 64) == nullptr, "nothing on another device");
    self.backend.reset();
    static_cast<float*>(mine.get())[0] = 1;
    mine.reset();
    expect(self.device.live_memory() == 0, "freed in the end");
  });
}

TEST_CASE("nccl: a rank alone copies, and needs neither communicator nor fusion buffer") {
  World world(1);
  world.run([](Rank& self) {
    const auto traits = self.traits(OpKind::Allreduce, DataType::Float32, ReduceOp::Average);
    auto tensors = tensors_of(DataType::Float32, self.rank, kCounts);
    self.run(traits, tensors);
    expect_reduced(traits, tensors);
    expect(
        self.device.enqueued == std::vector<std::string>{"launch_batched_copy", "cudaEventRecord"},
        "one copy");
    auto in_place = tensors_of(DataType::Float32, self.rank, kCounts, true);
    self.device.enqueued.clear();
    self.run(traits, in_place);
    expect_reduced(traits, in_place);
    expect(self.device.enqueued == std::vector<std::string>{"cudaEventRecord"}, "nothing in place");
    expect(
        self.device.calls("ncclCommInitRankConfig") == 0 && self.device.calls("ncclMemAlloc") == 0,
        "no communicator");
  });
}

TEST_CASE("nccl: sums on each host first, then across hosts, where hosts have equally many ranks") {
  struct Case {
    std::vector<int> host_of_rank;
    bool levels;
  };
  for (const Case& wanted :
       {Case{{0, 0, 1, 1}, true}, Case{{0, 1, 0, 1}, true}, Case{{0, 0, 0, 0}, false},
        Case{{0, 1, 2, 3}, false}, Case{{0, 0, 0, 1}, false}, Case{{0, 1, 2, 0, 1, 2}, true},
        Case{{0, 0, 0, 1, 1, 1}, true}}) {
    World world(static_cast<int>(wanted.host_of_rank.size()));
    make_slow(world, 1, 1);
    world.options.host_of_rank = wanted.host_of_rank;
    world.run([&](Rank& self) {
      for (const DataType dtype : kTypes) {
        for (const ReduceOp op : kOps) {
          const auto traits = self.traits(OpKind::Allreduce, dtype, op);
          if (!self.backend->supports(traits)) continue;
          // 8 bits are too few
          if (op == ReduceOp::Product && wanted.host_of_rank.size() > 4) continue;
          for (const auto& counts :
               {kCounts, std::vector<std::int64_t>{1}, std::vector<std::int64_t>{65}}) {
            for (const bool in_place : {false, true}) {
              auto tensors = tensors_of(dtype, self.rank, counts, in_place);
              self.run(traits, tensors);
              expect_reduced(traits, tensors);
            }
          }
          Lent lent(self, traits, kCounts);
          self.finish(*self.backend->launch(lent.batch()));
          expect_reduced(traits, lent.results());
        }
      }
      self.device.enqueued.clear();
      auto tensors = tensors_of(DataType::Float32, self.rank, {64, 64});
      self.run(self.traits(OpKind::Allreduce, DataType::Float32, ReduceOp::Max), tensors);
      const std::vector<std::string> flat{"launch_batched_copy", "ncclAllReduce",
                                          "launch_batched_copy", "launch_poison",
                                          "cudaEventRecord"};
      const std::vector<std::string> by_levels{
          "launch_batched_copy", "ncclReduceScatter", "ncclAllReduce",  "ncclAllGather",
          "launch_batched_copy", "launch_poison",     "cudaEventRecord"};
      // 128 elements among 3 ranks of a host
      const bool rest = std::count(wanted.host_of_rank.begin(), wanted.host_of_rank.end(), 1) == 3;
      if (!rest) expect(self.device.enqueued == (wanted.levels ? by_levels : flat), "the calls");
      if (rest)
        expect(count(self.device.enqueued, "ncclAllReduce") == 3,
               "what cannot be shared out goes by itself");
    });
  }
}

TEST_CASE(
    "nccl: what hosts share out begins at multiples of 16 bytes, also where the ranks of a host do "
    "not divide it so") {
  World world(6);
  world.options.host_of_rank = {0, 0, 0, 1, 1, 1};
  world.run([](Rank& self) {
    for (const DataType dtype :
         {DataType::Float32, DataType::Float64, DataType::Float16, DataType::UInt8}) {
      self.device.collectives.clear();
      auto tensors = tensors_of(dtype, self.rank, {64, 64, 7});
      const auto traits = self.traits(OpKind::Allreduce, dtype, ReduceOp::Max);
      self.run(traits, tensors);
      expect_reduced(traits, tensors);
      expect(self.device.collectives.size() > 2, "to be summed by levels");
      for (const Contribution& part : self.device.collectives)
        for (const void* at : {part.send, static_cast<const void*>(part.receive)})
          expect(reinterpret_cast<std::uintptr_t>(at) % 16 == 0,
                 text_of(part.call) + " of " + std::string(name_of(dtype)) + " at 16 bytes");
    }
  });
}

TEST_CASE(
    "nccl: with several streams, no communicator is at work before the one that was used before it "
    "has ended") {
  World world(3);
  make_slow(world, 3, 1);
  world.options.streams = 3;
  world.run([](Rank& self) {
    const auto traits = self.traits(OpKind::Allreduce, DataType::Float32, ReduceOp::Sum);
    const auto gathering = self.traits(OpKind::Allgather, DataType::Float32);
    for (int round = 0; round < 10; ++round) {
      std::vector<std::vector<Tensor>> batches;
      for (int b = 0; b < 6; ++b)
        batches.push_back(tensors_of(DataType::Float32, self.rank,
                                     b % 2 == 0 ? kCounts : std::vector<std::int64_t>{33}));
      for (auto& tensor : batches[3])
        tensor.counts.assign(3, 33), tensor.output.resize(3 * tensor.input.size());
      std::vector<std::unique_ptr<Execution>> running;
      for (std::size_t b = 0; b < batches.size(); ++b) {
        Batch batch = Rank::batch(b == 3 ? gathering : traits, batches[b]);
        batch.order = static_cast<std::uint64_t>(round) * 6 + b;
        running.push_back(self.backend->launch(std::move(batch)));
      }
      for (const auto& execution : running) self.finish(*execution);
      for (std::size_t b = 0; b < batches.size(); ++b)
        if (b != 3) expect_reduced(traits, batches[b]);
    }
    expect(self.device.calls("ncclCommInitRankConfig") == 3, "a communicator for each stream");
  });
}

TEST_CASE("nccl: the stream waits for the members' events before it reads them") {
  World world(3);
  make_slow(world, 2, 1);
  world.run([](Rank& self) {
    const auto traits = self.traits(OpKind::Allreduce, DataType::Float32);
    for (const std::size_t number_of_tensors : {1u, 3u}) {
      const auto values = tensors_of(DataType::Float32, self.rank,
                                     std::vector<std::int64_t>(number_of_tensors, 33));
      auto tensors = values;
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        std::fill(tensors[t].input.begin(), tensors[t].input.end(), std::byte{0x77});
        tensors[t].ready_event = self.device.user_event(
            static_cast<int>(3 * t + 2), [&, t] { tensors[t].input = values[t].input; });
      }
      self.device.enqueued.clear();
      self.run(traits, tensors);
      expect_reduced(traits, tensors);
      expect(
          count(self.device.enqueued, "cudaStreamWaitEvent") == static_cast<int>(number_of_tensors),
          "a wait per event");
      expect(self.device.enqueued[number_of_tensors - 1] == "cudaStreamWaitEvent",
             "all waits first");
    }
    auto shared = tensors_of(DataType::Float32, self.rank, {4, 4, 4});
    void* event = self.device.user_event(0, {});
    for (auto& tensor : shared) tensor.ready_event = event;
    self.device.enqueued.clear();
    self.run(traits, shared);
    expect(count(self.device.enqueued, "cudaStreamWaitEvent") == 1,
           "one wait for an event that members share");
  });
}

TEST_CASE("nccl: broadcast from every root, fused and alone") {
  for (const int ranks : {1, 2, 4}) {
    CAPTURE(ranks);
    World world(ranks);
    make_slow(world, 1, 0);
    world.run([&](Rank& self) {
      for (const DataType dtype : kTypes) {
        for (int root = 0; root < ranks; ++root) {
          for (const bool in_place : {false, true}) {
            auto traits = self.traits(OpKind::Broadcast, dtype);
            traits.root = root;
            for (const auto& counts : {kCounts, std::vector<std::int64_t>{33}}) {
              auto tensors = tensors_of(dtype, self.rank, counts, in_place);
              const auto wanted = tensors_of(dtype, root, counts);
              self.device.enqueued.clear();
              self.run(traits, tensors);
              for (std::size_t t = 0; t < counts.size(); ++t)
                expect(tensors[t].result() == wanted[t].input, "the root's " + tensors[t].name);
              const int copies =
                  counts.size() == 1 ? 0 : (self.rank == root) + (self.rank != root || !in_place);
              expect(count(self.device.enqueued, "launch_batched_copy") == copies,
                     "packed on the root only, unpacked where it must be");
            }
          }
        }
      }
    });
  }
}

TEST_CASE("nccl: allgather with equal and with different counts") {
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    World world(ranks);
    make_slow(world, 2, 1);
    world.run([&](Rank& self) {
      const auto traits = self.traits(OpKind::Allgather, DataType::Int16);
      std::vector<Tensor> tensors(3);
      std::vector<std::vector<double>> wanted(3);
      for (int t = 0; t < 3; ++t) {
        auto& tensor = tensors[static_cast<std::size_t>(t)];
        for (int r = 0; r < ranks; ++r) {
          // equal, different with a zero, nothing at all
          const std::int64_t own = t == 0 ? 5 : t == 1 ? r * 3 : 0;
          tensor.counts.push_back(own);
          const auto part = numbers(DataType::Int16, r, t, own);
          wanted[static_cast<std::size_t>(t)].insert(wanted[static_cast<std::size_t>(t)].end(),
                                                     part.begin(), part.end());
          if (r == self.rank) tensor.input = encoded(DataType::Int16, part);
        }
        tensor.output.resize(wanted[static_cast<std::size_t>(t)].size() * 2);
      }
      self.run(traits, tensors);
      for (std::size_t t = 0; t < 3; ++t)
        expect(decoded(DataType::Int16, tensors[t].output) == wanted[t],
               "all ranks' parts in order");
      expect(
          self.device.calls("ncclGroupStart") == 1 && self.device.calls("launch_batched_copy") == 0,
          "one group, no copies");
    });
  }
}

TEST_CASE("nccl: alltoall, uneven, with zeros and rows that are not sent") {
  for (const int ranks : {1, 2, 4}) {
    CAPTURE(ranks);
    World world(ranks);
    make_slow(world, 2, 1);
    world.run([&](Rank& self) {
      for (const DataType dtype : kTypes) {
        const auto rows = [](int from, int to, int t) -> std::int64_t {
          return t == 2 ? 0 : t == 1 ? 5 : (from * 2 + to) % 4;
        };
        const auto input_of = [&](int rank, int t) {
          std::int64_t all = 3;  // not sent
          for (int to = 0; to < ranks; ++to) all += rows(rank, to, t);
          return encoded(dtype, numbers(dtype, rank, t, all));
        };
        std::vector<Tensor> tensors(3);
        std::vector<std::vector<std::byte>> wanted(3);
        for (int t = 0; t < 3; ++t) {
          auto& tensor = tensors[static_cast<std::size_t>(t)];
          auto& all = wanted[static_cast<std::size_t>(t)];
          tensor.name = "t" + std::to_string(t);
          tensor.input = input_of(self.rank, t);
          for (int other = 0; other < ranks; ++other) {
            tensor.sends.push_back(rows(self.rank, other, t));
            tensor.counts.push_back(rows(other, self.rank, t));
            std::int64_t before = 0;
            for (int to = 0; to < self.rank; ++to) before += rows(other, to, t);
            const auto element = static_cast<std::int64_t>(element_bytes(dtype));
            const auto theirs = input_of(other, t);
            const auto begin = theirs.begin() + before * element;
            all.insert(all.end(), begin, begin + tensor.counts.back() * element);
          }
          tensor.output.resize(all.size());
        }
        self.device.enqueued.clear();
        self.run(self.traits(OpKind::Alltoall, dtype), tensors);
        for (std::size_t t = 0; t < 3; ++t)
          expect(tensors[t].output == wanted[t],
                 "every rank's part in order of " + tensors[t].name);
        expect(count(self.device.enqueued, "launch_batched_copy") == 1,
               "one copy of what the rank keeps itself");
      }
      expect(self.device.calls("ncclGroupStart") == static_cast<int>(kTypes.size()),
             "one group per batch");
    });
  }
}

TEST_CASE("nccl: an average that switches sum is scattered without being packed, but in Float16") {
  for (const DataType dtype :
       {DataType::Float32, DataType::BFloat16, DataType::Float16, DataType::Complex64}) {
    CAPTURE(std::string(name_of(dtype)));
    World world(2);
    world.options.sums_only = true;
    world.run([&](Rank& self) {
      const std::size_t lanes = is_complex(dtype) ? 2 : 1;
      std::vector<Tensor> tensors(1);
      tensors[0].name = "gradient";
      tensors[0].input = encoded(dtype, std::vector<double>(8 * lanes, self.rank == 0 ? 1 : 4));
      tensors[0].counts = {4, 4};
      tensors[0].output.resize(tensors[0].input.size() / 2);
      self.run(self.traits(OpKind::Reducescatter, dtype, ReduceOp::Average), tensors);
      expect(decoded(dtype, tensors[0].output) == std::vector<double>(4 * lanes, 2.5),
             "the average");
      expect(self.device.allocations.empty() == (dtype != DataType::Float16),
             "a fusion buffer for Float16 alone");
    });
  }
}

TEST_CASE("nccl: reducescatter of every type, even and uneven, fused and alone") {
  for (const int ranks : {1, 2, 3, 4}) {
    CAPTURE(ranks);
    World world(ranks);
    make_slow(world, ranks % 2, ranks == 3 ? 2 : 0);
    world.run([&](Rank& self) {
      // What remains of a tensor of so many rows.
      const auto scattered = [&](DataType dtype, std::vector<std::int64_t> rows) {
        auto tensors = tensors_of(dtype, self.rank, rows);
        for (std::size_t t = 0; t < rows.size(); ++t) {
          for (int r = 0; r < ranks; ++r)
            tensors[t].counts.push_back(rows[t] / ranks + (r < rows[t] % ranks ? 1 : 0));
          tensors[t].output.assign(
              static_cast<std::size_t>(tensors[t].counts[static_cast<std::size_t>(self.rank)]) *
                  element_bytes(dtype),
              std::byte{0x77});
        }
        return tensors;
      };
      const auto expect_parts = [&](const BatchTraits& traits, const std::vector<Tensor>& tensors) {
        for (std::size_t t = 0; t < tensors.size(); ++t) {
          std::int64_t before = 0;
          for (int r = 0; r < self.rank; ++r)
            before += tensors[t].counts[static_cast<std::size_t>(r)] * lanes_of(traits.dtype);
          const auto got = decoded(traits.dtype, tensors[t].output);
          for (std::size_t i = 0; i < got.size(); ++i) {
            const double wanted =
                expected(traits, static_cast<int>(t), before + static_cast<std::int64_t>(i));
            if (std::fabs(got[i] - wanted) <=
                tolerance(traits.dtype) * std::max(1.0, std::fabs(wanted)))
              continue;
            expect(false, std::string(name_of(traits.dtype)) + " " + tensors[t].name + "[" +
                              std::to_string(i) + "] = " + std::to_string(wanted) + ", got " +
                              std::to_string(got[i]));
          }
        }
      };
      for (const DataType dtype : kTypes) {
        for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Average}) {
          auto traits = self.traits(OpKind::Reducescatter, dtype, op);
          if (!self.backend->supports(traits)) continue;
          for (const bool scaled : {false, true}) {
            traits.prescale_factor = scaled ? 0.5 : 1;
            traits.postscale_factor = scaled ? 2 : 1;
            for (const auto& rows : std::vector<std::vector<std::int64_t>>{
                     {48}, {1}, {7, 0, 1025}, {1, 1, 1}, {0}, {12, 24}}) {
              auto tensors = scattered(dtype, rows);
              const auto inputs = tensors;
              self.run(traits, tensors);
              expect_parts(traits, tensors);
              for (std::size_t t = 0; t < rows.size(); ++t)
                expect(tensors[t].input == inputs[t].input, "the input as it was");
            }
          }
        }
      }
      const auto traits = self.traits(OpKind::Reducescatter, DataType::Float32);
      const auto calls_for = [&](std::vector<std::int64_t> rows) {
        auto tensors = scattered(DataType::Float32, std::move(rows));
        self.device.enqueued.clear();
        self.run(traits, tensors);
        return self.device.enqueued;
      };
      using Calls = std::vector<std::string>;
      expect(calls_for({48}) == Calls{"ncclReduceScatter", "launch_poison", "cudaEventRecord"},
             "no copies for an even tensor alone");
      expect(
          calls_for({4001, 17}) == Calls{"launch_batched_copy", "ncclReduceScatter",
                                         "launch_batched_copy", "launch_poison", "cudaEventRecord"},
          "uneven parts filled up");
      if (ranks > 1)
        expect(count(calls_for({1}), "ncclReduce") == 1,
               "a reduction to the one rank that keeps something");
    });
  }
}

TEST_CASE(
    "nccl: process sets have communicators of their own; a registered fusion buffer is so with "
    "each, and nothing is lent") {
  World world(4);
  world.options.registration = Registration::Buffer;
  world.run([](Rank& self) {
    ProcessSetInfo half;
    half.id = 1 + self.rank % 2;
    half.ranks = self.rank % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 3};
    half.rank = self.rank / 2;
    for (int round = 0; round < 2; ++round) {
      auto traits = self.traits(OpKind::Allreduce, DataType::Float32, ReduceOp::Average);
      auto all = tensors_of(DataType::Float32, self.rank, kCounts);
      self.run(traits, all);
      expect_reduced(traits, all);
      traits.set = &half;
      auto some = tensors_of(DataType::Float32, self.rank, kCounts);
      self.run(traits, some);
      expect_reduced(traits, some);
      traits.kind = OpKind::Broadcast;
      traits.root = half.ranks[1];  // a global rank
      self.run(traits, some = tensors_of(DataType::Float32, self.rank, {9}));
      expect(some[0].output == tensors_of(DataType::Float32, half.ranks[1], {9})[0].input,
             "the root's tensor");
    }
    expect(self.device.calls("ncclCommInitRankConfig") == 2, "a communicator per set");
    expect(self.device.calls("ncclCommRegister") == 2,
           "the fusion buffer registered once with each");
    expect(self.backend->allocate(self.traits(OpKind::Allreduce, DataType::Float32), 64) == nullptr,
           "nothing lent");
    self.backend.reset();
    expect(self.device.aborts.size() == 2, "both ended");
    for (const auto& [comm, times] : self.device.aborts) expect(times == 1, "each once");
  });
}

TEST_CASE(
    "nccl: symmetric windows are made by all ranks of a set together, whatever other sets a rank "
    "is in") {
  for (const bool levels : {false, true}) {
    for (const bool useless : {false, true}) {
      // half of them, for the time they take
      if (hvd::test::kThreadSanitizer && levels == useless) continue;
      CAPTURE(levels);
      CAPTURE(useless);
      World world(4);
      make_slow(world, 2, 1);
      for (auto& device : world.devices) {
        device->no_windows = useless;
        device->windows_say_in_progress = levels == useless;
      }
      world.options.registration = Registration::Window;
      world.options.streams = 2;
      if (levels) world.options.host_of_rank = {0, 0, 1, 1};
      world.run([&](Rank& self) {
        const bool first = self.rank % 2 == 0;
        ProcessSetInfo half;
        half.id = first ? 1 : 2;
        half.ranks = first ? std::vector<int>{0, 2} : std::vector<int>{1, 3};
        half.rank = self.rank / 2;
        std::uint64_t order = 0;
        const auto reduce = [&](const ProcessSetInfo& set, std::int64_t size) {
          auto traits = self.traits(OpKind::Allreduce, DataType::Float32, ReduceOp::Average);
          traits.set = &set;
          auto tensors = tensors_of(DataType::Float32, self.rank, {size, 3});
          auto batch = Rank::batch(traits, tensors);
          // two batches of each set, in the same order on all of its ranks
          batch.order = order / 2;
          ++order;
          self.finish(*self.backend->launch(std::move(batch)));
          expect_reduced(traits, tensors);
        };
        for (const std::int64_t size : {1000, 2000, 600000, 700000}) {
          reduce(half, first ? size * 2 : 10);  // one set's buffers grow, the other's do not
          reduce(self.set, size);
        }
        // on each stream, grown once, with two communicators or one
        const int of_half = first ? 2 : 1, of_all = levels ? 4 : 2;
        const int windows = 2 * (of_half + of_all);
        expect(self.device.calls("ncclCommWindowRegister") == windows, "windows on both streams");
        expect(self.device.calls("ncclCommRegister") == (useless ? windows : 0),
               "registered as buffers where there are none");
        expect(self.backend->allocate(self.traits(OpKind::Allreduce, DataType::Float32), 64) ==
                   nullptr,
               "nothing lent");
        self.backend.reset();
        expect(self.device.calls("ncclCommWindowDeregister") == (useless ? 0 : windows),
               "each deregistered");
        expect(self.device.calls("ncclCommDeregister") == (useless ? windows : 0), "likewise");
      });
    }
  }
}

TEST_CASE("nccl: an outgrown window stays until the end") {
  World world(2);
  world.options.registration = Registration::Window;
  world.options.patience.nonblocking = false;
  world.run([](Rank& self) {
    const auto traits = self.traits(OpKind::Allreduce, DataType::Float32);
    for (const std::int64_t size : {10, 700000, 20, 3000000, 30}) {
      auto tensors = tensors_of(DataType::Float32, self.rank, {size, 3});
      self.run(traits, tensors);
      expect_reduced(traits, tensors);
    }
    const std::size_t mib = std::size_t{1} << 20;
    expect(self.device.allocations == std::vector<std::size_t>{2 * mib, 4 * mib, 16 * mib},
           "powers of two");
    expect(self.device.live_memory() == 3 && self.device.calls("ncclCommWindowRegister") == 3,
           "three windows");
    self.backend.reset();
    expect(self.device.calls("ncclCommWindowDeregister") == 3 && self.device.live_memory() == 0,
           "none of them afterwards");
  });
}

TEST_CASE("nccl: batches in flight share the fusion buffer, also while it grows") {
  World world(3);
  make_slow(world, 3, 0);
  world.run([](Rank& self) {
    const auto traits = self.traits(OpKind::Allreduce, DataType::Float32);
    std::vector<std::vector<Tensor>> tensors;
    for (const std::int64_t size : {10, 1000, 700000, 20, 3000000})
      tensors.push_back(tensors_of(DataType::Float32, self.rank, {size, 3}));
    std::vector<std::unique_ptr<Execution>> executions;
    for (auto& batch : tensors)
      executions.push_back(self.backend->launch(Rank::batch(traits, batch)));
    for (auto& execution : executions)
      expect(execution->completion_event() != nullptr, "a completion event from the start");
    for (auto& execution : executions) self.finish(*execution);
    for (const auto& batch : tensors) expect_reduced(traits, batch);
    expect(executions[0]->advance() == Progress::Done, "done for good");
    const std::size_t mib = std::size_t{1} << 20;
    expect(self.device.allocations == std::vector<std::size_t>{2 * mib, 4 * mib, 16 * mib},
           "powers of two");
    self.run(traits, tensors[0]);
    expect(self.device.live_memory() == 1, "outgrown buffers freed");
  });
}

TEST_CASE("nccl: the fusion buffer grows generously only up to the threshold") {
  World world(2);
  world.options.fusion_threshold_bytes = std::size_t{6} << 20;
  world.run([](Rank& self) {
    const auto traits = self.traits(OpKind::Allreduce, DataType::UInt8);
    for (const std::int64_t mib : {5, 9}) {
      auto tensors = tensors_of(DataType::UInt8, self.rank, {mib << 20, 1});
      self.run(traits, tensors);
    }
    const std::size_t mib = std::size_t{1} << 20;
    expect(self.device.allocations == std::vector<std::size_t>{6 * mib, 10 * mib}, "6 and 10 MiB");
    expect(self.device.calls("ncclCommRegister") == 0, "no registration when it is off");
  });
}

TEST_CASE("nccl: members without elements need no call") {
  World world(2);
  world.run([](Rank& self) {
    for (const OpKind kind : {OpKind::Allreduce, OpKind::Broadcast}) {
      auto tensors = tensors_of(DataType::Float32, self.rank, {0, 0});
      self.run(self.traits(kind, DataType::Float32), tensors);
    }
    auto gathered = tensors_of(DataType::Float32, self.rank, {0});
    gathered[0].counts = {0, 0};
    self.run(self.traits(OpKind::Allgather, DataType::Float32), gathered);
    expect(self.device.enqueued == std::vector<std::string>(3, "cudaEventRecord"),
           "nothing but completion events");
  });
}

TEST_CASE("nccl: eager streams and blocking communicators") {
  World world(3);
  world.options.patience.nonblocking = false;
  for (auto& device : world.devices) device->schedule = {.kind = Schedule::Kind::Eager};
  world.run([](Rank& self) {
    const auto traits = self.traits(OpKind::Allreduce, DataType::BFloat16, ReduceOp::Average);
    for (int round = 0; round < 5; ++round) {
      auto tensors = tensors_of(DataType::BFloat16, self.rank, kCounts);
      self.run(traits, tensors);
      expect_reduced(traits, tensors);
    }
  });
}

TEST_CASE("nccl: the caller's device is put back, and nothing is touched before the first launch") {
  World world(2);
  world.users_devices = {7};
  world.run([](Rank& self) {
    expect(self.device.calls("cudaGetDevice") == 0, "a constructor that calls nothing");
    self.device.contexts = {7};
    self.device.current() = 7;
    auto tensors = tensors_of(DataType::Float32, self.rank, {3, 4});
    self.run(self.traits(OpKind::Allreduce, DataType::Float32), tensors);
    self.backend.reset();
    expect(self.device.current() == 7, "device 7 current again");
  });
}

TEST_CASE(
    "nccl: a rank leaves no context on a GPU that is not its own, and what has to be guessed is "
    "put back") {
  World world(3);
  world.users_devices = {5};
  world.run([](Rank& self) {  // World::run looks at the contexts; threads begin with device 0
    const bool asks_in_vain = self.rank == 2;
    if (asks_in_vain) {
      self.device.current() = 5;
      self.device.fail_call("cuDevicePrimaryCtxGetState", 1);
    }
    auto tensors = tensors_of(DataType::Float32, self.rank, {3, 4});
    auto execution = self.backend->launch(
        Rank::batch(self.traits(OpKind::Allreduce, DataType::Float32), tensors));
    expect(self.device.current() == (asks_in_vain ? 5 : 0),
           "the thread to be on the device that it was on, context or not");
    // in the engine's thread, which begins with device 0, too
    std::thread([&] { self.finish(*execution); }).join();
    // and the events go with whoever drops the last handle
    std::thread([&] { execution.reset(); }).join();
    const auto lent =
        self.backend->allocate(self.traits(OpKind::Allreduce, DataType::Float32), 100);
    expect(lent != nullptr, "memory");
    // no driver to ask: a thread without a context stays on the rank's device, rather than make one
    // on another
    if (self.rank == 1) {
      self.device.fail_call("cuCtxPushCurrent", 1);
      std::thread([&] {
        const auto more = self.backend->allocate(self.traits(OpKind::Allreduce, DataType::Float32),
                                                 std::size_t{64} << 20);
        expect(more != nullptr && self.device.current() == self.rank, "the rank's device to stay");
      }).join();
      expect(!self.device.fail_pending("cuCtxPushCurrent"), "the failure to have been used");
    }
    std::thread([&] { self.backend.reset(); }).join();
  });
}

TEST_CASE(
    "nccl: no call breaks the capture of a CUDA graph, and every thread's mode is what it was") {
  World world(2);
  world.run([](Rank& self) {
    // World::run looks for misuse, and for modes that were left behind
    self.device.capturing = true;
    self.device.settle_polls = self.device.delay = 2;
    const auto traits = self.traits(OpKind::Allreduce, DataType::Float32);
    auto tensors = tensors_of(DataType::Float32, self.rank, {3, 4});
    self.run(traits, tensors);
    expect(self.device.calls("cudaThreadExchangeStreamCaptureMode") > 0,
           "the mode to be exchanged");
    auto lent = self.backend->allocate(traits, 100);
    lent.reset();
    // then as it is: there is no capture to be broken
    self.device.fail_call("cudaThreadExchangeStreamCaptureMode", 1);
    self.device.capturing = false;
    self.run(traits, tensors);
    expect(!self.device.fail_pending("cudaThreadExchangeStreamCaptureMode"),
           "the failure to have been used");
    self.device.capturing = true;
    self.backend.reset();
  });
}

TEST_CASE("nccl: executions may outlive the backend") {
  World world(2);
  world.users_devices = {0};  // where the thread is found, when it cannot be asked where it is
  world.run([](Rank& self) {
    auto tensors = tensors_of(DataType::Float32, self.rank, {3, 4});
    auto execution = self.backend->launch(
        Rank::batch(self.traits(OpKind::Allreduce, DataType::Float32), tensors));
    self.finish(*execution);
    self.backend.reset();
    // a destructor does without the device, and lets go of its event
    self.device.fail_call("cudaGetDevice", 700);
    execution.reset();
    expect(!self.device.fail_pending("cudaGetDevice"), "the failure to have been used");
  });
}

TEST_CASE("nccl: what is supported") {
  HostCluster cluster;
  HostDevice device(cluster, 0);
  NcclBackend backend(device.table(), 0, {});
  BatchTraits traits;
  traits.device = {DeviceKind::Cuda, 0};
  const auto allreduce = [&](DataType dtype, ReduceOp op) {
    traits.kind = OpKind::Allreduce;
    traits.dtype = dtype;
    traits.op = op;
    return backend.supports(traits);
  };
  CHECK(backend.name() == "nccl");
  CHECK(allreduce(DataType::Float32, ReduceOp::Average));
  CHECK(allreduce(DataType::Int16, ReduceOp::Product));
  CHECK(allreduce(DataType::Bool, ReduceOp::Min));
  CHECK(allreduce(DataType::Complex64, ReduceOp::Average));
  CHECK_FALSE(allreduce(DataType::Bool, ReduceOp::Sum));
  CHECK_FALSE(allreduce(DataType::Complex128, ReduceOp::Product));
  CHECK_FALSE(allreduce(DataType::Float32, ReduceOp::Adasum));
  traits.kind = OpKind::Broadcast;
  CHECK(backend.supports(traits));
  traits.kind = OpKind::Allgather;
  CHECK(backend.supports(traits));
  traits.kind = OpKind::Alltoall;
  CHECK(backend.supports(traits));
  traits.kind = OpKind::Reducescatter;
  const auto reducescatter = [&](DataType dtype, ReduceOp op) {
    traits.dtype = dtype;
    traits.op = op;
    return backend.supports(traits);
  };
  CHECK(reducescatter(DataType::Int16, ReduceOp::Average));
  CHECK(reducescatter(DataType::Complex128, ReduceOp::Sum));
  CHECK_FALSE(reducescatter(DataType::Float32, ReduceOp::Max));
  CHECK_FALSE(reducescatter(DataType::Bool, ReduceOp::Sum));
  traits.kind = OpKind::Barrier;
  CHECK_FALSE(backend.supports(traits));
  traits.kind = OpKind::Broadcast;
  traits.device.kind = DeviceKind::Cpu;
  CHECK_FALSE(backend.supports(traits));
  CHECK((gpu_libraries().find("built without") == std::string::npos) == nccl_built());
}

TEST_CASE("nccl: how reductions are planned") {
  const auto plan = [](DataType dtype, ReduceOp op, int ranks, double prescale = 1) {
    return plan_reduction({dtype, op, prescale, 1}, ranks);
  };
  using enum DataType;
  CHECK(plan(Float32, ReduceOp::Average, 4).op == NcclOp::Avg);
  CHECK(plan(Float32, ReduceOp::Average, 4).after.none());
  CHECK(plan(Float32, ReduceOp::Average, 3).op == NcclOp::Sum);
  CHECK(plan(Float32, ReduceOp::Average, 3).after.divisor == 3);
  CHECK(plan(Float16, ReduceOp::Average, 4).op == NcclOp::Avg);
  CHECK(plan(Float16, ReduceOp::Average, 3).before.divisor == 3);
  CHECK(plan(Float16, ReduceOp::Average, 3).after.none());
  CHECK(plan(BFloat16, ReduceOp::Average, 6).after.divisor == 6);
  CHECK(plan_reduction({.dtype = Float32, .op = ReduceOp::Average, .joined = 1}, 4).op ==
        NcclOp::Sum);
  CHECK(plan_reduction({.dtype = Float32, .op = ReduceOp::Average, .joined = 1}, 4).after.divisor ==
        5);
  CHECK(plan(Int8, ReduceOp::Average, 2).wire == Int32);
  CHECK(plan(Int8, ReduceOp::Sum, 2).wire == Int8);
  CHECK(plan(Int32, ReduceOp::Average, 2).wire == Int64);
  CHECK(plan(Int16, ReduceOp::Max, 2).wire == Int32);
  CHECK(plan(Complex64, ReduceOp::Sum, 2).wire == Float32);
  CHECK(plan(Complex64, ReduceOp::Sum, 2).lanes == 2);
  CHECK(plan(Float64, ReduceOp::Min, 1) ==
        ReductionPlan{.type = Float64, .wire = Float64, .op = NcclOp::Min});
  CHECK(plan(Float32, ReduceOp::Average, 4, 0.3).op == NcclOp::Avg);
  CHECK(plan(Float32, ReduceOp::Average, 4, 0.3).before == Scaling{0.3, 1});
  CHECK(plan(Float32, ReduceOp::Average, 3, 2).before == Scaling{2, 1});
  CHECK(plan(Float32, ReduceOp::Average, 3, 2).after == Scaling{1, 3});
  CHECK(plan(Float16, ReduceOp::Average, 3, 0.5).before == Scaling{0.5, 3});
  CHECK(plan(Bool, ReduceOp::Max, 2, 0.5).before.none());
  const auto by_sums = [](DataType dtype, ReduceOp op, int ranks, double prescale = 1) {
    return plan_reduction({dtype, op, prescale, 1}, ranks, true);
  };
  CHECK(by_sums(Float32, ReduceOp::Average, 4).op == NcclOp::Sum);
  CHECK(by_sums(Float32, ReduceOp::Average, 4).before == Scaling{1, 4});
  CHECK(by_sums(Float32, ReduceOp::Average, 4).after.none());
  CHECK(by_sums(BFloat16, ReduceOp::Average, 8, 0.5).before == Scaling{0.5, 8});
  CHECK(by_sums(Float32, ReduceOp::Average, 3) == plan(Float32, ReduceOp::Average, 3));
  CHECK(by_sums(Int32, ReduceOp::Average, 4) == plan(Int32, ReduceOp::Average, 4));
  CHECK(by_sums(Float32, ReduceOp::Average, 1).before.none());
  for (const DataType dtype : kTypes) {
    for (const ReduceOp op : kOps) {
      if (!reduce_supported(dtype, op)) continue;
      const auto made = plan(dtype, op, 3, 0.5);
      CHECK(copy_supported({.items = {},
                            .from = made.type,
                            .to = made.wire,
                            .factor = made.before.factor,
                            .divisor = made.before.divisor}));
      CHECK(copy_supported({.items = {},
                            .from = made.wire,
                            .to = made.type,
                            .factor = made.after.factor,
                            .divisor = made.after.divisor}));
      CHECK_NOTHROW(static_cast<void>(nccl_type(made.wire)));
    }
  }
}

}  // namespace hvd::gpu::test
