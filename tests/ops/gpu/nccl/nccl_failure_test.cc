// How the NCCL backend fails, on the host table: every call refused, asynchronous errors, ranks
// that never come, memory that ends. What must hold each time: a BackendError that names the call
// and the rank, on every rank; each communicator aborted exactly once; every handle let go
// (World::run looks); no hang (its watchdog looks).
#include <doctest/doctest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/errors.h"
#include "tests/support/gpu/locked_gpu_api.h"
#include "tests/support/gpu/nccl_world.h"

namespace hvd::gpu::test {
namespace {

std::vector<Tensor> tensors_of(std::size_t tensors, std::size_t floats) {
  std::vector<Tensor> made(tensors);
  for (std::size_t t = 0; t < tensors; ++t) {
    made[t].name = "layer" + std::to_string(t);
    made[t].input = encoded(DataType::Float32, std::vector<double>(floats, 1));
    made[t].output.resize(made[t].input.size());
  }
  return made;
}

/// A fused allreduce, an allgather and the rest: between them they make every call.
void use_everything(Rank& self, std::vector<Tensor>& tensors, std::vector<Tensor>& gathered) {
  for (auto& tensor : tensors) tensor.ready_event = self.device.user_event(1, {});
  self.run(self.traits(OpKind::Allreduce, DataType::Float32, ReduceOp::Average), tensors);
  for (auto& tensor : gathered) {
    tensor.counts.assign(self.set.ranks.size(), 4);
    tensor.output.resize(16 * self.set.ranks.size());
  }
  self.run(self.traits(OpKind::Allgather, DataType::Float32), gathered);
  auto traits = self.traits(OpKind::Broadcast, DataType::Float32);
  self.run(traits, tensors);
  const auto ranks = static_cast<std::int64_t>(self.set.ranks.size());
  for (auto& tensor : gathered) {
    tensor.input.resize(static_cast<std::size_t>(4 * ranks));
    tensor.counts.assign(self.set.ranks.size(), 1);
    tensor.sends = tensor.counts;
  }
  self.run(self.traits(OpKind::Alltoall, DataType::Float32), gathered);
  auto scaled = self.traits(OpKind::Reducescatter, DataType::Float32);
  scaled.prescale_factor = 0.3;
  self.run(scaled, gathered);
  for (auto& tensor : gathered) {  // all for the first rank
    tensor.counts.assign(self.set.ranks.size(), 0);
    tensor.counts[0] = ranks;
  }
  self.run(self.traits(OpKind::Reducescatter, DataType::Float32), gathered);
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Runs `body` on a rank as an engine would: its failure is told to all ranks, and all abort.
/// Returns the words, "" if it went well.
std::string failure_of(Rank& self, const std::function<void()>& body) {
  std::string words;
  try {
    body();
  } catch (const BackendError& error) {
    words = error.what();
  } catch (const std::exception& error) {
    words = std::string("not a BackendError: ") + error.what();
  }
  if (!words.empty()) self.world.failed = true;
  self.backend->abort();
  self.backend->abort();  // an engine calls it once; twice must not hurt
  for (const auto& [comm, times] : self.device.aborts)
    expect(times == 1, "an abort per communicator");
  return words;
}

constexpr std::uint8_t kHalfDone = 0x3f;  // of a float that looks like a result

/// A collective that rank 1 never comes to, because of a kernel of its user's, is aborted on both;
/// the streams then go on.
void abort_under_way(OpKind kind, DataType dtype, std::size_t tensors) {
  World world(2);
  std::barrier all(2);
  world.run([&](Rank& self) {
    self.device.aborted_byte = kHalfDone;
    self.device.delay = 1;
    std::atomic<bool> gate{false};
    const std::size_t lanes = is_complex(dtype) ? 2 : 1;
    std::vector<Tensor> made(tensors);
    for (Tensor& tensor : made) {
      tensor.name = "t";
      tensor.input = encoded(dtype, std::vector<double>(6 * lanes, 1));
      tensor.output.resize(tensor.input.size());
      if (kind == OpKind::Allgather)
        tensor.counts = {6, 6}, tensor.output.resize(2 * tensor.input.size());
      if (kind == OpKind::Alltoall) tensor.counts = tensor.sends = {3, 3};
      if (kind == OpKind::Reducescatter)
        tensor.counts = {3, 3}, tensor.output.resize(tensor.input.size() / 2);
      if (self.rank == 1) tensor.ready_event = self.device.user_event(gate);
    }
    auto traits = self.traits(kind, dtype, dtype == DataType::Bool ? ReduceOp::Max : ReduceOp::Sum);
    traits.root = 1;
    auto execution = self.backend->launch(Rank::batch(traits, made));
    for (int i = 0; i < 20; ++i)
      expect(execution->advance() == Progress::Idle, "one rank to wait for the other");
    all.arrive_and_wait();
    gate = true;
    self.backend->abort();
    const bool is_source = kind == OpKind::Broadcast && self.rank == 1;
    for (const Tensor& tensor : made)
      for (const std::byte byte : tensor.output)
        expect(byte == std::byte{poison_byte(dtype)} || (is_source && dtype == DataType::Bool),
               "nothing that looks like a result");
  });
}

}  // namespace

TEST_CASE("nccl: any refused call is a BackendError with its name, and every rank gets away") {
  struct Case {
    std::string call;
    int nth;
    bool of_several_ranks = false;
  };
  const std::vector<Case> cases{{"cudaGetDevice", 1},
                                {"cudaSetDevice", 1},
                                {"cudaStreamCreateWithPriority", 1},
                                {"cudaEventCreateWithFlags", 1},
                                {"cudaStreamWaitEvent", 1},
                                {"cudaStreamWaitEvent", 2},
                                {"launch_batched_copy", 1},
                                {"launch_batched_copy", 2},
                                {"launch_poison", 1},
                                {"cudaHostAlloc", 1},
                                {"cudaEventRecord", 1},
                                {"cudaEventQuery", 1},
                                {"ncclGetUniqueId", 1},
                                {"ncclCommInitRankConfig", 1},
                                {"ncclCommGetAsyncError", 1},
                                {"ncclCommGetAsyncError", 9},
                                {"ncclMemAlloc", 1},
                                {"ncclCommRegister", 1, true},
                                {"ncclCommWindowRegister", 1, true},
                                {"ncclAllReduce", 1, true},
                                {"ncclGroupStart", 1},
                                {"ncclAllGather", 2},
                                {"ncclGroupEnd", 1},
                                {"ncclBroadcast", 1},
                                {"ncclSend", 2, true},
                                {"ncclRecv", 1, true},
                                {"ncclReduceScatter", 1},
                                {"ncclReduce", 1, true}};
  for (const auto& [ranks, registration] :
       {std::pair(1, Registration::Buffer), std::pair(3, Registration::Buffer),
        std::pair(1, Registration::Window), std::pair(3, Registration::Window)}) {
    for (const auto& [call, nth, of_several_ranks] : cases) {
      if (of_several_ranks && ranks == 1) continue;
      if (call ==
          (registration == Registration::Window ? "ncclCommRegister" : "ncclCommWindowRegister"))
        continue;
      CAPTURE(ranks);
      CAPTURE(static_cast<int>(registration));
      CAPTURE(call);
      CAPTURE(nth);
      const std::string name = call;
      const int guilty = name == "ncclGetUniqueId" || ranks == 1 ? 0 : 1;
      World world(ranks);
      world.options.registration = registration;
      world.users_devices = {99};
      world.shares_abort_word = name != "cudaHostAlloc";
      for (auto& device : world.devices) {
        device->current_device = 99;  // so that there is a device to set
        if (name == "cudaSetDevice") device->contexts = {99};
        device->settle_polls = 1;
        device->delay = 1;
      }
      // The larger attempt and the exact one must both fail before there is nothing to pack into.
      if (name == "ncclMemAlloc") world.devices[static_cast<std::size_t>(guilty)]->memory_bytes = 0;
      world.devices[static_cast<std::size_t>(guilty)]->fail_call(
          name, name.starts_with("cuda") || name.starts_with("launch") ? 700 : 3, nth);
      world.run([&](Rank& self) {
        auto tensors = tensors_of(2, 5), gathered = tensors_of(2, 4);
        const std::string words =
            failure_of(self, [&] { use_everything(self, tensors, gathered); });
        if (self.rank == guilty) {
          expect(contains(words, name + " "), "the call's name in: " + words);
          expect(contains(words, "rank " + std::to_string(guilty) +
                                     " (cuda:" + std::to_string(guilty) + ")"),
                 "the rank in: " + words);
          expect(contains(words, "'layer0', 'layer1'"), "the tensors in: " + words);
          expect(contains(words, name.starts_with("nccl") ? "host NCCL says" : "host CUDA says"),
                 "the library's words in: " + words);
          const bool points =
              name.starts_with("nccl") && name != "ncclMemAlloc" && name != "ncclGetUniqueId";
          expect(!points || contains(words, "; NCCL_DEBUG=WARN"), "the way to more in: " + words);
          expect(!self.device.fail_pending(name), "the failure to have been used");
        } else if (name == "ncclGetUniqueId") {
          expect(contains(words, "rank 0 says: host NCCL says 3"),
                 "the first rank's reason in: " + words);
        }
        self.backend.reset();
      });
      CHECK(world.failed);  // not asked by each rank: one that needs nobody more may be done before
    }
  }
}

/// Drives the execution to its end; the words of its error, or "" if it went well.
std::string ending_of(Execution& execution) {
  try {
    while (execution.advance() != Progress::Done) continue;
    return {};
  } catch (const BackendError& error) {
    return error.what();
  }
}

/// Whether the launch throws.
bool refuses(const Rank& self, std::vector<Tensor>& tensors) {
  try {
    static_cast<void>(self.backend->launch(
        Rank::batch(self.traits(OpKind::Allreduce, DataType::Float32), tensors)));
    return false;
  } catch (const BackendError&) {
    return true;
  }
}

TEST_CASE(
    "nccl: a failed launch aborts nothing and marks nothing before the world knows of it, and is "
    "the last") {
  World world(2);
  std::barrier all(2);
  world.run([&](Rank& self) {
    self.device.fail_call("cudaEventRecord", 700);
    auto tensors = tensors_of(2, 3);
    const bool refused = refuses(self, tensors), refused_again = refuses(self, tensors);
    const bool marked = std::atomic_ref(*self.world.abort_word(self.rank)).load() != 0;
    all.arrive_and_wait();
    expect(refused && self.device.aborts.empty() && !marked,
           "an error, and the others' kernels to wait on");
    expect(refused_again, "no launch any more");
    self.world.failed = true;
    self.backend->abort();  // also waits until the stream is done with the tensors
    expect(self.device.aborts.size() == 1 &&
               std::atomic_ref(*self.world.abort_word(self.rank)).load() == 1,
           "the abort, and its mark");
  });
}

TEST_CASE(
    "nccl: a rank whose peer has aborted first has no result, though nothing of its own was "
    "aborted") {
  for (const OpKind kind : {OpKind::Allreduce, OpKind::Broadcast, OpKind::Alltoall}) {
    CAPTURE(std::string(name_of(kind)));
    World world(2);
    std::barrier all(2);
    world.run([&](Rank& self) {
      self.device.aborted_byte = kHalfDone;
      std::atomic<bool> never{false};
      auto tensors = tensors_of(2, 6);
      if (self.rank == 1) tensors.front().ready_event = self.device.user_event(never);
      for (Tensor& tensor : tensors)
        if (kind == OpKind::Alltoall) tensor.counts = tensor.sends = {3, 3};
      auto traits = self.traits(kind, DataType::Float32);
      traits.root = 1;
      auto execution = self.backend->launch(Rank::batch(traits, tensors));
      for (int i = 0; i < 20; ++i)
        expect(execution->advance() == Progress::Idle, "one rank to wait for the other");
      all.arrive_and_wait();
      if (self.rank == 1) self.backend->abort();
      all.arrive_and_wait();
      if (self.rank == 0) {
        const std::string words = ending_of(*execution);
        expect(contains(words, "another rank has aborted its communicators"),
               "no result, got: " + words);
        expect(self.device.aborts.empty(), "this rank's communicator to be as it was");
        for (const Tensor& tensor : tensors)
          expect(std::isnan(decoded(DataType::Float32, tensor.output).front()),
                 "nothing that looks like a result for the user's stream");
      }
      never = true;
      self.backend->abort();
    });
  }
}

TEST_CASE("nccl: where the device cannot read the shared word, the host's view of it counts") {
  for (const char* const call : {"cudaHostRegister", "cudaHostGetDevicePointer"}) {
    CAPTURE(std::string(call));
    World world(2);
    std::barrier all(2);
    world.run([&](Rank& self) {
      self.device.fail_call(call, 801);
      std::atomic<bool> never{false};
      auto tensors = tensors_of(2, 6);
      if (self.rank == 1) tensors.front().ready_event = self.device.user_event(never);
      auto execution = self.backend->launch(
          Rank::batch(self.traits(OpKind::Allreduce, DataType::Float32), tensors));
      expect(self.device.calls("cudaHostAlloc") == 1, "a word of its own");
      all.arrive_and_wait();
      if (self.rank == 1) self.backend->abort();
      all.arrive_and_wait();
      const std::string words = self.rank == 0 ? ending_of(*execution) : std::string();
      expect(self.rank == 1 || contains(words, "another rank has aborted its communicators"),
             "no result, got: " + words);
      never = true;
      self.backend->abort();
    });
  }
}

TEST_CASE("nccl: ranks that end well mark nothing") {
  World world(2);
  world.run([](Rank& self) {
    auto tensors = tensors_of(2, 6);
    self.run(self.traits(OpKind::Allreduce, DataType::Float32), tensors);
    self.backend.reset();
    expect(std::atomic_ref(*self.world.abort_word(self.rank)).load() == 0, "no mark");
  });
}

TEST_CASE("nccl: the names of a large batch are cut, one tensor has no list") {
  World world(2);
  world.run([](Rank& self) {
    self.device.fail_call("ncclAllReduce", 1);
    auto tensors = tensors_of(8, 3);
    const std::string words = failure_of(
        self, [&] { self.run(self.traits(OpKind::Allreduce, DataType::Float32), tensors); });
    const std::string where =
        std::to_string(self.rank) + " (cuda:" + std::to_string(self.rank) + ")";
    expect(contains(
               words,
               "ncclAllReduce failed on rank " + where +
                   " for 'layer0', 'layer1', 'layer2' and 5 more: host NCCL says 1 (NCCL error 1)"),
           "the whole sentence, got: " + words);
    const std::string later = failure_of(
        self, [&] { self.run(self.traits(OpKind::Allreduce, DataType::Float32), tensors); });
    expect(contains(later, "aborted after an earlier failure"),
           "later launches to fail too, got: " + later);
  });
}

TEST_CASE("nccl: an asynchronous error aborts the communicator while batches are in flight") {
  World world(3);
  // Ranks 0 and 2 wait in a collective that never ends, because rank 1 has left it.
  world.devices[1]->async_error_after = 6;
  world.run([](Rank& self) {
    auto first = tensors_of(2, 5), second = tensors_of(3, 5);
    if (self.rank == 1) {
      for (auto& tensor : first) tensor.ready_event = self.device.user_event(50, {});
    }
    const std::string words = failure_of(self, [&] {
      const auto traits = self.traits(OpKind::Allreduce, DataType::Float32);
      auto a = self.backend->launch(Rank::batch(traits, first));
      auto b = self.backend->launch(Rank::batch(traits, second));
      self.finish(*a);
      self.finish(*b);
    });
    if (self.rank == 1) {
      expect(contains(words, "ncclCommGetAsyncError") && contains(words, "host NCCL says 6"),
             "the asynchronous error in: " + words);
    } else {
      expect(
          contains(words, "another rank has failed") || contains(words, "another rank has aborted"),
          "to be told, got: " + words);
    }
  });
}

TEST_CASE(
    "nccl: what an abort leaves half done is NaN before any stream goes on, whatever the operation "
    "and the type") {
  using enum DataType;
  for (const OpKind kind : {OpKind::Allreduce, OpKind::Broadcast, OpKind::Allgather,
                            OpKind::Alltoall, OpKind::Reducescatter})
    for (const DataType dtype :
         {Float32, Float64, Float16, BFloat16, Complex64, Int32, UInt8, Bool})
      for (const std::size_t tensors : {1, 3}) {
        CAPTURE(std::string(name_of(kind)));
        CAPTURE(std::string(name_of(dtype)));
        CAPTURE(tensors);
        abort_under_way(kind, dtype, tensors);
      }
}

TEST_CASE(
    "nccl: what was done before an abort stays, and so does a root's tensor that is where it was") {
  World world(2);
  std::barrier all(2);
  world.run([&](Rank& self) {
    self.device.aborted_byte = kHalfDone;
    std::atomic<bool> never{false};
    auto done = tensors_of(2, 5), sent = tensors_of(1, 5);
    self.run(self.traits(OpKind::Allreduce, DataType::Float32), done);
    sent.front().in_place = true;
    if (self.rank == 1) sent.front().ready_event = self.device.user_event(never);
    auto execution =
        self.backend->launch(Rank::batch(self.traits(OpKind::Broadcast, DataType::Float32), sent));
    execution->advance();
    all.arrive_and_wait();
    never = true;
    self.backend->abort();
    for (const Tensor& tensor : done)
      expect(decoded(DataType::Float32, tensor.output) == std::vector<double>(5, 2),
             "what was there before to be there");
    const auto got = decoded(DataType::Float32, sent.front().input);
    expect(self.rank == 0 ? got == std::vector<double>(5, 1) : std::isnan(got.front()),
           "the source alone to be as it was");
  });
}

TEST_CASE("nccl: executions of an aborted world fail, and tell why") {
  World world(1);
  world.run([](Rank& self) {
    auto tensors = tensors_of(2, 5);
    auto execution = self.backend->launch(
        Rank::batch(self.traits(OpKind::Broadcast, DataType::Float32), tensors));
    self.backend->abort();
    const std::string words = failure_of(self, [&] { execution->advance(); });
    expect(contains(words, "the communicator was aborted"), "the reason, got: " + words);
    execution.reset();
  });
}

TEST_CASE("nccl: a rank that never comes is given up on") {
  World world(2);
  world.options.patience.limit = std::chrono::milliseconds(30);
  world.options.patience.interrupted = [] { return false; };
  world.run([](Rank& self) {
    if (self.rank == 1) return;
    auto tensors = tensors_of(1, 5);
    const std::string words = failure_of(
        self, [&] { self.run(self.traits(OpKind::Allreduce, DataType::Float32), tensors); });
    expect(contains(words, "ncclCommInitRankConfig") && contains(words, "no answer for 30 ms"),
           "the wait's end, got: " + words);
  });
}

TEST_CASE("nccl: a wait inside NCCL ends when the world has failed") {
  World world(2);
  world.run([](Rank& self) {
    if (self.rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      self.world.failed = true;
      return;
    }
    self.device.settle_polls = 1 << 30;
    auto tensors = tensors_of(1, 5);
    ProcessSetInfo alone;
    alone.ranks = {0};
    alone.rank = 0;
    auto traits = self.traits(OpKind::Broadcast, DataType::Float32);
    traits.set = &alone;
    const std::string words = failure_of(self, [&] { self.run(traits, tensors); });
    expect(contains(words, "ncclBroadcast") && contains(words, "the world has failed"),
           "the interruption, got: " + words);
  });
}

TEST_CASE("nccl: out of memory says how much was asked for, after trying the least that would do") {
  World world(2);
  for (auto& device : world.devices) device->memory_bytes = std::size_t{7} << 20;
  world.run([](Rank& self) {
    const auto traits = self.traits(OpKind::Allreduce, DataType::Float32);
    auto fits = tensors_of(2, 650000);  // 5 MiB: 8 are wanted, 6 are enough
    self.run(traits, fits);
    expect(self.device.allocations ==
               std::vector<std::size_t>{std::size_t{8} << 20, std::size_t{6} << 20},
           "a second attempt");
    auto large = tensors_of(2, 2500000);
    const std::string words = failure_of(self, [&] { self.run(traits, large); });
    expect(contains(words,
                    "20.0 MiB were asked for as fusion buffer (1.0 MiB of 8192.0 MiB are free)"),
           "the sizes, got: " + words);
  });
}

TEST_CASE("nccl: a window that one rank has no memory for is an error on all, not a smaller one") {
  World world(3);
  world.options.registration = Registration::Window;
  world.devices[1]->memory_bytes = std::size_t{7} << 20;
  world.run([](Rank& self) {
    auto tensors = tensors_of(2, 650000);  // 5 MiB: 8 are wanted, and 6 would be enough
    const std::string words = failure_of(
        self, [&] { self.run(self.traits(OpKind::Allreduce, DataType::Float32), tensors); });
    expect(self.device.allocations == std::vector<std::size_t>{std::size_t{8} << 20},
           "one attempt");
    if (self.rank == 1) {
      expect(contains(words, "8.0 MiB were asked for as fusion buffer"), "the size, got: " + words);
    } else {
      expect(contains(words, "ncclCommWindowRegister") && contains(words, "the world has failed"),
             "the wait's end, got: " + words);
    }
  });
}

TEST_CASE("nccl: an exchange that delivers nonsense is an error") {
  HostCluster cluster;
  HostDevice device(cluster, 0);
  NcclBackend backend(device.table(), 0,
                      [](const ProcessSetInfo&, const Bytes&) { return Bytes(5, std::byte{1}); });
  ProcessSetInfo set;
  set.ranks = {0};
  set.rank = 0;
  Batch batch;
  batch.traits.kind = OpKind::Broadcast;
  batch.traits.set = &set;
  CHECK_THROWS_WITH_AS(
      static_cast<void>(backend.launch(batch)),
      "the exchange of NCCL's unique id failed on rank 0 (cuda:0): 5 bytes arrived instead of 129",
      BackendError);
}

TEST_CASE("nccl: a root outside the process set and an operation that is not supported") {
  World world(1);
  world.run([](Rank& self) {
    auto tensors = tensors_of(1, 5);
    auto traits = self.traits(OpKind::Broadcast, DataType::Float32);
    traits.root = 3;
    expect(contains(failure_of(self, [&] { self.run(traits, tensors); }),
                    "root rank 3 is not in the process set"),
           "a refused root");
  });
  World other(1);
  other.run([](Rank& self) {
    auto tensors = tensors_of(1, 5);
    expect(contains(failure_of(self,
                               [&] {
                                 self.run(self.traits(OpKind::Barrier, DataType::Float32), tensors);
                               }),
                    "barrier is not supported"),
           "a refused operation");
  });
}

TEST_CASE("nccl: memory is not freed under a device that does not come to rest") {
  HostCluster cluster;
  HostDevice device(cluster, 0);
  auto tensors = tensors_of(2, 5);
  for (auto& tensor : tensors) tensor.ready_event = device.user_event(1 << 30, {});
  {
    NcclOptions options;
    options.rest_limit = std::chrono::milliseconds(20);
    NcclBackend backend(
        device.table(), 0, [](const ProcessSetInfo&, Bytes mine) { return mine; }, options);
    ProcessSetInfo set;
    set.ranks = {0};
    set.rank = 0;
    BatchTraits traits;
    traits.kind = OpKind::Broadcast;
    traits.set = &set;
    traits.device.kind = DeviceKind::Cuda;
    auto execution = backend.launch(Rank::batch(traits, tensors));
    CHECK(execution->advance() == Progress::Idle);
    backend.abort();
  }
  CHECK(device.live_memory() == 1);
  CHECK(cluster.misuses() == std::vector<std::string>{"a stream destroyed with work pending"});
}

TEST_CASE("nccl: a device that does not come to rest is waited for once, whatever its streams") {
  HostCluster cluster;
  HostDevice device(cluster, 0);
  auto tensors = tensors_of(2, 5);
  for (auto& tensor : tensors) tensor.ready_event = device.user_event(1 << 30, {});
  NcclOptions options;
  options.rest_limit = std::chrono::seconds(1);
  options.streams = 2;
  std::chrono::steady_clock::time_point start;
  {
    NcclBackend backend(
        device.table(), 0, [](const ProcessSetInfo&, Bytes mine) { return mine; }, options);
    ProcessSetInfo set{0, {0}, 0};
    BatchTraits traits;
    traits.kind = OpKind::Broadcast;
    traits.set = &set;
    traits.device.kind = DeviceKind::Cuda;
    std::vector<std::unique_ptr<Execution>> executions;
    for (const std::uint64_t stream : {0, 1}) {
      Batch batch = Rank::batch(traits, tensors);
      batch.order = stream;
      executions.push_back(backend.launch(std::move(batch)));
    }
    start = std::chrono::steady_clock::now();
    CHECK_FALSE(backend.abort());
  }
  CHECK(std::chrono::steady_clock::now() - start < 2 * options.rest_limit);
  CHECK(cluster.misuses() == std::vector<std::string>(2, "a stream destroyed with work pending"));
}

TEST_CASE("nccl: an abort that hangs holds nobody up") {
  // The thread that hangs comes back some time: these are there for as long as the process.
  static HostCluster cluster;
  static HostDevice device(cluster, 0);
  static std::mutex mutex;
  static GpuApi table = locked(device.table(), mutex);
  std::promise<void> gate;
  std::atomic<bool> ended{false};
  table.comm_abort = [&, open = gate.get_future().share(),
                      inner = table.comm_abort](NcclComm* comm) {
    open.wait();
    const NcclCode code = inner(comm);
    ended = true;
    return code;
  };
  NcclOptions options;
  options.patience.abort_limit = std::chrono::milliseconds(20);
  ProcessSetInfo alone{0, {0}, 0};
  BatchTraits traits;
  traits.kind = OpKind::Allgather;
  traits.device = {DeviceKind::Cuda, 0};
  traits.set = &alone;
  auto tensors = tensors_of(1, 3);
  tensors.front().counts = {3};
  NcclBackend backend(
      table, 0, [](const ProcessSetInfo&, Bytes mine) { return mine; }, options);
  const auto execution = backend.launch(Rank::batch(traits, tensors));
  while (execution->advance() != Progress::Done) continue;
  backend.abort();
  CHECK_FALSE(ended);
  CHECK(device.aborts.empty());
  CHECK_THROWS_AS(static_cast<void>(backend.launch(Rank::batch(traits, tensors))), BackendError);
  gate.set_value();
  while (!ended) std::this_thread::yield();
}

}  // namespace hvd::gpu::test
