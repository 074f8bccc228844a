#include "tests/bench/step/subject.h"

#include <mpi.h>

#include <chrono>
#include <stdexcept>
#include <utility>

#include "examples/train/models/bert.h"
#include "examples/train/trainer/profile.h"

namespace step_bench {

namespace {

using examples::Phase;

std::shared_ptr<examples::Classifier> make_model(const Options& options, torch::Device device) {
  torch::manual_seed(0);  // all ranks and subjects start alike
  examples::BertOptions bert = options.bert;
  bert.classes = options.classes;
  auto model = options.model == "bert-base"
                   ? examples::bert(bert)
                   : examples::make_model({.name = options.model,
                                           .image = {3, options.side, options.side},
                                           .classes = options.classes});
  model->to(device);
  return model;
}

/// What a GPU still does is a part of what is timed.
void finish_on(torch::Device device) {
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
}

/// The average over all ranks, as a program without a library would make it.
void average_by_hand(const std::vector<torch::Tensor>& parameters) {
  for (auto parameter = parameters.rbegin(); parameter != parameters.rend(); ++parameter) {
    const auto& gradient = parameter->grad();
    if (!gradient.defined()) continue;
    if (!gradient.is_contiguous())
      throw std::runtime_error(
          "a gradient is not contiguous: MPI_Allreduce by hand cannot take it");
    MPI_Allreduce(MPI_IN_PLACE, gradient.data_ptr<float>(), static_cast<int>(gradient.numel()),
                  MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    gradient.div_(hvd::size());
  }
}

}  // namespace

Batch::Batch(const Options& options, torch::Device device) {
  torch::manual_seed(1 + hvd::rank());
  inputs = options.model == "bert-base"
               ? torch::randint(0, options.bert.vocabulary, {options.batch, options.sequence},
                                torch::kInt64)
               : torch::randn({options.batch, 3, options.side, options.side});
  labels = torch::randint(0, options.classes, {options.batch}, torch::kInt64);
  inputs = inputs.to(device);
  labels = labels.to(device);
}

Subject::Subject(std::string name, const Options& options, torch::Device device)
    : name_(std::move(name)),
      device_(device),
      model_(make_model(options, device)),
      plain_(make_optimizer(options)) {
  if (!options.amp.empty()) amp_ = options.amp == "bf16" ? torch::kBFloat16 : torch::kHalf;
  if (!is_hvd()) return;
  hvd::DistributedOptimizerOptions how;
  if (name_ == "hvd-fp16") how.compression = hvd::Compression::fp16();
  if (name_ == "hvd-bf16") how.compression = hvd::Compression::bf16();
  how.shard_optimizer_state = name_ == "hvd-sharded";
  how.shard_gradients = name_ == "hvd-zero2";
  how.share_parameters = name_ == "hvd-shared";
  wrapped_.emplace(*plain_, model_->named_parameters(), how);
}

torch::Tensor Subject::flat() const {
  std::vector<torch::Tensor> rows;
  for (const auto& parameter : model_->parameters()) rows.push_back(parameter.detach().flatten());
  return torch::cat(rows);
}

void Subject::step(const Batch& batch, bool counts) {
  finish_on(device_);
  hvd::barrier();
  const auto before = hvd::stats().batches_run;
  const auto start = std::chrono::steady_clock::now();
  const double exposed = train(batch);
  finish_on(device_);
  const auto after = hvd::stats().batches_run;
  hvd::barrier();
  const double took =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  if (!counts) return;
  milliseconds_.push_back(took);
  exposed_milliseconds_.push_back(exposed);
  batches_ += after - before;
}

void Subject::update() {
  wrapped_->synchronize();
  finish_on(device_);
  hvd::barrier();
  const auto start = std::chrono::steady_clock::now();
  wrapped_->step();
  finish_on(device_);
  hvd::barrier();
  update_milliseconds_.push_back(
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
}

std::unique_ptr<torch::optim::Optimizer> Subject::make_optimizer(const Options& options) const {
  if (options.optimizer == "adam")
    return std::make_unique<torch::optim::Adam>(model_->parameters(),
                                                torch::optim::AdamOptions(1e-3));
  return std::make_unique<torch::optim::SGD>(
      model_->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9).weight_decay(5e-4));
}

double Subject::train(const Batch& batch) {
  const Phase step(Phase::kStep);
  if (wrapped_) {
    wrapped_->zero_grad();
  } else {
    plain_->zero_grad();
  }
  const auto error = loss(batch);
  {
    const Phase backward(Phase::kBackward);
    error.backward();
  }
  const double waited = wait_for_gradients();
  const Phase update(Phase::kUpdate);
  if (wrapped_) {
    wrapped_->step();
  } else {
    plain_->step();
  }
  return waited;
}

double Subject::wait_for_gradients() {
  const Phase wait(Phase::kWait);
  if (name_ == "mpi") average_by_hand(model_->parameters());
  if (!wrapped_) return 0;
  const auto start = std::chrono::steady_clock::now();
  wrapped_->synchronize_once();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

torch::Tensor Subject::loss(const Batch& batch) const {
  const Phase forward(Phase::kForward);
  const hvd::AutocastGuard guard(device_.type(), amp_.value_or(torch::kBFloat16), amp_.has_value());
  return torch::nn::functional::cross_entropy(model_->forward(batch.inputs), batch.labels);
}

}  // namespace step_bench
