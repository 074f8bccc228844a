#include "torch_bindings/data_parallel.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "hvd/base/text.h"
#include "torch_bindings/replica_gradients.h"
#include "torch_bindings/replica_threads.h"

namespace hvd::detail {

using Tensors = std::vector<at::Tensor>;
using torch::nn::Module;

// -------------------------------------------------------------------------------------------------------------- the replicas

/// What must be the same in a module for its replicas to be able to follow it.
struct ModuleStructure {
  struct Kind {
    std::vector<std::int64_t> sizes;
    at::ScalarType type;
    at::Device device;
    bool operator==(const Kind&) const = default;
  };
  std::vector<std::weak_ptr<Module>> submodules;  ///< weak: an address in use is not given to another
  std::vector<Kind> parameters, buffers;

  explicit ModuleStructure(const Module& module) {
    for (const auto& submodule : module.modules(/*include_self=*/false)) submodules.emplace_back(submodule);
    const auto kind = [](const at::Tensor& tensor) { return Kind{tensor.sizes().vec(), tensor.scalar_type(), tensor.device()}; };
    for (const auto& parameter : module.parameters()) parameters.push_back(kind(parameter));
    for (const auto& buffer : module.buffers()) buffers.push_back(kind(buffer));
  }
  bool operator==(const ModuleStructure& other) const {
    const auto same = [](const auto& a, const auto& b) { return !a.owner_before(b) && !b.owner_before(a); };
    return parameters == other.parameters && buffers == other.buffers &&
           std::equal(submodules.begin(), submodules.end(), other.submodules.begin(), other.submodules.end(), same);
  }
};

namespace {

/// A copy of the module on a device.
std::shared_ptr<Module> replicate(const std::shared_ptr<Module>& module, at::Device own, at::Device device) {
  try {
    const at::NoGradGuard no_gradient;
    return device == own ? module->clone() : module->clone(device);
  } catch (const c10::Error&) {
    if (device == own && (module->buffers().empty() || !module->is_training())) return module;
    throw InvalidArgument(formatted("data_parallel: {} cannot be copied; let it derive from torch::nn::Cloneable", module->name()));
  }
}

/// On the module's own device the copy's parameters are the module's memory.
void tie_parameters(const Module& module, Module& copy, bool same_device) {
  const Tensors originals = module.parameters();
  Tensors copies = copy.parameters();
  if (copies.size() != originals.size())
    throw InvalidArgument(formatted("data_parallel: a clone() of {} has other parameters", module.name()));
  for (std::size_t i = 0; i < copies.size(); ++i) {
    if (same_device) copies[i].set_data(originals[i].detach());
    copies[i].set_requires_grad(originals[i].requires_grad());
  }
}

/// Brings a copy that no pass uses up to date. False if that cannot be done.
bool follow(const Module& module, Module& copy, bool same_device) {
  const at::NoGradGuard no_gradient;
  const auto from = module.modules(/*include_self=*/false);
  const auto to = copy.modules(/*include_self=*/false);
  const Tensors buffers = module.buffers();
  Tensors copied = copy.buffers();
  if (&module == &copy || from.size() != to.size() || buffers.size() != copied.size()) return false;
  if (!same_device) {
    const Tensors originals = module.parameters();
    Tensors copies = copy.parameters();
    for (std::size_t i = 0; i < std::min(copies.size(), originals.size()); ++i) copies[i].copy_(originals[i], /*non_blocking=*/true);
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) copied[i].copy_(buffers[i], /*non_blocking=*/true);
  if (copy.is_training() != module.is_training()) copy.train(module.is_training());
  for (std::size_t i = 0; i < from.size(); ++i)  // parents first, whose children go with them
    if (to[i]->is_training() != from[i]->is_training()) to[i]->train(from[i]->is_training());
  return true;
}

}  // namespace

/// The second and further replicas of one pass, with what they were made of.
struct Replicas {
  explicit Replicas(ModuleStructure of) : structure(std::move(of)) {}
  ModuleStructure structure;
  std::vector<std::pair<at::Device, std::shared_ptr<Module>>> copies;

