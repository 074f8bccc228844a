#include "tests/gpu/torch_omission_cases.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <unistd.h>

#include <ATen/cuda/CUDAEvent.h>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hvd::gpu::test {

using torch::nn::Linear;

namespace {

/// Ends this rank as a crash does, but not in the midst of what is the GPUs', which all share.
[[noreturn]] void die() {
  reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "hvd_double_hold"))();
  ::_exit(0);
}

/// Returns when another rank's death is told.
void await_death() {
  bool told = false;
  try {
    for (;;) hvd::barrier();
  } catch (const hvd::RankFailed&) {
    told = true;
  }
  expect(told, "the death of a rank to be told");
}

/// Nobody has written to memory that was handed out behind a death, when the stream has gone on.
void expect_untouched(const CUDAStream& stream, const std::vector<at::Tensor>& others) {
  // and not for hvd's stream, which waits for the dead one where they share a GPU
  stream.synchronize();
  ::usleep(200'000);
  for (const at::Tensor& tensor : others) expect(is_all(tensor, 2), "memory that was free");
}

std::vector<at::Tensor> take(std::int64_t elements) {
  std::vector<at::Tensor> others;
  for (int i = 0; i < 4; ++i) others.push_back(filled(2, {elements}));
  return others;
}

}  // namespace

/// Nobody else gets the memory of what the rank that lives has submitted.
void run_death() {
  const CUDAStream stream = new_stream();
  c10::cuda::setCurrentCUDAStream(stream);
  auto mine = std::make_optional(filled(1, {1 << 20}));
  hvd::allreduce(*mine, {.name = "both are there"});
  synchronize();
  Gate gate(stream);
  auto handle = std::make_optional(hvd::allreduce_async_(*mine, {.name = "one dies"}));
  while (!handle->done()) ::usleep(100);
  hvd::barrier();
  if (hvd::rank() == 1) die();
  await_death();
  handle.reset();
  mine.reset();
  const auto others = take(1 << 20);
  gate.open();
  expect_untouched(stream, others);
}

