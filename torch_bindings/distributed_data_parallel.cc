#include "torch_bindings/distributed_data_parallel.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "hvd/text.h"
#include "torch_bindings/collectives.h"
#include "torch_bindings/optimizer.h"
#include "torch_bindings/reducer.h"

namespace hvd::detail {

namespace {

/// Wrappers made so far on these ranks: they count alike.
int next_number(const ProcessSet& process_set) {
  static std::mutex mutex;
  static std::map<std::vector<int>, int> made;
  const std::lock_guard lock(mutex);
  return made[process_set.ranks()]++;
}

std::vector<GradientReducer::Named> trained_parameters(const torch::nn::Module& module) {
  std::vector<GradientReducer::Named> trained;
  for (const auto& parameter : module.named_parameters())
    if (parameter.value().requires_grad()) trained.push_back({parameter.key(), parameter.value()});
  if (trained.empty()) throw InvalidArgument("DistributedDataParallel: the module has no parameter that requires a gradient");
  return trained;
}

}  // namespace

ModuleReducer::ModuleReducer(std::shared_ptr<torch::nn::Module> module, DistributedDataParallelOptions options)
    : module_(std::move(module)), options_(std::move(options)) {
  if (!(options_.gradient_predivide_factor > 0))
    throw InvalidArgument(formatted("gradient_predivide_factor is {}; it must be greater than 0", options_.gradient_predivide_factor));
  auto parameters = trained_parameters(*module_);
  GradientReducer::refuse_twice(parameters, "ddp");
  const int number = next_number(options_.process_set);
  name_ = formatted("ddp.{}", number);
  broadcast_parameters(*module_, options_.process_set.ranks().front(), options_.process_set);
  DistributedOptimizerOptions reduction;
  reduction.compression = options_.compression;
  reduction.gradient_predivide_factor = options_.gradient_predivide_factor;
  reduction.sparse_as_dense = options_.sparse_as_dense;
  reduction.process_set = options_.process_set;
  reduction.gradients_are_views = options_.gradients_are_views;
  reducer_ = std::make_shared<GradientReducer>(std::move(parameters), std::move(reduction), number, "ddp");
  reducer_->listen(false);
  reducer_->hook();
}

ModuleReducer::~ModuleReducer() { reducer_->unhook(); }

std::vector<at::Tensor> ModuleReducer::compression_memory() const { return reducer_->compression_memory(); }

void ModuleReducer::before_forward() {
  // A backward pass that threw has left things half done here, and the other ranks wait for the rest.
  const bool inside_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (!inside_backward && in_backward_) end_backward();
  if (unsynchronized > 0 || !at::GradMode::is_enabled()) return;
  if (!options_.broadcast_buffers || !module_->is_training() || options_.process_set.size() == 1) return;
  std::vector<at::Tensor> buffers;
  std::vector<std::string> names;
  for (const auto& buffer : module_->named_buffers()) {
    if (!buffer.value().defined()) continue;
    buffers.push_back(buffer.value());
    names.push_back(buffer.key());
  }
  if (buffers.empty()) return;
  const at::NoGradGuard no_gradient;
  static_cast<void>(
      grouped_broadcast_async_(
          std::move(buffers), std::move(names),
          {.name = name_ + "/buffers", .root_rank = options_.process_set.ranks().front(), .process_set = options_.process_set})
          .wait());
}

void ModuleReducer::after_forward(const at::Tensor& output) {
  if (!output.defined() || !output.requires_grad()) return;
  output.register_hook([weak = weak_from_this()](const at::Tensor&) {
    if (const auto self = weak.lock()) self->begin_backward();
  });
}

void ModuleReducer::begin_backward() {
  if (in_backward_.exchange(true)) return;
  reducer_->listen(true);
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->end_backward();
  });
}

void ModuleReducer::end_backward() {
  in_backward_ = false;
  reducer_->listen(false);
  reducer_->finish_pass();
}

}  // namespace hvd::detail
