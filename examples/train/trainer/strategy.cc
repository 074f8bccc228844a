#include "examples/train/trainer/strategy.h"

#include <stdexcept>
#include <utility>

#include "examples/train/trainer/profile.h"

namespace examples {
namespace {

hvd::Compression compression_of(const Options& options) {
  if (options.compression == "fp16") return hvd::Compression::fp16();
  if (options.compression == "bf16") return hvd::Compression::bf16();
  if (options.compression == "int8") return hvd::Compression::int8();
  if (options.compression == "topk") return hvd::Compression::topk(options.topk_ratio);
  if (options.compression == "powersgd")
    return hvd::Compression::powersgd(static_cast<int>(options.powersgd_rank));
  return hvd::Compression::none();
}

}  // namespace

Strategy::Strategy(const Options& options, std::shared_ptr<Classifier> model,
                   torch::optim::Optimizer& optimizer, torch::Device device)
    : options_(options),
      precision_(precision_of(options)),
      model_(std::move(model)),
      optimizer_(optimizer),
      device_(device) {
  if (precision_.scales_loss) scaler_.emplace();
  if (precision_.masters) masters_.emplace(optimizer_);
  if (options_.strategy == "hvd") {
    distributed_ = std::make_unique<hvd::DistributedOptimizer>(
        local(), model_->named_parameters(),
        hvd::DistributedOptimizerOptions{
            .compression = compression_of(options_),
            .backward_passes_per_step = static_cast<int>(options_.accumulate),
            .shard_optimizer_state = options_.shard_optimizer,
            .shard_gradients = options_.shard_gradients,
            .share_parameters = options_.share_parameters});
  } else if (options_.strategy == "ddp") {
    data_parallel_ = std::make_unique<hvd::DistributedDataParallel<Classifier>>(
        model_, hvd::DistributedDataParallelOptions{.compression = compression_of(options_)});
  } else if (hvd::size() > 1) {
    throw std::runtime_error("--strategy " + options_.strategy + " is one process, and here are " +
                             std::to_string(hvd::size()) +
                             "; start it with -np 1, or take --strategy hvd or ddp");
  } else if (options_.strategy == "data-parallel") {
    replicas_.emplace(model_,
                      hvd::DataParallelOptions{.replicas = static_cast<int>(options_.replicas)});
  }
}

hvd::AutocastGuard Strategy::autocast() const {
  return {device_.type(), precision_.narrow, precision_.autocast};
}

std::vector<torch::Tensor> Strategy::compression_memory() const {
  return data_parallel_ ? data_parallel_->compression_memory() : std::vector<torch::Tensor>();
}

/// ddp's reductions end with backward, before the scaler sees the optimizer: it is shown it here,
/// without gradients.
void Strategy::announce_scale() {
  if (!scaler_ || !data_parallel_) return;
  scaler_->scale(torch::zeros({}));
  scaler_->unscale_(optimizer());
  scaler_->update(scaler_->get_scale());
}

void Strategy::zero_grad() {
  if (distributed_) {
    distributed_->zero_grad();
  } else if (masters_) {
    masters_->zero_grad();
  } else {
    optimizer_.zero_grad();
  }
}

torch::Tensor Strategy::forward(const torch::Tensor& images) {
  if (data_parallel_) return data_parallel_->forward(images);
  if (replicas_) return replicas_->forward(images);
  return model_->forward(images);
}

torch::Tensor Strategy::backward(const Batch& batch,
                                 const std::function<void(const torch::Tensor&)>& on_loss) {
  namespace functional = torch::nn::functional;
  const auto data = batch.data.chunk(options_.accumulate),
             target = batch.target.chunk(options_.accumulate);
  torch::Tensor loss;
  for (std::size_t i = 0; i < data.size(); ++i) {
    std::optional<hvd::DistributedDataParallel<Classifier>::NoSync> alone;
    if (data_parallel_ && i + 1 < data.size()) alone.emplace(data_parallel_->no_sync());
    const auto images = data[i].to(device_, /*non_blocking=*/true),
               labels = target[i].to(device_, /*non_blocking=*/true);
    {
      const Phase phase(Phase::kForward);
      const auto mixed = autocast();
      loss = functional::cross_entropy(
          precision_.output(forward(precision_.input(images))), labels,
          functional::CrossEntropyFuncOptions().label_smoothing(options_.label_smoothing));
    }
    const auto share = loss / static_cast<double>(data.size());
    {
      const Phase phase(Phase::kBackward);
      (scaler_ ? scaler_->scale(share) : share).backward();
    }
    loss = loss.detach();
    on_loss(loss);
  }
  return loss;
}

void Strategy::clip() {
  if (options_.clip_norm == 0) return;
  if (scaler_ && !distributed_) scaler_->unscale_(optimizer());
  if (distributed_) {
    hvd::clip_grad_norm_(*distributed_, options_.clip_norm);
  } else if (masters_) {
    hvd::clip_grad_norm_(*masters_, options_.clip_norm);
  } else {
    torch::nn::utils::clip_grad_norm_(model_->parameters(), options_.clip_norm);
  }
}

torch::Tensor Strategy::step(const Batch& batch,
                             const std::function<void(const torch::Tensor&)>& on_loss,
                             Spent& spent) {
  const Phase step(Phase::kStep);
  torch::Tensor loss;
  {
    const Stopwatch watch(spent.compute);
    zero_grad();
    loss = backward(batch, on_loss);
  }
  if (distributed_) {  // step() would begin with it
    const Stopwatch watch(spent.communication);
    const Phase wait(Phase::kWait);
    // A scaler waits too, and tells compressions the scale first.
    scaler_ ? scaler_->unscale_(optimizer()) : distributed_->synchronize_once();
  }
  const Stopwatch watch(spent.compute);
  const Phase update(Phase::kUpdate);
  clip();
  if (scaler_) {
    scaler_->step(optimizer());
    scaler_->update();
  } else {
    optimizer().step();
  }
  return loss;
}

}  // namespace examples
