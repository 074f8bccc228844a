#include "torch_bindings/replicas/data_parallel.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include "hvd/base/text.h"
#include "hvd/types.h"
#include "torch_bindings/modules/sync_batch_norm.h"
#include "torch_bindings/replicas/replica_passes.h"

namespace hvd::detail {

using Tensors = std::vector<at::Tensor>;
using torch::nn::Module;

// ------------------------------------------------------------------------------------ the replicas

/// The structure of a module, which must stay the same for its replicas to follow it.
struct ModuleStructure {
  struct Kind {
    std::vector<std::int64_t> sizes;
    at::ScalarType type;
    at::Device device;
    bool operator==(const Kind&) const = default;
  };
  std::vector<std::weak_ptr<Module>>
      submodules;  ///< weak: an address in use is not given to another
  std::vector<Kind> parameters, buffers;

  explicit ModuleStructure(const Module& module) {
    for (const auto& submodule : module.modules(/*include_self=*/false))
      submodules.emplace_back(submodule);
    const auto kind = [](const at::Tensor& tensor) {
      return Kind{tensor.sizes().vec(), tensor.scalar_type(), tensor.device()};
    };
    for (const auto& parameter : module.parameters()) parameters.push_back(kind(parameter));
    for (const auto& buffer : module.buffers()) buffers.push_back(kind(buffer));
  }
  bool operator==(const ModuleStructure& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return !a.owner_before(b) && !b.owner_before(a);
    };
    return parameters == other.parameters && buffers == other.buffers &&
           std::equal(submodules.begin(), submodules.end(), other.submodules.begin(),
                      other.submodules.end(), same);
  }
};