  /// Copies of the module on all devices but the first, which is its own.
  void bring_up_to_date(const std::shared_ptr<Module>& module, const std::vector<at::Device>& devices) {
    for (std::size_t i = 1; i < devices.size(); ++i) {
      const bool same_device = devices[i] == devices.front();
      if (copies.size() < i) copies.emplace_back(devices[i], nullptr);
      auto& [device, copy] = copies[i - 1];
      if (!copy || device != devices[i] || !follow(*module, *copy, same_device)) {
        device = devices[i];
        copy = replicate(module, devices.front(), device);
      }
      if (copy != module) tie_parameters(*module, *copy, same_device);
    }
  }
};

class ReplicaPool {
 public:
  /// Null if there are none that can follow the module.
  std::unique_ptr<Replicas> take(const ModuleStructure& structure) {
    const std::lock_guard lock(mutex_);
    std::erase_if(idle_, [&](const auto& replicas) { return !(replicas->structure == structure); });
    if (idle_.empty()) return nullptr;
    auto taken = std::move(idle_.back());
    idle_.pop_back();
    return taken;
  }
  void give_back(std::unique_ptr<Replicas> replicas) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(replicas));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Replicas>> idle_;  ///< as many as were in use at once
};
std::shared_ptr<ReplicaPool> make_replica_pool() { return std::make_shared<ReplicaPool>(); }

namespace {

/// Goes back to the pool in the end, but not from a pass that failed halfway.
struct BorrowedReplicas {
  BorrowedReplicas() = default;
  ~BorrowedReplicas() { give_back(); }
  BorrowedReplicas(const BorrowedReplicas&) = delete;
  BorrowedReplicas& operator=(const BorrowedReplicas&) = delete;
  void give_back() {
    if (pool && sound && replicas) pool->give_back(std::move(replicas));
    replicas.reset();
  }
  std::shared_ptr<ReplicaPool> pool;
  std::unique_ptr<Replicas> replicas;
  bool sound = false;
};

// ------------------------------------------------------------------------------------------------------------------ the pass

/// One forward pass on all replicas, kept for its backward pass.
struct Pass : torch::CustomClassHolder {
  BorrowedReplicas borrowed;  ///< the first member: the graphs through them end before they are given back
  std::vector<at::Device> devices;
  std::int64_t dim = 0;
  bool input_trained = false;
  Tensors inputs, outputs;          ///< of each replica, with its graph between them
  std::vector<Tensors> parameters;  ///< of each replica, those that require gradients

  /// Of the input, if it takes any, and of the parameters.
  Tensors backward(const at::Tensor& gradient) {
    std::vector<std::int64_t> sizes;
    for (const auto& output : outputs) sizes.push_back(output.size(dim));
    const Tensors pieces = gradient.split_with_sizes(sizes, dim);
    std::vector<ReplicaPass> passes;
    for (std::size_t i = 0; i < devices.size(); ++i) {
      passes.push_back({outputs[i].device(), outputs[i], pieces[i], parameters[i]});
      if (input_trained) passes.back().wanted.push_back(inputs[i]);
    }
    borrowed.sound = false;
    const auto of_replicas = devices.front().is_cpu() ? gradients_in_parallel(passes) : gradients_in_one_pass(passes);
    passes.clear();
    Tensors result(1);
    if (input_trained) {
      Tensors of_inputs;
      for (std::size_t i = 0; i < devices.size(); ++i) {
        const at::Tensor& piece = of_replicas[i].back();
        of_inputs.push_back((piece.defined() ? piece : at::zeros_like(inputs[i])).to(gradient.device()));
      }
      result[0] = at::cat(of_inputs, dim);
    }
    for (std::size_t p = 0; p < parameters.front().size(); ++p) {
      at::Tensor sum;
      for (const auto& of_replica : of_replicas) {
        if (!of_replica[p].defined()) continue;
        const at::Tensor here = of_replica[p].to(parameters.front()[p].device());
        sum = sum.defined() ? sum + here : here;
      }
      result.push_back(sum);
    }
    outputs.clear();  // the graphs: nothing refers to the replicas any more
    borrowed.sound = true;
    borrowed.give_back();
    return result;
  }
};

/// Ties the output to the input and the parameters of the one module.
class Replicated : public torch::autograd::Function<Replicated> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::TensorList /*input and parameters*/, const at::Tensor& output,
                            const c10::IValue& pass) {
    context->saved_data["pass"] = pass;
    return output.view_as(output);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (at::GradMode::is_enabled()) throw InvalidArgument("data_parallel() cannot be differentiated twice (create_graph)");
    const auto capsule = context->saved_data["pass"].toCapsule();
    auto* const pass = static_cast<Pass*>(capsule.get());
    if (pass->outputs.empty()) throw InvalidArgument("data_parallel(): a second backward pass through the same forward pass");
    Tensors result = pass->backward(gradients[0]);
    result.resize(result.size() + 2);  // none for the output and the pass
    return result;
  }
};

