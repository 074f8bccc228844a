// Whether a wait, a recording of an event or of a stream, or a guard of hvd's that is not made
// would be noticed: on a virtual GPU (tests/gpu/double), one call is left out after the other, each
// in a process of its own. Every case uses what it has waited for at once, and nothing else comes
// between, so that hardly any call is there twice over.
//   torch_omissions [N [PLACES]]        every Nth call, with the schedules late and random; prints
//                                       how many are missed, by the call's place
//   torch_omissions SCHEDULE KIND:CALL  one of them, such as "late:1 wait:17"; prints what it says
// Returns 1 if there are more than so many places whose calls nobody misses, or the cases fail by
// themselves. There are two: a device that is pushed and then not current, which hvd looks for, and
// sets it instead; and an event that is recorded once more behind the allocation of the result,
// which matters where the user's thread is faster than hvd's.
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <dlfcn.h>
#include <hvd/torch.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

using c10::cuda::CUDAStreamGuard;
using torch::nn::Linear;

int failures = 0;

at::Tensor filled(double value, at::IntArrayRef sizes) {
  return torch::full(sizes, value, at::TensorOptions(at::kFloat).device(hvd::local_device()));
}

void synchronize() {
  for (int device = 0; device < torch::cuda::device_count(); ++device)
    if (c10::cuda::hasPrimaryContext(static_cast<c10::DeviceIndex>(device)))
      torch::cuda::synchronize(device);
}

/// What `submit` gives is used on another stream, and its memory again on the first.
void use(const std::function<std::function<at::Tensor()>(at::Tensor& input)>& submit,
         bool same_stream) {
  const auto index = hvd::local_device().index();
  const auto first = c10::cuda::getStreamFromPool(false, index),
             other = c10::cuda::getStreamFromPool(false, index);
  std::function<at::Tensor()> wait;
  at::Tensor input;
  {
    const CUDAStreamGuard guard(first);
    input = filled(0, {64, 3});
    input.fill_(1);
    wait = submit(input);
  }
  at::Tensor copy;
  {
    const CUDAStreamGuard guard(same_stream ? first : other);
    at::Tensor result = wait();
    copy = result.clone();
  }
  wait = nullptr;
  ::usleep(5000);  // hvd lets go of the result, too
  {
    const CUDAStreamGuard guard(first);
    std::vector<at::Tensor> others;  // one of them has the result's memory
    for (int i = 0; i < 8; ++i) others.push_back(filled(-1, {64, 3}));
  }
  synchronize();
  if (!torch::all(copy.cpu() == 1).item<bool>()) ++failures;
}

template <class Handle>
std::function<at::Tensor()> waiting(Handle handle) {
  const auto kept = std::make_shared<Handle>(std::move(handle));
  return [kept] { return kept->wait(); };
}

void run_collectives() {
  for (const bool same : {false, true}) {
    use([](at::Tensor& input) { return waiting(hvd::allreduce_async(input)); }, same);
    use([](at::Tensor& input) { return waiting(hvd::allreduce_async_(input)); }, same);
    use([](at::Tensor& input) { return waiting(hvd::allgather_async(input)); }, same);
    use([](at::Tensor& input) { return waiting(hvd::broadcast_async(input)); }, same);
    use([](at::Tensor& input) { return waiting(hvd::reducescatter_async(input)); }, same);
  }
}

/// Gradients come on two streams, and are used on the one that is current at the step.
void run_optimizer() {
  const auto index = hvd::local_device().index();
  const auto first = c10::cuda::getStreamFromPool(false, index),
             other = c10::cuda::getStreamFromPool(false, index);
  torch::manual_seed(1);
  Linear net(16, 16);
  net->to(hvd::local_device());
  torch::optim::SGD plain(net->parameters(), torch::optim::SGDOptions(0.1));
  hvd::DistributedOptimizer optimizer(plain, net->named_parameters());
  const at::Tensor x = filled(1, {4, 16});
  synchronize();
  for (int step = 0; step < 2; ++step) {
    {
      const CUDAStreamGuard guard(first);
      net->forward(x).sum().backward();
    }
    const CUDAStreamGuard guard(other);
    optimizer.step();
    const at::Tensor used = net->weight.detach().clone();
    synchronize();
    optimizer.zero_grad();
  }
}

void run_data_parallel() {
  if (torch::cuda::device_count() < 2) return;
  torch::nn::Sequential net(Linear(8, 8));
  net->to(hvd::local_device());
  const at::Tensor x = filled(1, {4, 8}).set_requires_grad(true);
  synchronize();
  hvd::data_parallel(net, x).sum().backward();
  const at::Tensor used = net->parameters()[0].grad().clone();
  synchronize();
}