namespace {

/// A copy of the module on a device.
std::shared_ptr<Module> replicate(const std::shared_ptr<Module>& module, at::Device own,
                                  at::Device device) {
  try {
    const at::NoGradGuard no_gradient;
    return device == own ? module->clone() : module->clone(device);
  } catch (const c10::Error&) {
    if (device == own && (module->buffers().empty() || !module->is_training())) return module;
    throw InvalidArgument(
        formatted("data_parallel: {} cannot be copied; let it derive from torch::nn::Cloneable",
                  module->name()));
  }
}

/// Gives the copy's parameters the module's memory where both are on one device, and has them
/// require gradients as the module's do.
void tie_parameters(const Module& module, Module& copy, bool same_device) {
  const Tensors originals = module.parameters();
  Tensors copies = copy.parameters();
  if (copies.size() != originals.size())
    throw InvalidArgument(
        formatted("data_parallel: a clone() of {} has other parameters", module.name()));
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
    for (std::size_t i = 0; i < std::min(copies.size(), originals.size()); ++i)
      copies[i].copy_(originals[i], /*non_blocking=*/true);
  }
  for (std::size_t i = 0; i < buffers.size(); ++i)
    copied[i].copy_(buffers[i], /*non_blocking=*/true);
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
  void bring_up_to_date(const std::shared_ptr<Module>& module,
                        const std::vector<at::Device>& devices) {
    // in which tensors would be made that cannot take the module's memory, nor gradients later
    const c10::InferenceMode is_off(false);
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

// ---------------------------------------------------------------------------------------- the pass

/// One forward pass on all replicas, kept for its backward pass.
struct Pass : torch::CustomClassHolder {
  BorrowedReplicas borrowed;  ///< the first member: graphs through them end before they go back
  std::vector<at::Device> devices;
  std::int64_t dim = 0;
  std::vector<bool> trained;        ///< by input: its gradient is wanted
  std::vector<at::Device> origins;  ///< by input: where it was
  std::vector<Tensors> inputs;      ///< of each replica
  std::vector<Tensors> outputs;     ///< of each replica, with their graphs
  std::vector<Tensors> parameters;  ///< of each replica, those that require gradients
  Tensors joined;                   ///< the outputs, until they are returned

  /// The gradient of an output, cut as the output is joined; undefined ones where there is none.
  Tensors cut(const at::Tensor& gradient, std::size_t place) const {
    Tensors pieces(devices.size());
    if (!gradient.defined()) return pieces;
    const auto one_each = [&](std::size_t i) { return outputs[i][place].dim() == 0; };
    std::vector<std::int64_t> sizes;
    for (std::size_t i = 0; i < devices.size(); ++i)
      sizes.push_back(one_each(i) ? 1 : outputs[i][place].size(dim));
    if (gradient.dim() == 0) return {gradient};
    pieces = gradient.split_with_sizes(sizes, one_each(0) ? 0 : dim);
    for (std::size_t i = 0; i < pieces.size(); ++i)
      if (one_each(i)) pieces[i] = pieces[i].squeeze(0);
    return pieces;
  }

  std::vector<ReplicaPass> passes(const Tensors& gradients) const {
    std::vector<ReplicaPass> all;
    for (std::size_t i = 0; i < devices.size(); ++i) {
      all.push_back({devices[i], {}, {}, parameters[i]});
      auto& one = all.back();
      for (std::size_t k = 0; k < trained.size(); ++k)
        if (trained[k]) one.wanted.push_back(inputs[i][k]);
    }
    for (std::size_t place = 0; place < gradients.size(); ++place) {
      const Tensors pieces = cut(gradients[place], place);
      for (std::size_t i = 0; i < devices.size(); ++i) {
        if (!pieces[i].defined()) continue;
        all[i].outputs.push_back(outputs[i][place]);
        all[i].gradients.push_back(pieces[i]);
      }
    }
    return all;
  }

  /// The gradient of input `k` of those of its pieces, or of the copies that all replicas had.
  at::Tensor join(std::size_t k, const Tensors& of_pieces) const {
    Tensors pieces;
    for (std::size_t i = 0; i < devices.size(); ++i)
      pieces.push_back(
          (of_pieces[i].defined() ? of_pieces[i] : at::zeros_like(inputs[i][k])).to(origins[k]));
    return inputs.front()[k].dim() == 0 ? at::stack(pieces).sum(0) : at::cat(pieces, dim);
  }

  /// Returns the gradients of the inputs that take any, and of the parameters.
  Tensors backward(const Tensors& gradients) {
    borrowed.sound = false;
    const auto of_replicas = [&] {
      const auto all = passes(gradients);
      return devices.front().is_cpu() ? gradients_in_parallel(all) : gradients_in_one_pass(all);
    }();
    Tensors result(trained.size());
    std::size_t next = parameters.front().size();
    for (std::size_t k = 0; k < trained.size(); ++k) {
      if (!trained[k]) continue;
      Tensors of_pieces;
      for (const auto& of_replica : of_replicas) of_pieces.push_back(of_replica[next]);
      result[k] = join(k, of_pieces);
      ++next;
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

/// Ties the outputs to the inputs and the parameters of the one module.
class Replicated : public torch::autograd::Function<Replicated> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                at::TensorList /*inputs and parameters*/,
                                                const c10::IValue& capsule) {
    context->saved_data["pass"] = capsule;
    context->set_materialize_grads(false);
    auto& pass = *static_cast<Pass*>(capsule.toCapsule().get());
    Tensors joined = std::exchange(pass.joined, {}), constant;
    for (std::size_t place = 0; place < joined.size(); ++place) {
      const auto trained = [place](const Tensors& of_replica) {
        return of_replica[place].requires_grad();
      };
      if (std::none_of(pass.outputs.begin(), pass.outputs.end(), trained))
        constant.push_back(joined[place]);
    }
    context->mark_non_differentiable(constant);
    return joined;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (at::GradMode::is_enabled())
      throw InvalidArgument("data_parallel() cannot be differentiated twice (create_graph)");
    const auto capsule = context->saved_data["pass"].toCapsule();
    auto* const pass = static_cast<Pass*>(capsule.get());
    if (pass->outputs.empty())
      throw InvalidArgument(
          "data_parallel(): a second backward pass through the same forward pass");
    Tensors result = pass->backward(gradients);
    result.emplace_back();  // none for the pass
    return result;
  }
};

/// Throws for a layer whose operations need all ranks: replicas' threads would start them in any
/// order.
void refuse_synchronizing(const Module& module) {
  std::string name = is_synchronizing(module) ? module.name() : "";
  for (const auto& layer : module.named_modules({}, /*include_self=*/false))
    if (name.empty() && is_synchronizing(*layer.value())) name = layer.key();
  if (!name.empty())
    throw InvalidArgument(
        formatted("data_parallel: the layer '{}' is a SyncBatchNorm of several ranks, which cannot "
                  "have several replicas on a rank; use one, or ordinary batch normalisation",
                  name));
}

std::vector<at::Device> places(const Module& module, const Tensors& inputs,
                               const DataParallelOptions& options) {
  if (options.replicas < 0)
    throw InvalidArgument(formatted("data_parallel: {} replicas", options.replicas));
  if (!options.devices.empty()) return options.devices;
  const Tensors parameters = module.parameters();
  const at::Device own = !parameters.empty() ? parameters.front().device()
                         : !inputs.empty()   ? inputs.front().device()
                                             : at::kCPU;
  if (own.is_cpu())
    return std::vector<at::Device>(
        static_cast<std::size_t>(options.replicas > 0 ? options.replicas : at::get_num_threads()),
        own);
  std::vector<at::Device> devices{own};
  const int wanted =
      options.replicas > 0 ? options.replicas : static_cast<int>(torch::cuda::device_count());
  for (int i = 0; i < static_cast<int>(torch::cuda::device_count()) &&
                  static_cast<int>(devices.size()) < wanted;
       ++i)
    if (i != own.index()) devices.emplace_back(own.type(), static_cast<at::DeviceIndex>(i));
  return devices;
}

/// By input, the pieces of all replicas: as many as the inputs fall into, `wanted` at most.
std::vector<Tensors> scatter(const Tensors& inputs, std::size_t wanted, std::int64_t dim) {
  std::vector<Tensors> pieces;
  const at::Tensor* first = nullptr;
  std::size_t replicas = 0;
  for (const auto& input : inputs) {
    auto& own = pieces.emplace_back();
    if (input.dim() == 0) continue;
    own = input.detach().chunk(static_cast<std::int64_t>(wanted), dim);
    if (first == nullptr) replicas = own.size();
    if (own.size() != replicas)
      throw InvalidArgument(
          formatted("data_parallel: an input of {} falls into {} pieces, and one of {} into {}; "
                    "dimension {} of all is to count the same items",
                    to_string(Shape(first->sizes().vec())), replicas,
                    to_string(Shape(input.sizes().vec())), own.size(), dim));
    if (first == nullptr) first = &input;
  }
  if (first == nullptr)
    throw InvalidArgument(
        "data_parallel: none of the inputs is, or holds, a tensor with a dimension to cut along; "
        "call the module itself");
  for (std::size_t k = 0; k < inputs.size(); ++k)
    if (inputs[k].dim() == 0) pieces[k].assign(replicas, inputs[k].detach());
  return pieces;
}

/// One after the other on the first device; numbers become a list, unless one replica was chosen.
Tensors gather(const std::vector<Tensors>& by_place, std::int64_t dim, at::Device device,
               bool single) {
  Tensors joined;
  for (const auto& of_replicas : by_place) {
    Tensors here;
    for (const auto& output : of_replicas) here.push_back(output.detach().to(device));
    const bool numbers =
        std::all_of(here.begin(), here.end(), [](const auto& output) { return output.dim() == 0; });
    joined.push_back(!numbers ? at::cat(here, dim)
                     : single ? here.front().clone()
                              : at::stack(here));
  }
  return joined;
}

/// Takes replicas and gives each its inputs.
void prepare(Pass& pass, const std::shared_ptr<Module>& module,
             const std::vector<Tensors>& pieces) {
  const ModuleStructure structure(*module);
  auto& borrowed = pass.borrowed;
  if (borrowed.pool) borrowed.replicas = borrowed.pool->take(structure);
  if (!borrowed.replicas) borrowed.replicas = std::make_unique<Replicas>(structure);
  borrowed.replicas->bring_up_to_date(module, pass.devices);
  for (std::size_t i = 0; i < pass.devices.size(); ++i) {
    auto& inputs = pass.inputs.emplace_back();
    for (std::size_t k = 0; k < pieces.size(); ++k)
      inputs.push_back(
          pieces[k][i].to(pass.devices[i]).detach().set_requires_grad(pass.trained[k]));
    auto& parameters = pass.parameters.emplace_back();
    for (const auto& parameter :
         (i == 0 ? *module : *borrowed.replicas->copies[i - 1].second).parameters())
      if (parameter.requires_grad()) parameters.push_back(parameter);
  }
}

}  // namespace

void refuse_to_join(const char* what) {
  throw InvalidArgument(formatted(
      "data_parallel: the replicas returned values that cannot be joined: they differ in {}",
      what));
}

Tensors data_parallel(const std::shared_ptr<Module>& module, const Forward& forward,
                      const Outputs& outputs, const Tensors& inputs,
                      const DataParallelOptions& options,
                      const std::shared_ptr<ReplicaPool>& pool) {
  look_at_number_of_threads();
  auto pass = c10::make_intrusive<Pass>();
  pass->dim = options.dim;
  pass->devices = places(*module, inputs, options);
  const bool single = pass->devices.size() == 1;
  if (!single) refuse_synchronizing(*module);
  const std::vector<Tensors> pieces = scatter(inputs, pass->devices.size(), options.dim);
  pass->devices.resize(pieces.front().size(), pass->devices.front());
  const bool gradients = at::GradMode::is_enabled();
  for (const auto& input : inputs) {
    pass->trained.push_back(gradients && input.requires_grad());
    pass->origins.push_back(input.device());
  }
  pass->borrowed.pool = pool;
  prepare(*pass, module, pieces);
  in_parallel(pass->devices, [&](std::size_t i) {
    forward(i == 0 ? *module : *pass->borrowed.replicas->copies[i - 1].second, i, pass->inputs[i]);
  });
  pass->borrowed.sound = true;
  const auto by_place = outputs();
  for (std::size_t i = 0; i < pass->devices.size(); ++i) {
    auto& own = pass->outputs.emplace_back();
    for (const auto& of_replicas : by_place) own.push_back(of_replicas[i]);
  }
  Tensors joined = gather(by_place, options.dim, pass->devices.front(), single);
  const bool any_trained =
      std::find(pass->trained.begin(), pass->trained.end(), true) != pass->trained.end();
  if (!gradients || joined.empty() || (!any_trained && pass->parameters.front().empty()))
    return joined;
  pass->joined = std::move(joined);
  Tensors tied = inputs;
  tied.insert(tied.end(), pass->parameters.front().begin(), pass->parameters.front().end());
  return Replicated::apply(at::TensorList(tied), c10::IValue::make_capsule(std::move(pass)));
}

}  // namespace hvd::detail
