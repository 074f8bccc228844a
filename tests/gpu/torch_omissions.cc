// Whether a wait, a recording of an event or of a stream, or a guard of hvd's that is not made
// would be noticed: on virtual GPUs (tests/gpu/double), each place in hvd's code that makes such
// calls is left out in its turn (mutations.h). Every case uses what it has waited for at once, and
// nothing else comes between, so that hardly any call is there twice over.
//   torch_omissions [PLACES]   those that have this text; says then what their processes say
//   torch_omissions once       the cases, as the environment says
// Returns 1 if a place is not found out.
#include <unistd.h>

#include <ATen/cuda/CUDAGraph.h>

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/gpu/mutations.h"
#include "tests/gpu/torch_omission_cases.h"

namespace {

using namespace hvd::gpu::test;
using torch::nn::Linear;
using Wait = std::function<at::Tensor()>;

/// What `submit` gives is used on another stream, and its memory again on the first.
void use(const std::function<Wait(at::Tensor& input)>& submit, bool same_stream) {
  const CUDAStream first = new_stream(), other = new_stream(), later = same_stream ? first : other;
  c10::cuda::setCurrentCUDAStream(first);
  Wait wait;
  at::Tensor input = filled(0, {64, 3}), result;
  input.fill_(1);
  call(first, [&] { wait = submit(input); });
  input.reset();
  call(later, [&] { result = handed(wait()); });
  c10::cuda::setCurrentCUDAStream(later);
  const at::Tensor copy = result.clone();
  call(later, [&] { result.reset(), wait = nullptr; });
  ::usleep(5000);  // hvd lets go of the result, too
  c10::cuda::setCurrentCUDAStream(first);
  std::vector<at::Tensor> others;  // one of them has the result's memory
  for (int i = 0; i < 8; ++i) others.push_back(filled(-1, {64, 3}));
  synchronize();
  expect(is_all(copy, 1), "what a collective gives");
}

template <class Handle>
Wait waiting(Handle handle) {
  const auto kept = std::make_shared<Handle>(std::move(handle));
  return [kept] { return kept->wait(); };
}

void run_collectives() {
  for (const bool same : {false, true}) {
    use([](at::Tensor& input) { return waiting(hvd::allreduce_async(input)); }, same);
    use([](at::Tensor& input) { return waiting(hvd::allreduce_async_(input)); }, same);
    use(
        [](at::Tensor& input) {
          const auto all = std::make_shared<hvd::Handle<std::vector<at::Tensor>>>(
              hvd::grouped_allreduce_async({input, input.clone()}));
          return Wait([all] { return all->wait().front(); });
        },
        same);
    use([](at::Tensor& input) { return waiting(hvd::allgather_async(input)); }, same);
    use([](at::Tensor& input) { return waiting(hvd::broadcast_async(input)); }, same);
    use([](at::Tensor& input) { return waiting(hvd::reducescatter_async(input)); }, same);
  }
}

/// Results that are made long after the submission: the last rank comes late, and meanwhile the
/// first uses and frees memory of their size, on all streams, captures a graph or not.
void run_late_results(bool captures) {
  if (hvd::size() < 2) return;
  const bool late = hvd::rank() > 0;
  const CUDAStream stream = new_stream(), later = new_stream();
  c10::cuda::setCurrentCUDAStream(stream);
  at::Tensor mine = filled(0, {1 << 20}), x = filled(2, {8});
  synchronize();
  at::cuda::CUDAGraph graph;
  hvd::barrier();
  if (late) hvd::barrier();
  mine.fill_(1);
  auto rows = hvd::allgather_async(mine, {.name = "late"});
  if (!late) {
    for (int i = 0; i < (captures ? 32 : 1); ++i) {
      c10::cuda::setCurrentCUDAStream(captures ? new_stream() : stream);
      filled(-1, {(1 << 20) * hvd::size()}).fill_(-2);
    }
    c10::cuda::setCurrentCUDAStream(stream);
    if (captures) graph.capture_begin();
    hvd::barrier();
    while (!rows.done()) ::usleep(100);
    if (captures) x.mul_(3), graph.capture_end();
  }
  c10::cuda::setCurrentCUDAStream(later);
  const at::Tensor all = handed(rows.wait());
  const at::Tensor copy = all.clone();
  synchronize();
  expect(is_all(copy, 1), "a result that is made late");
}

/// The first of all. The last to hold an operation, and its event, is a thread that does nothing
/// else.
void run_last_handle() {
  const at::Tensor tensor = filled(1, {64});
  synchronize();
  std::optional<decltype(plainly_reduced(tensor, ""))> last;
  call(new_stream(), [&] {
    last = plainly_reduced(tensor, "last");
    last->wait();
  });
  synchronize();
  hvd::barrier();
  ::usleep(5000);  // hvd lets go of it
  call(new_stream(), [&] { last.reset(); });
  expect(is_all(handed(tensor), 1), "what is reduced in place");
}

/// Gradients come on two streams, and are used on the one that is current at the step. The third
/// step compares what the second has copied of the parameters.
void run_optimizer() {
  const CUDAStream first = new_stream(), other = new_stream();
  torch::manual_seed(1);
  Linear net(16, 16);
  net->to(hvd::local_device());
  torch::optim::SGD plain(net->parameters(), torch::optim::SGDOptions(0.1));
  hvd::DistributedOptimizer optimizer(plain, net->named_parameters());
  const at::Tensor x = filled(1, {4, 16});
  synchronize();
  for (int step = 0; step < 3; ++step) {
    c10::cuda::setCurrentCUDAStream(first);
    net->forward(x).sum().backward();
    call(other, [&] { optimizer.step(); });
    c10::cuda::setCurrentCUDAStream(other);
    const at::Tensor used = net->weight.detach().clone();
    synchronize();
    optimizer.zero_grad();
  }
}

struct OnItsDevice : torch::nn::Cloneable<OnItsDevice> {
  OnItsDevice() { reset(); }
  void reset() override { weight = register_parameter("weight", torch::ones({8})); }
  at::Tensor forward(const at::Tensor& x) {
    expect(c10::cuda::current_device() == x.device().index(), "a replica's device to be current");
    return weight * x;
  }
  at::Tensor weight;
};

void run_data_parallel() {
  torch::nn::ModuleHolder<OnItsDevice> net(std::make_shared<OnItsDevice>());
  net->to(hvd::local_device());
  const at::Tensor x = filled(1, {4, 8}).set_requires_grad(true);
  synchronize();
  hvd::data_parallel(net, x).sum().backward();
  const at::Tensor used = net->weight.grad().clone();
  synchronize();
}

/// Batches that another stream brings are used, and their memory again on that stream.
void run_prefetch() {
  std::vector<std::map<std::string, at::Tensor>> loader;
  for (int i = 0; i < 40; ++i) loader.push_back({{"x", torch::full({64, 3}, double(i))}});
  auto batches = hvd::prefetch_to_device(loader, hvd::local_device(), 2);
  std::vector<at::Tensor> copies;
  call(new_stream(), [&] {
    for (const auto& batch : batches) copies.push_back(batch.at("x").clone());
  });
  synchronize();
  for (std::size_t i = 0; i < copies.size(); ++i)
    expect(is_all(copies[i], double(i)), "a batch that was read ahead");
  // batches that nobody asks for any more
  auto left = std::make_optional(batches.begin());
  ::usleep(5000);
  call(new_stream(), [&] { left.reset(); });
}

/// Parameters that differ are told, without a wait for the device in between.
void run_replica_guard() {
  if (hvd::size() < 2) return;
  c10::cuda::setCurrentCUDAStream(new_stream());
  Linear net(16, 16);
  net->to(hvd::local_device());
  hvd::broadcast_parameters(*net, 0);
  torch::optim::SGD plain(net->parameters(), torch::optim::SGDOptions(0.1));
  hvd::DistributedOptimizer optimizer(plain, net->named_parameters());
  const at::Tensor x = filled(1, {4, 16});
  synchronize();
  bool told = false;
  try {
    for (int step = 0; step < 8; ++step) {
      if (step == 3 && hvd::rank() == 1) net->weight.detach().add_(1);
      net->forward(x).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  } catch (const hvd::Mismatch&) {
    told = true;
  }
  expect(told, "replicas that differ to be told");
  synchronize();
}

/// A rank whose stream is held up compares what its parameters are, all the same, and lets go of
/// the last copies in a thread that has touched no device.
void run_late_parameters() {
  if (hvd::size() < 2) return;
  const CUDAStream stream = new_stream();
  c10::cuda::setCurrentCUDAStream(stream);
  Linear net(16, 16);
  net->to(hvd::local_device());
  torch::optim::SGD plain(net->parameters(), torch::optim::SGDOptions(0.1));
  hvd::broadcast_parameters(*net, 0);
  auto optimizer = std::make_unique<hvd::DistributedOptimizer>(plain, net->named_parameters());
  const at::Tensor x = filled(1, {4, 16});
  std::thread opener;
  for (int step = 0; step < 5; ++step) {
    net->forward(x).sum().backward();
    std::optional<Gate> gate;
    if (step == 3 && hvd::rank() == 1) gate.emplace(stream);
    optimizer->step();
    if (gate)
      opener = std::thread([opened = *gate]() mutable { ::usleep(100'000), opened.open(); });
    if (step != 3 || hvd::rank() == 0) synchronize();
    optimizer->zero_grad();
  }
  if (opener.joinable()) opener.join();
  synchronize();
  call(new_stream(), [&] { optimizer.reset(); });
}

/// "next" stands for the GPU behind a rank's own, which it is not to touch.
void name_foreign_device() {
  if (std::string_view(std::getenv("HVD_TEST_GPU_CURRENT")) != "next") return;
  const int gpus = std::atoi(std::getenv("HVD_TEST_GPUS")), rank = std::atoi(std::getenv("RANK"));
  const std::string next = std::to_string((rank % gpus + 1) % gpus);
  ::setenv("HVD_TEST_GPU_CURRENT", next.c_str(), 1);
  ::setenv("HVD_TEST_GPU_UNTOUCHED", next.c_str(), 1);
}

/// All that there is for the environment.
void run_them() {
  if (is_set("A_RANK_DIES")) return is_staged() ? run_death_on_the_way_back() : run_death();
  if (is_set("A_RANK_DIES_EARLY")) return run_death_on_the_way_there();
  if (is_set("A_SET_SHARES")) return run_set_that_shares();
  if (is_set("HVD_TEST_GPU_MIB")) return run_full_pool();
  if (is_set("HVD_NUM_NCCL_STREAMS")) return run_streams();
  run_last_handle();
  run_collectives();
  run_late_results(false);
  run_late_results(true);
  if (is_staged()) return;  // no stream of LibTorch's waits for what an optimizer gets
  run_growth();
  run_full_gpu();
  run_optimizer();
  run_gradients_on_two_streams(false);
  run_gradients_on_two_streams(true);
  run_accumulators_on_two_streams();
  run_gradients_by_hand();
  run_prefetch();
  run_late_parameters();
  run_replica_guard();
  if (is_set("USERS_DEVICE")) run_data_parallel();
}

bool run_cases() {
  try {
    ::alarm(is_set("A_RANK_DIES") ? 30 : 60);
    name_foreign_device();
    torch::set_num_threads(1);
    hvd::init();
    if (is_set("USERS_DEVICE")) {
      const auto device = static_cast<c10::DeviceIndex>(foreign());
      torch::ones({1}, at::Device(at::kCUDA, device));
      c10::cuda::set_device(device);
    }
    run_them();
    if (!is_set("A_RANK_DIES_EARLY")) call(new_stream(), hvd::shutdown);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FAILED: %s\n", error.what());
    return false;
  }
  return failures == 0;
}

}  // namespace

int main(int arguments, char** values) {
  const std::string choice = arguments > 1 ? values[1] : "";
  if (choice == "once") return run_cases() ? 0 : 1;
  const auto scenario = [](const char* name, int ranks, const char* backend, const char* gpus,
                           const char* current, const char* extra) {
    Scenario made{name, ranks, {}};
    made.environment = {
        {"HVD_GPU_BACKEND", backend}, {"HVD_TEST_GPUS", gpus}, {"HVD_TEST_GPU_CURRENT", current}};
    if (std::string_view(extra) != "USERS_DEVICE" && std::string_view(current) != "0")
      made.environment["HVD_TEST_GPU_UNTOUCHED"] = current;
    const std::string text = extra;
    const std::size_t name_ends = std::min(text.find('='), text.size());
    if (!text.empty())
      made.environment[text.substr(0, name_ends)] =
          name_ends == text.size() ? "1" : text.substr(name_ends + 1);
    return made;
  };
  // what takes least first
  const std::vector<Scenario> scenarios{
      scenario("NCCL, two streams", 2, "nccl", "3", "2", "HVD_NUM_NCCL_STREAMS=2"),
      scenario("a set that shares a GPU", 3, "shared", "2", "next", "A_SET_SHARES"),
      scenario("staged, 2 ranks", 2, "staged", "3", "2", ""),
      scenario("a shared GPU, 1 rank", 1, "shared", "2", "1", ""),
      scenario("NCCL, the user's device", 1, "nccl", "2", "1", "USERS_DEVICE"),
      scenario("a shared GPU, the user's device", 1, "shared", "2", "1", "USERS_DEVICE"),
      scenario("NCCL, 2 ranks", 2, "nccl", "3", "2", ""),
      scenario("a shared GPU, 2 ranks", 2, "shared", "1", "0", ""),
      scenario("a shared GPU that is full", 1, "shared", "2", "1", "HVD_TEST_GPU_MIB=64"),
      scenario("NCCL, a rank that dies", 2, "nccl", "3", "2", "A_RANK_DIES"),
      scenario("a shared GPU, a rank that dies", 2, "shared", "1", "0", "A_RANK_DIES"),
      scenario("staged, a rank that dies", 2, "staged", "3", "2", "A_RANK_DIES"),
      scenario("staged, a rank that dies early", 2, "staged", "3", "2", "A_RANK_DIES_EARLY")};
  return finds_mutations(scenarios, run_cases, choice) ? 0 : 1;
}
