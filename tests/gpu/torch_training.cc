// Training on a virtual GPU (tests/gpu/double) against training on the CPU: the same steps give the
// same parameters, bit for bit where ranks share a GPU, and up to rounding by NCCL, which sums
// otherwise. A plain program that each rank runs; prints what it tried, returns 1 if anything is
// wrong.
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <hvd/torch.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using torch::nn::BatchNorm1d;
using torch::nn::Linear;
using Parameters = std::vector<at::Tensor>;

int failures = 0;

torch::nn::Sequential make_net(at::Device device, bool normalised = false) {
  torch::manual_seed(11);
  torch::nn::Sequential net(Linear(12, 24));
  if (normalised) net->push_back(BatchNorm1d(24));
  net->push_back(torch::nn::ReLU());
  net->push_back(Linear(24, 4));
  net->to(device);
  return net;
}

/// Differs by rank and step.
std::pair<at::Tensor, at::Tensor> batch(int step, at::Device device) {
  const auto of = [&](double at, at::IntArrayRef sizes) {
    return torch::sin(torch::arange(sizes[0] * sizes[1]).view(sizes) * at).to(device);
  };
  const double seed = 0.1 + 0.37 * step + 0.11 * hvd::rank();
  return {of(seed, {6, 12}), of(seed + 1, {6, 4})};
}

Parameters on_host(const torch::nn::Module& net) {
  Parameters all;
  for (const auto& parameter : net.parameters()) all.push_back(parameter.detach().cpu().clone());
  for (const auto& buffer : net.buffers()) all.push_back(buffer.detach().cpu().clone());
  return all;
}

at::Tensor loss_of(const at::Tensor& output, const at::Tensor& wanted) {
  return torch::mse_loss(output, wanted);
}

Parameters with_optimizer(at::Device device, const hvd::DistributedOptimizerOptions& options,
                          bool scaled = false) {
  auto net = make_net(device);
  hvd::broadcast_parameters(*net, 0);
  hvd::DistributedOptimizer optimizer(
      std::make_unique<torch::optim::Adam>(net->parameters(), torch::optim::AdamOptions(0.01)),
      net->named_parameters(), options);
  hvd::GradScaler scaler({.init_scale = 64, .enabled = scaled});
  for (int step = 0; step < 4; ++step) {
    for (int pass = 0; pass < options.backward_passes_per_step; ++pass) {
      const auto [x, y] = batch(step * 2 + pass, device);
      scaler.scale(loss_of(net->forward(x), y)).backward();
    }
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  }
  return on_host(*net);
}

Parameters with_ddp(at::Device device, bool normalised) {
  auto net = make_net(device, normalised);
  if (normalised) hvd::convert_sync_batchnorm(*net, {});
  hvd::DistributedDataParallel model(net);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    const auto [x, y] = batch(step, device);
    optimizer.zero_grad();
    loss_of(model->forward(x), y).backward();
    optimizer.step();
  }
  return on_host(*net);
}

Parameters with_replicas(at::Device device) {
  auto net = make_net(device);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05));
  hvd::DataParallelOptions options;
  options.devices = std::vector<at::Device>(2, device);
  if (device.is_cuda() && torch::cuda::device_count() > 1)
    options.devices = {at::Device(at::kCUDA, 0), at::Device(at::kCUDA, 1)};
  for (int step = 0; step < 4; ++step) {
    const auto [x, y] = batch(step, device);
    optimizer.zero_grad();
    loss_of(hvd::data_parallel(net, x, options), y).backward();
    optimizer.step();
  }
  return on_host(*net);
}

void compare(const char* what, const std::function<Parameters(at::Device)>& train) {
  ::alarm(180);
  try {
    const Parameters expected = train(at::kCPU), got = train(hvd::local_device());
    const char* const backend = std::getenv("HVD_GPU_BACKEND");
    const bool by_nccl =
        backend != nullptr && std::string_view(backend) == "nccl" && hvd::size() > 1;
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (by_nccl ? torch::allclose(got[i], expected[i], 1e-2, 1e-4)
                  : torch::equal(got[i], expected[i]))
        continue;
      ++failures;
      std::printf(
          "FAILED: rank %d, %s: tensor %zu differs by %g\n", hvd::rank(), what, i,
          (got[i].to(at::kDouble) - expected[i].to(at::kDouble)).abs().max().item<double>());
    }
  } catch (const std::exception& error) {
    ++failures;
    std::printf("FAILED: rank %d, %s: %s\n", hvd::rank(), what, error.what());
  }
  ::alarm(0);
  if (hvd::rank() == 0) std::printf("tried: %s\n", what);
}

}  // namespace

int main() {
  hvd::init();
  torch::set_num_threads(1);
  using Options = hvd::DistributedOptimizerOptions;
  compare("DistributedOptimizer",
          [](at::Device device) { return with_optimizer(device, Options{}); });
  compare("its state shared out", [](at::Device device) {
    return with_optimizer(device, Options{.shard_optimizer_state = true});
  });
  compare("gradients shared out", [](at::Device device) {
    return with_optimizer(device, Options{.shard_gradients = true});
  });
  compare("fp16 on the wire", [](at::Device device) {
    return with_optimizer(device, Options{.compression = hvd::Compression::fp16()});
  });
  compare("accumulation", [](at::Device device) {
    return with_optimizer(device, Options{.backward_passes_per_step = 2});
  });
  compare("GradScaler", [](at::Device device) { return with_optimizer(device, Options{}, true); });
  compare("DistributedDataParallel", [](at::Device device) { return with_ddp(device, false); });
  compare("SyncBatchNorm", [](at::Device device) { return with_ddp(device, true); });
  if (hvd::size() == 1) compare("data_parallel", with_replicas);
  hvd::shutdown();
  return failures == 0 ? 0 : 1;
}
