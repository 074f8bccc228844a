// LibTorch tensors on a GPU, in the order of streams alone: a kernel that sleeps stands before each
// collective, and the host synchronises with nothing until the end. A plain program that each rank
// runs (with mpirun or alone); prints what it tried, returns 1 if anything is wrong, 77 (a skip)
// where there is no GPU. A hang ends it, with the name of what was tried.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>
#include <hvd/torch.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torch_bindings/reducer/distributed_options.h"
#include "torch_bindings/reducer/reducer.h"

namespace {

using c10::cuda::CUDAStreamGuard;
using torch::nn::Linear;

int failures = 0;
const char* trying = "";
/// What takes longer hangs, also on a machine that has much else to do. Less than ctest gives all.
constexpr unsigned kSeconds = 180;

void on_alarm(int /*signal*/) {
  static const char text[] = "FAILED: a hang in: ";
  static_cast<void>(::write(STDOUT_FILENO, text, sizeof text - 1));
  static_cast<void>(::write(STDOUT_FILENO, trying, std::char_traits<char>::length(trying)));
  static_cast<void>(::write(STDOUT_FILENO, "\n", 1));
  ::_exit(1);
}

void expect(bool condition, const std::string& what) {
  if (condition) return;
  ++failures;
  std::printf("FAILED: rank %d, %s: %s\n", hvd::rank(), trying, what.c_str());
}

void attempt(const char* what, const std::function<void()>& body) {
  trying = what;
  ::alarm(kSeconds);
  try {
    body();
    torch::cuda::synchronize();
  } catch (const std::exception& error) {
    expect(false, error.what());
  }
  ::alarm(0);
  if (hvd::rank() == 0) std::printf("tried: %s\n", what);
}

/// About 20 ms on the current stream.
void sleep_here() { at::cuda::sleep(20'000'000); }

at::Tensor on_gpu(double value, at::IntArrayRef sizes) {
  return torch::full(sizes, value, at::TensorOptions(at::kFloat).device(hvd::local_device()));
}
bool is_all(const at::Tensor& tensor, double value) {
  return torch::all(tensor.cpu() == value).item<bool>();
}

/// Leaves blocks of the given size in the current stream's share of LibTorch's cache that kernels
/// are still to write to.
void leave_busy_blocks(at::IntArrayRef sizes) {
  std::vector<at::Tensor> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(on_gpu(0, sizes));
  sleep_here();
  for (auto& block : blocks) block.fill_(-1);
}

std::vector<c10::cuda::CUDAStream> streams() {
  const auto index = hvd::local_device().index();
  return {c10::cuda::getDefaultCUDAStream(index), c10::cuda::getStreamFromPool(false, index),
          c10::cuda::getStreamFromPool(false, index)};
}

void run_data_parallel() {
  const at::Device device = hvd::local_device();
  torch::nn::Sequential net(Linear(32, 64), torch::nn::ReLU(), Linear(64, 8));
  net->to(device);
  const at::Tensor x = torch::randn({16, 32}).to(device).set_requires_grad(true);
  const auto gradients = [&](const std::function<at::Tensor()>& forward) {
    net->zero_grad();
    x.mutable_grad().reset();
    sleep_here();
    // in the thread that autograd has for the GPU: it must not wait for itself
    forward().square().mean().backward();
    std::vector<at::Tensor> all{x.grad().clone()};
    for (const auto& parameter : net->parameters()) all.push_back(parameter.grad().clone());
    return all;
  };
  for (const auto& stream : streams()) {
    const CUDAStreamGuard guard(stream);
    const auto expected = gradients([&] { return net->forward(x); });
    for (const int replicas : {1, 2, 3}) {
      const hvd::DataParallelOptions options{
          .devices = std::vector<at::Device>(static_cast<std::size_t>(replicas), device)};
      const auto got = gradients([&] { return hvd::data_parallel(net, x, options); });
      for (std::size_t i = 0; i < got.size(); ++i)
        expect(torch::allclose(got[i], expected[i], 1e-4, 1e-6), "gradients of the replicas");
    }
    if (torch::cuda::device_count() > 1 && hvd::size() == 1) {
      const auto got = gradients([&] { return hvd::data_parallel(net, x); });
      for (std::size_t i = 0; i < got.size(); ++i)
        expect(torch::allclose(got[i], expected[i], 1e-4, 1e-6), "gradients of all GPUs");
    }
    c10::cuda::device_synchronize();  // the next stream begins anew
  }
}

void run_collectives() {
  const int ranks = hvd::size(), rank = hvd::rank();
  const double sum = ranks * (ranks + 1) / 2.0;
  const std::vector<std::int64_t> sizes{1 << 16, 3};
  for (const auto& stream : streams()) {
    for (const auto& later : streams()) {
      const CUDAStreamGuard guard(stream);
      leave_busy_blocks({(1 << 16) * ranks, 3});
      leave_busy_blocks(sizes);
      at::Tensor input = on_gpu(0, sizes);
      sleep_here();
      input.fill_(rank + 1);
      const auto rows = hvd::allgather_async(input);
      const auto part =
          hvd::reducescatter_async(input.repeat({ranks, 1}), {.op = hvd::ReduceOp::Sum});
      const auto exchanged = hvd::alltoall_async(input.repeat({ranks, 1}));
      const auto reduced = hvd::allreduce_async(input, {.op = hvd::ReduceOp::Sum});
      const auto sparse =
          hvd::sparse_allreduce_async(input.slice(0, 0, 4).to_sparse(), {.op = hvd::ReduceOp::Sum});
      // which waits for what it is given, and must not get the memory again too early
      const CUDAStreamGuard on_another(later);
      at::Tensor all = rows.wait(), own = part.wait(), theirs = exchanged.wait().output,
                 together = reduced.wait();
      const at::Tensor dense = sparse.wait().to_dense();
      std::vector<at::Tensor> copies;
      sleep_here();
      for (auto* const result : {&all, &own, &theirs, &together}) copies.push_back(result->clone());
      all.reset(), own.reset(), theirs.reset(), together.reset();
      {
        const CUDAStreamGuard first(stream);
        leave_busy_blocks({(1 << 16) * ranks, 3});  // takes what was freed, if it may
        leave_busy_blocks(sizes);
      }
      for (int r = 0; r < ranks; ++r) {
        expect(is_all(copies[0].slice(0, r << 16, (r + 1) << 16), r + 1), "what allgather gave");
        expect(is_all(copies[2].slice(0, r << 16, (r + 1) << 16), r + 1), "what alltoall gave");
      }
      expect(is_all(copies[1], sum), "what reducescatter gave");
      expect(is_all(copies[3], sum), "what allreduce gave");
      expect(is_all(dense, sum), "what sparse_allreduce gave");
      c10::cuda::device_synchronize();
    }
  }
}

/// One bucket, whose gradients are written on two streams: a part of the model has run on another
/// one.
struct Split : torch::nn::Module {
  Split() {
    left = register_module("left", Linear(64, 64));
    right = register_module("right", Linear(64, 64));
  }
  at::Tensor forward(const at::Tensor& x, const c10::cuda::CUDAStream& other) {
    const auto mine = at::cuda::getCurrentCUDAStream(other.device_index());
    at::cuda::CUDAEvent before, after;
    before.record(mine);
    before.block(other);
    at::Tensor there;
    {
      const CUDAStreamGuard guard(other);
      sleep_here();
      there = right->forward(x);
      there.register_hook([](const at::Tensor& gradient) {
        sleep_here();  // on the other stream, before its gradients are there
        return gradient;
      });
    }
    after.record(other);
    after.block(mine);
    return left->forward(x) + there;
  }
  Linear left{nullptr}, right{nullptr};
};

void run_streams_of_gradients() {
  torch::manual_seed(7);
  const auto net = std::make_shared<Split>();
  net->to(hvd::local_device());
  hvd::broadcast_parameters(*net, 0);
  const auto all_streams = streams();
  const at::Tensor x = torch::full({8, 64}, 1.0 + hvd::rank()).to(hvd::local_device());
  torch::optim::SGD plain(net->parameters(), torch::optim::SGDOptions(0.1));
  hvd::DistributedOptimizer optimizer(plain, net->named_parameters());
  for (int step = 0; step < 5; ++step) {
    const CUDAStreamGuard guard(all_streams[static_cast<std::size_t>(step) % 2]);
    optimizer.zero_grad();
    sleep_here();
    net->forward(x, all_streams[2]).sum().backward();
    optimizer.synchronize();
    // The gradient of a weight of a sum over rows of equal numbers: 8 rows of `1 + rank`, averaged.
    const double expected = 8 * (1 + (hvd::size() - 1) / 2.0);
    for (const auto& layer : {net->left, net->right}) {
      expect(is_all(layer->weight.grad(), expected), "the gradients of a layer's weight");
      expect(is_all(layer->bias.grad(), 8), "the gradients of a layer's bias");
    }
    c10::cuda::device_synchronize();
  }
}

void run_capture() {
  const at::Tensor x = on_gpu(2, {1000}), y = on_gpu(1, {1000});
  const auto all_streams = streams();
  c10::cuda::device_synchronize();
  // Something is under way, and polled by the engine's thread, while the graph is captured.
  const auto under_way = [&] {
    const CUDAStreamGuard guard(all_streams[2]);
    for (int i = 0; i < 10; ++i) sleep_here();
    return hvd::allreduce_async(y, {.name = "under way", .op = hvd::ReduceOp::Sum});
  }();
  at::cuda::CUDAGraph graph;
  {
    const CUDAStreamGuard guard(all_streams[1]);
    graph.capture_begin();
    x.mul_(3);
    std::string said;
    try {
      hvd::allreduce(x, {.name = "captured"});
    } catch (const hvd::InvalidArgument& error) {
      said = error.what();
    }
    expect(said.find("allreduce 'captured'") == 0 && said.find("CUDA graph") != std::string::npos,
           "InvalidArgument, not: " + said);
    ::usleep(100'000);
    x.add_(1);
    graph.capture_end();
  }
  graph.replay();
  c10::cuda::device_synchronize();
  expect(is_all(x, 7), "the graph to be whole");
  const at::Tensor sum = under_way.wait();
  expect(is_all(sum, hvd::size()), "what was under way");
  expect(
      is_all(hvd::allreduce(x, {.name = "captured", .op = hvd::ReduceOp::Sum}), 7.0 * hvd::size()),
      "the same name after the capture");
}

/// What is submitted before a capture, and gets its outputs while the stream is captured, because
/// the last rank comes late.
void run_outputs_during_capture() {
  const int ranks = hvd::size();
  const auto all_streams = streams();
  const at::Tensor mine = on_gpu(hvd::rank() + 1, {1000, 3}), x = on_gpu(2, {1000});
  c10::cuda::device_synchronize();
  for (int round = 0; round < 5; ++round) {
    const bool late = hvd::rank() == ranks - 1;
    hvd::barrier();
    const CUDAStreamGuard guard(all_streams[1]);
    leave_busy_blocks({1000 * ranks, 3});
    at::cuda::CUDAGraph graph;
    x.fill_(2);
    hvd::Handle<at::Tensor> rows;
    if (!late || ranks == 1) {
      rows = hvd::allgather_async(mine, {.name = "rows"});
      graph.capture_begin();
      x.mul_(3);
      ::usleep(100'000);  // the last rank comes, and the engine's thread makes the output
      x.add_(1);
      graph.capture_end();
      graph.replay();
    } else {
      ::usleep(50'000);
      rows = hvd::allgather_async(mine, {.name = "rows"});
    }
    const at::Tensor all = rows.wait();
    const at::Tensor copy = all.clone();
    for (int r = 0; r < ranks; ++r)
      expect(is_all(copy.slice(0, r * 1000, (r + 1) * 1000), r + 1), "what allgather gave");
    if (!late || ranks == 1) expect(is_all(x, 7), "the graph to be whole");
  }
}

/// What a step with a loss scaler asks of the device: once, whether anything has overflowed. c10
/// warns of each time that it waits.
void run_questions() {
  static std::atomic<int> questions{0};
  struct Counter : c10::WarningHandler {
    void process(const c10::Warning& warning) override {
      if (warning.msg().find("synchroniz") != std::string::npos) ++questions;
    }
  } counter;
  const at::Device device = hvd::local_device();
  Linear net(64, 64);
  net->to(device);
  torch::optim::SGD plain(net->parameters(), torch::optim::SGDOptions(1e-3));
  hvd::DistributedOptimizer optimizer(plain, net->named_parameters());
  hvd::GradScaler scaler({.init_scale = 1024});
  const at::Tensor x = torch::ones({8, 64}).to(device);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    scaler.scale(net->forward(x).square().mean()).backward();
    optimizer.synchronize();
    c10::cuda::device_synchronize();
    questions = 0;
    const c10::WarningUtils::WarningHandlerGuard guard(&counter);
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_WARN);
    scaler.unscale_(optimizer);
    scaler.step(optimizer);
    scaler.update();
    static_cast<void>(scaler.get_scale());
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
    expect(questions == 1, "one question in a step, not " + std::to_string(questions.load()));
  }
}

/// Buckets whose gradients the backend copies to where they are reduced, on its own stream: steps
/// are those of one process, and gradients' memory is not handed out again before it is read. From
/// the second step on the buckets are dealt as gradients come.
void run_buckets() {
  const at::Device device = hvd::local_device();
  torch::manual_seed(3);
  torch::nn::Sequential net, alone;
  for (auto* const each : {&net, &alone}) {
    torch::manual_seed(3);
    for (int i = 0; i < 6; ++i) (*each)->push_back(Linear(512, 512));
    (*each)->to(device);
  }
  torch::optim::SGD plain(net->parameters(), torch::optim::SGDOptions(0.1)),
      reference(alone->parameters(), torch::optim::SGDOptions(0.1));
  hvd::DistributedOptimizer optimizer(plain, net->named_parameters());
  const auto input = [&](int rank, int step) {
    return torch::full({16, 512}, 0.01 * (rank + 1) + 0.001 * step).to(device);
  };
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    sleep_here();
    net->forward(input(hvd::rank(), step)).square().mean().backward();
    leave_busy_blocks({512, 512});  // takes what was freed, if it may
    optimizer.step();
    alone->zero_grad();
    for (int rank = 0; rank < hvd::size(); ++rank)
      (alone->forward(input(rank, step)).square().mean() / hvd::size()).backward();
    reference.step();
  }
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    expect(torch::allclose(net->parameters()[i], alone->parameters()[i], 1e-4, 1e-6),
           "the parameters of one process");
}

/// Of a round that has failed nothing has been copied: gradients are as backward gave them, and the
/// next round reduces those.
void run_failed_round() {
  const int ranks = hvd::size();
  Linear net(64, 64);
  net->to(hvd::local_device());
  std::vector<hvd::GradientReducer::Named> named;
  for (const auto& item : net->named_parameters()) named.push_back({item.key(), item.value()});
  const auto reducer = std::make_shared<hvd::GradientReducer>(
      named, hvd::DistributedOptimizerOptions{}, 0, "failing");
  reducer->hook();
  const at::Tensor x = on_gpu(1.0 + hvd::rank(), {8, 64});
  for (int step = 0; step < 3; ++step) {
    if (ranks > 1) reducer->announce({hvd::rank() == 0 ? 2 : 3});
    sleep_here();
    net->forward(x).sum().backward();
    if (ranks > 1) {
      std::string said;
      try {
        reducer->synchronize();
      } catch (const hvd::Mismatch& error) {
        said = error.what();
      }
      expect(!said.empty(), "a Mismatch");
      expect(is_all(net->weight.grad(), 8 * (1.0 + hvd::rank())),
             "this rank's own gradients after it");
      reducer->announce({});
    }
    reducer->synchronize();
    expect(is_all(net->weight.grad(), 8 * (1 + (ranks - 1) / 2.0)), "the average afterwards");
    net->zero_grad();
    reducer->begin_step();
  }
  reducer->unhook();
}

/// A rank whose GPU is full takes part: its own wait() throws, the others have their results, and
/// everything goes on.
void run_without_memory() {
  const int ranks = hvd::size(), rank = hvd::rank();
  const auto index = hvd::local_device().index();
  const bool full = rank == ranks - 1;
  const at::Tensor mine = on_gpu(rank + 1, {16 << 20});  // 64 MiB
  c10::cuda::CUDACachingAllocator::emptyCache();
  if (full) c10::cuda::CUDACachingAllocator::setMemoryFraction(1e-4, index);
  sleep_here();
  const auto rows = hvd::allgather_async(mine, {.name = "without memory"});
  std::string said;
  try {
    const at::Tensor all = rows.wait();
    for (int r = 0; r < ranks; ++r)
      expect(is_all(all.slice(0, r * (16 << 20), (r + 1) * (16 << 20)), r + 1),
             "what allgather gave");
  } catch (const hvd::BackendError& error) {
    said = error.what();
  }
  if (full) c10::cuda::CUDACachingAllocator::setMemoryFraction(1, index);
  expect(full == (said.find("allgather 'without memory': no memory for the result") == 0),
         "the rank without memory to be told, and no other: " + said);
  expect(is_all(hvd::allreduce(mine, {.name = "without memory", .op = hvd::ReduceOp::Sum}),
                ranks * (ranks + 1) / 2.0),
         "the next operation");
}

void run_devices() {
  const auto own = hvd::local_device();
  expect(torch::ones({1}, at::kCUDA).device() == own || hvd::size() == 1,
         "init() to have made the rank's GPU current");
  if (torch::cuda::device_count() < 2 || hvd::size() < 2) {
    if (hvd::rank() == 0)
      std::printf(
          "(one GPU or one rank: tensors on another GPU, and contexts there, were not tried)\n");
    return;
  }
  Linear sent(2, 2);
  sent->to(own);
  expect(hvd::broadcast_object(sent, 0)->weight.device() == own,
         "a module that another rank sends to stay on this rank's GPU");
  const int other = (own.index() + 1) % static_cast<int>(torch::cuda::device_count());
  // Before this rank itself makes a tensor elsewhere.
  expect(!c10::cuda::hasPrimaryContext(static_cast<c10::DeviceIndex>(other)),
         "no context on a GPU that is not this rank's");
  hvd::barrier();
  if (hvd::rank() == 1) {
    std::string said;
    try {
      hvd::allreduce(torch::ones({4}, at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(other))),
                     {.name = "elsewhere"});
    } catch (const hvd::InvalidArgument& error) {
      said = error.what();
    }
    expect(said.find("'elsewhere'") != std::string::npos, "InvalidArgument, not: " + said);
  }
  expect(is_all(hvd::allreduce(on_gpu(1, {4}), {.name = "elsewhere"}), 1), "the others to go on");
}

}  // namespace

int main() {
  if (!torch::cuda::is_available()) {
    std::printf("SKIP: no GPU, or LibTorch is linked without CUDA\n");
    return 77;
  }
  std::signal(SIGALRM, on_alarm);
  trying = "init()";
  ::alarm(kSeconds);
  hvd::init();
  attempt("devices and contexts", run_devices);
  attempt("data_parallel: backward in autograd's own thread", run_data_parallel);
  attempt("outputs that the engine's thread allocates", run_collectives);
  attempt("gradients of one bucket on two streams", run_streams_of_gradients);
  attempt("a CUDA graph's capture", run_capture);
  attempt("outputs that are made while the stream is captured", run_outputs_during_capture);
  attempt("buckets that the backend fills, dealt as gradients come", run_buckets);
  attempt("gradients of a round that has failed", run_failed_round);
  attempt("a loss scaler's questions", run_questions);
  attempt("a rank whose GPU is full", run_without_memory);
  hvd::shutdown();
  return failures == 0 ? 0 : 1;
}