std::vector<at::Device> places(const Module& module, const at::Tensor& input, const DataParallelOptions& options) {
  if (options.replicas < 0) throw InvalidArgument(formatted("data_parallel: {} replicas", options.replicas));
  if (!options.devices.empty()) return options.devices;
  const Tensors parameters = module.parameters();
  const at::Device own = parameters.empty() ? input.device() : parameters.front().device();
  if (own.is_cpu())
    return std::vector<at::Device>(static_cast<std::size_t>(options.replicas > 0 ? options.replicas : at::get_num_threads()), own);
  std::vector<at::Device> devices{own};
  const int wanted = options.replicas > 0 ? options.replicas : static_cast<int>(torch::cuda::device_count());
  for (int i = 0; i < static_cast<int>(torch::cuda::device_count()) && static_cast<int>(devices.size()) < wanted; ++i)
    if (i != own.index()) devices.emplace_back(own.type(), static_cast<at::DeviceIndex>(i));
  return devices;
}

}  // namespace

at::Tensor data_parallel(const std::shared_ptr<Module>& module, const Forward& forward, const at::Tensor& input,
                         const DataParallelOptions& options, const std::shared_ptr<ReplicaPool>& pool) {
  look_at_number_of_threads();
  auto pass = c10::make_intrusive<Pass>();
  pass->dim = options.dim;
  pass->devices = places(*module, input, options);
  const Tensors pieces = input.detach().chunk(static_cast<std::int64_t>(pass->devices.size()), options.dim);
  pass->devices.erase(pass->devices.begin() + static_cast<std::ptrdiff_t>(pieces.size()), pass->devices.end());
  const at::Device own = pass->devices.front();

  const bool gradients = at::GradMode::is_enabled();
  pass->input_trained = gradients && input.requires_grad();
  const ModuleStructure structure(*module);
  pass->borrowed.pool = pool;
  if (pool) pass->borrowed.replicas = pool->take(structure);
  if (!pass->borrowed.replicas) pass->borrowed.replicas = std::make_unique<Replicas>(structure);
  pass->borrowed.replicas->bring_up_to_date(module, pass->devices);
  std::vector<std::shared_ptr<Module>> replicas;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    replicas.push_back(i == 0 ? module : pass->borrowed.replicas->copies[i - 1].second);
    pass->inputs.push_back(pieces[i].to(pass->devices[i]).detach().set_requires_grad(pass->input_trained));
    pass->parameters.emplace_back();
    for (const auto& parameter : replicas.back()->parameters())
      if (parameter.requires_grad()) pass->parameters.back().push_back(parameter);
  }
  pass->outputs.resize(pieces.size());
  in_parallel(pass->devices, [&](std::size_t i) { pass->outputs[i] = forward(*replicas[i], pass->inputs[i]); });
  pass->borrowed.sound = true;
  Tensors detached;
  for (const auto& output : pass->outputs) detached.push_back(output.detach().to(own));
  const at::Tensor output = at::cat(detached, options.dim);
  if (!gradients || (!pass->input_trained && pass->parameters.front().empty())) return output;
  Tensors tied{input};
  tied.insert(tied.end(), pass->parameters.front().begin(), pass->parameters.front().end());
  return Replicated::apply(at::TensorList(tied), output, c10::IValue::make_capsule(std::move(pass)));
}

}  // namespace hvd::detail