/// The other rank comes late, so that the result is made, and copied to, behind the gate.
void run_death_on_the_way_back() {
  const CUDAStream stream = new_stream();
  c10::cuda::setCurrentCUDAStream(stream);
  const at::Tensor mine = filled(1, {1 << 20});
  handed(hvd::allgather(mine, {.name = "both are there"}));
  synchronize();
  const bool dies = hvd::rank() == 1;
  if (dies) hvd::barrier();
  auto rows = std::make_optional(hvd::allgather_async(mine, {.name = "one dies"}));
  if (dies) {
    rows->wait();
    hvd::barrier();
    die();
  }
  Gate gate(stream);
  hvd::barrier();
  ::usleep(100'000);  // for the copy back to be queued
  hvd::barrier();
  await_death();
  rows.reset();
  const auto others = take(2 << 20);
  gate.open();
  expect_untouched(stream, others);
}

/// The copy to the host is still to come when hvd has ended, and its memory is there.
void run_death_on_the_way_there() {
  const CUDAStream stream = new_stream();
  c10::cuda::setCurrentCUDAStream(stream);
  const at::Tensor mine = filled(1, {1 << 20});
  hvd::allreduce(mine, {.name = "both are there"});
  synchronize();
  hvd::barrier();
  if (hvd::rank() == 1) {
    ::usleep(100'000);
    die();
  }
  Gate gate(stream);
  bool told = false;
  try {
    static_cast<void>(hvd::allreduce_async(mine, {.name = "one dies"}));
  } catch (const hvd::Error&) {
    told = true;
  }
  expect(told, "the death of a rank to be told to whoever submits");
  call(new_stream(), hvd::shutdown);
  gate.open();
  stream.synchronize();
  ::usleep(200'000);  // for the copy, which nobody waits for
}

void run_full_gpu() {
  if (hvd::size() < 2) return;
  const auto index = hvd::local_device().index();
  const bool full = hvd::rank() == 0;
  const CUDAStream stream = new_stream();
  c10::cuda::setCurrentCUDAStream(stream);
  const at::Tensor mine = filled(1, {4 << 20});
  synchronize();
  c10::cuda::CUDACachingAllocator::emptyCache();
  if (full) c10::cuda::CUDACachingAllocator::setMemoryFraction(1e-4, index);
  std::string said;
  call(stream, [&] {
    const auto rows = hvd::allgather_async(mine, {.name = "full"});
    try {
      rows.wait();
    } catch (const hvd::BackendError& error) {
      said = error.what();
    }
  });
  if (full) c10::cuda::CUDACachingAllocator::setMemoryFraction(1, index);
  expect(full == (said.find("no memory for the result") != std::string::npos),
         "the rank without memory to be told, and no other");
  synchronize();
}

void run_full_pool() {
  c10::cuda::setCurrentCUDAStream(new_stream());
  const at::Tensor mine = filled(1, {10 << 20});  // more than half of what the GPU has
  synchronize();
  std::string said;
  call(new_stream(), [&] {
    try {
      plainly_reduced(mine, "full").wait();
    } catch (const hvd::BackendError& error) {
      said = error.what();
    }
  });
  expect(said.find("out of memory") != std::string::npos,
         ("the want of memory to be told, not: " + said).c_str());
}

void run_set_that_shares() {
  const hvd::ProcessSet set = hvd::add_process_set({0, 2});
  if (set.rank() < 0) return;
  const CUDAStream stream = new_stream();
  c10::cuda::setCurrentCUDAStream(stream);
  const at::Tensor mine = filled(1, {64, 3});
  std::vector<at::Tensor> all{filled(1, {64})};
  synchronize();
  call(stream, [&] {
    plainly_reduced(all.front(), "of two", set).wait();
    all.push_back(hvd::allreduce(mine, {.name = "sums of two", .process_set = set}));
    all.push_back(hvd::allgather(mine, {.name = "rows of two", .process_set = set}));
  });
  synchronize();
  for (const at::Tensor& tensor : all) expect(is_all(tensor, 1), "what two of three share");
}

void run_streams() {
  const CUDAStream stream = new_stream();
  c10::cuda::setCurrentCUDAStream(stream);
  std::vector<at::Tensor> given, got;
  for (int i = 0; i < 8; ++i) given.push_back(filled(1, {1 << 10}));
  std::vector<hvd::Handle<at::Tensor>> handles;
  call(stream, [&] {
    for (std::size_t i = 0; i < given.size(); ++i)  // of different kinds, which are batches each
      handles.push_back(i % 2 == 0 ? hvd::allreduce_async(given[i])
                                   : hvd::allgather_async(given[i]));
    for (const auto& handle : handles) got.push_back(handle.wait());
  });
  synchronize();
  for (const at::Tensor& tensor : got) expect(is_all(tensor, 1), "what several streams reduce");
  // as many as may be in flight, one after the other, while the stream that they come from is held
  // up: one or two tensors are reduced, and then rows are gathered on another stream of hvd's
  for (const std::size_t tensors : {1, 2}) {
    std::vector<at::Tensor> held;
    for (std::size_t i = 0; i < tensors; ++i) held.push_back(filled(1, {1 << 10}));
    synchronize();
    Gate gate(stream);
    const auto sums = hvd::grouped_allreduce_async_(held);
    while (!sums.done()) ::usleep(100);
    const auto rows = hvd::allgather_async(given.front());
    while (!rows.done()) ::usleep(100);
    gate.open();
    sums.wait(), rows.wait();
    synchronize();
    for (const at::Tensor& tensor : held) expect(is_all(tensor, 1), "what is held up");
  }
}

/// The buffer that has become too small goes when the stream has passed it: what another set packs
/// into it is still to come.
void run_growth() {
  if (hvd::size() != 2 || std::string_view(std::getenv("HVD_GPU_BACKEND")) != "nccl") return;
  const hvd::ProcessSet other = hvd::add_process_set({0, 1});
  const CUDAStream stream = new_stream();
  c10::cuda::setCurrentCUDAStream(stream);
  std::vector<std::vector<at::Tensor>> given;
  for (const std::int64_t elements : {1 << 10, 1 << 20, 1 << 20})
    given.push_back({filled(1, {elements}), filled(1, {elements})});
  synchronize();
  Gate gate(stream);
  std::vector<hvd::Handle<std::vector<at::Tensor>>> handles;
  for (std::size_t i = 0; i < given.size(); ++i)
    handles.push_back(hvd::grouped_allreduce_async_(
        given[i], {.process_set = i == 0 ? hvd::ProcessSet() : other}));
  for (const auto& handle : handles)
    while (!handle.done()) ::usleep(100);
  gate.open();
  for (const auto& handle : handles)
    for (const at::Tensor& tensor : handle.wait())
      expect(is_all(tensor, 1), "what is packed into a buffer that grows");
}

/// The bucket lacks the gradient of a layer that is not used, and leaves in the step.
void run_gradients_on_two_streams(bool fp16) {
  const CUDAStream first = new_stream(), other = new_stream();
  torch::manual_seed(2);
  constexpr int kIn = 512,
                kOut = 1024;  // so large that what is freed is not a part of other blocks
  Linear left(kIn, kOut), right(kIn, kOut), unused(16, 16);
  torch::nn::Sequential net(left, right, unused);
  net->to(hvd::local_device());
  torch::optim::SGD plain(net->parameters(), torch::optim::SGDOptions(0.1));
  hvd::DistributedOptimizerOptions options;
  if (fp16) options.compression = hvd::Compression::fp16();
  hvd::DistributedOptimizer optimizer(plain, net->named_parameters(), options);
  const at::Tensor x = filled(1, {4, kIn});
  synchronize();
  for (int step = 0; step < 3; ++step) {
    at::cuda::CUDAEvent before, after;
    c10::cuda::setCurrentCUDAStream(first);
    before.record(first);
    before.block(other);
    c10::cuda::setCurrentCUDAStream(other);
    const at::Tensor there = right->forward(x);
    after.record(other);
    after.block(first);
    c10::cuda::setCurrentCUDAStream(first);
    at::Tensor sum = left->forward(x) + there.mean();
    if (step == 1) sum = sum + unused->forward(filled(1, {4, 16})).mean();
    sum.sum().backward();
    call(first, [&] { optimizer.synchronize(); });
    if (step == 0) right->weight.mutable_grad().reset();  // which nobody else has used on `first`
    std::vector<at::Tensor> taken;                        // gradients' memory, if it is free
    for (const CUDAStream& stream : {other, first}) {
      c10::cuda::setCurrentCUDAStream(stream);
      for (int i = 0; i < 8; ++i) taken.push_back(filled(-1, {kOut, kIn}));
    }
    c10::cuda::setCurrentCUDAStream(first);
    const at::Tensor used = left->weight.grad().clone();
    if (step > 0) optimizer.step();
    synchronize();
    expect(is_all(used, 4), "gradients that two streams have written");
    optimizer.zero_grad();
  }
}

/// The hooks of one bucket's gradients run on the streams on which their accumulators were made.
void run_accumulators_on_two_streams() {
  const CUDAStream first = new_stream(), other = new_stream();
  Linear left(16, 16), right(16, 16);
  torch::nn::Sequential net(left, right);
  net->to(hvd::local_device());
  const at::Tensor x = filled(1, {4, 16});
  synchronize();
  c10::cuda::setCurrentCUDAStream(other);
  at::Tensor earlier = right->forward(x);
  c10::cuda::setCurrentCUDAStream(first);
  torch::optim::SGD plain(net->parameters(), torch::optim::SGDOptions(0.1));
  hvd::DistributedOptimizer optimizer(plain, net->named_parameters());
  synchronize();
  earlier.reset();
  for (int step = 0; step < 3; ++step) {
    c10::cuda::setCurrentCUDAStream(other);
    at::Tensor sum = right->forward(x).mean();
    at::cuda::CUDAEvent after;
    after.record(other);
    after.block(first);
    c10::cuda::setCurrentCUDAStream(first);
    sum = sum + left->forward(x).mean();
    sum.backward();
    optimizer.step();
    synchronize();
    optimizer.zero_grad();
  }
}

void run_gradients_by_hand() {
  const CUDAStream stream = new_stream();
  c10::cuda::setCurrentCUDAStream(stream);
  Linear net(16, 16);
  net->to(hvd::local_device());
  torch::optim::SGD plain(net->parameters(), torch::optim::SGDOptions(0.1));
  hvd::DistributedOptimizer optimizer(plain, net->named_parameters());
  for (auto& parameter : net->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  call(stream, [&] { optimizer.synchronize(); });
  synchronize();
  expect(is_all(net->bias.grad(), 1), "gradients that were given");
}

}  // namespace hvd::gpu::test