/// All of it. Threads begin on another device than hvd's, where nobody is to leave anything behind.
int run_cases() {
  try {
    ::alarm(60);
    hvd::init();
    run_collectives();
    run_optimizer();
    if (torch::cuda::device_count() > 1) {
      if (c10::cuda::hasPrimaryContext(1) || c10::cuda::current_device() != 1) ++failures;
      c10::cuda::set_device(1);
      run_collectives();
      if (c10::cuda::current_device() != 1) ++failures;
    }
    run_data_parallel();
    hvd::shutdown();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FAILED: %s\n", error.what());
    return 1;
  }
  if (failures > 0) std::fprintf(stderr, "FAILED: %d times\n", failures);
  return failures == 0 ? 0 : 1;
}

/// Runs the cases in a process; returns what it says, and whether it has failed.
std::pair<std::string, bool> run(const std::string& schedule, const std::string& omitted) {
  std::array<int, 2> pipe{};
  if (::pipe(pipe.data()) != 0) std::abort();
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(pipe[1], STDERR_FILENO);
    ::close(pipe[0]);
    ::setenv("HVD_TEST_GPU_SCHEDULE", schedule.c_str(), 1);
    ::setenv(omitted.empty() ? "HVD_TEST_GPU_COUNT" : "HVD_TEST_GPU_OMIT", omitted.c_str(), 1);
    ::setenv("HVD_TEST_GPU_CURRENT", torch::cuda::device_count() > 1 ? "1" : "0", 1);
    reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "hvd_double_begin_anew"))();
    std::exit(run_cases());
  }
  ::close(pipe[1]);
  std::string said;
  std::array<char, 4096> piece{};
  for (ssize_t bytes = 0; (bytes = ::read(pipe[0], piece.data(), piece.size())) > 0;)
    said.append(piece.data(), static_cast<std::size_t>(bytes));
  ::close(pipe[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  return {said, !WIFEXITED(status) || WEXITSTATUS(status) != 0};
}

/// The number before a text.
int number_before(const std::string& said, const std::string& text) {
  const std::size_t at = said.find(text);
  if (at == std::string::npos) return 0;
  return std::atoi(said.c_str() + said.rfind("virtual GPU: ", at) +
                   std::string("virtual GPU: ").size());
}

}  // namespace

int main(int arguments, char** values) {
  if (arguments > 2 && std::string(values[2]).find(':') != std::string::npos) {
    const auto [said, failed] = run(values[1], values[2]);
    std::printf("%s%s\n", said.c_str(), failed ? "missed" : "not missed");
    return failed ? 1 : 0;
  }
  const int stride = arguments > 1 ? std::max(1, std::atoi(values[1])) : 1;
  const int allowed = arguments > 2 ? std::atoi(values[2]) : 0;
  const std::array<std::string, 2> schedules{"late:1", "random:1"};
  std::string counts;
  for (const std::string& schedule : schedules) {
    const auto [said, failed] = run(schedule, "");
    counts = said;
    if (failed) std::printf("FAILED by itself, with %s:\n%s\n", schedule.c_str(), said.c_str());
    if (failed) return 1;
  }
  const std::array<std::pair<const char*, const char*>, 4> kinds{
      {{"stream", " calls of record_stream"},
       {"wait", " calls of cudaStreamWaitEvent"},
       {"record", " calls of cudaEventRecord"},
       {"device", " calls of device guard"}}};
  struct Place {
    int calls = 0, missed = 0;
  };
  std::map<std::string, Place> places;
  for (const auto& [kind, text] : kinds) {
    const int count = number_before(counts, text);
    for (int number = 1; number <= count; number += stride) {
      bool missed = false;
      std::string where;
      for (const std::string& schedule : schedules) {
        const auto [said, failed] = run(schedule, std::string(kind) + ":" + std::to_string(number));
        const std::size_t at = said.find("called at ");
        if (at != std::string::npos)
          where = said.substr(at + 10, said.find(' ', at + 10) - at - 10);
        missed = missed || failed;
      }
      if (where.empty()) continue;  // the call was not made this time
      Place& place = places[std::string(kind) + " " + where];
      ++place.calls;
      place.missed += missed ? 1 : 0;
    }
  }
  int unnoticed = 0;
  for (const auto& [name, place] : places) {
    std::printf("%s: %d of %d calls missed\n", name.c_str(), place.missed, place.calls);
    if (place.missed == 0) ++unnoticed;
  }
  std::printf("%d places whose calls nobody misses\n", unnoticed);
  return unnoticed <= allowed ? 0 : 1;
}
