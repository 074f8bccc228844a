// convert_sync_batchnorm(): layers in containers are replaced; layers that nothing can replace are
// converted where they are, by a kernel of our own for aten::batch_norm that knows them by their
// tensors and passes all others on to LibTorch's.
// Tested in tests/torch_bindings/modules/sync_batch_norm_test.cc
#include <ATen/ops/batch_norm_compositeimplicitautograd_dispatch.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <mutex>
#include <shared_mutex>
#include <typeinfo>
#include <unordered_map>
#include <vector>

#include "hvd/base/log.h"
#include "hvd/base/text.h"
#include "torch_bindings/modules/sync_batch_norm.h"

namespace hvd {

namespace {

using torch::nn::Module;
using Tensors = std::vector<at::Tensor>;

// ----------------------------------------------------------------------- layers converted in place

class Converted {
 public:
  static Converted& all() {
    static Converted converted;
    return converted;
  }

  void add(const at::Tensor& mark, const std::shared_ptr<Module>& layer,
           const ProcessSet& process_set) {
    const std::unique_lock lock(mutex_);
    std::erase_if(layers_, [](const auto& entry) { return entry.second.layer.expired(); });
    layers_.insert_or_assign(
        mark.unsafeGetTensorImpl(),
        Layer{c10::weak_intrusive_ptr(mark.getIntrusivePtr()), layer, process_set});
  }

  /// Returns the set over which this tensor's layer normalises in training; none if it is not
  /// converted. `now`: nor where the layer evaluates.
  std::optional<ProcessSet> find(const at::Tensor& mark, bool now) const {
    const std::shared_lock lock(mutex_);
    const auto entry = layers_.find(mark.unsafeGetTensorImpl());
    if (entry == layers_.end()) return std::nullopt;
    const auto layer = entry->second.layer.lock();
    if (!layer || (now && !layer->is_training())) return std::nullopt;
    return entry->second.process_set;
  }

 private:
  struct Layer {
    c10::weak_intrusive_ptr<c10::TensorImpl> mark;  ///< keeps the address from being used again
    std::weak_ptr<Module> layer;
    ProcessSet process_set;
  };
  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Layer> layers_;
};

/// The tensor by which a layer is known: weights may be shared by layers, running statistics not.
const at::Tensor& mark_of(const at::Tensor& weight, const at::Tensor& running_mean) {
  return running_mean.defined() ? running_mean : weight;
}

using Optional = std::optional<at::Tensor>;
at::Tensor batch_norm(const at::Tensor& input, const Optional& weight, const Optional& bias,
                      const Optional& running_mean, const Optional& running_var, bool training,
                      double momentum, double eps, bool cudnn_enabled) {
  if (training) {
    const at::Tensor mark =
        mark_of(weight.value_or(at::Tensor()), running_mean.value_or(at::Tensor()));
    const auto process_set =
        mark.defined() ? Converted::all().find(mark, /*now=*/true) : std::nullopt;
    if (process_set && process_set->size() > 1)
      return detail::sync_batch_norm(
          input, weight.value_or(at::Tensor()), bias.value_or(at::Tensor()),
          running_mean.value_or(at::Tensor()), running_var.value_or(at::Tensor()), momentum, eps,
          *process_set);
  }
  return at::compositeimplicitautograd::batch_norm(input, weight, bias, running_mean, running_var,
                                                   training, momentum, eps, cudnn_enabled);
}

/// Once, with the first layer: a program that converts nothing runs LibTorch's own kernel.
void intercept() {
  static const auto library = [] {
    auto made = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", std::nullopt,
                                                 __FILE__, __LINE__);
    for (const auto key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA,
                           c10::DispatchKey::CPU, c10::DispatchKey::CUDA})
      made->impl("batch_norm", torch::dispatch(key, TORCH_FN(batch_norm)));
    return made;
  }();
}

// ------------------------------------------------------------------------------------- the modules

struct BatchNorm {
  std::shared_ptr<Module> layer;
  at::Tensor mark, weight;
  bool exact = false;  ///< LibTorch's own type, not one that the user derived from it
  std::function<std::shared_ptr<SyncBatchNormImpl>(const ProcessSet&)> replacement;
};

template <class Impl>
bool inspect(const std::shared_ptr<Module>& module, BatchNorm& found) {
  auto* const layer = dynamic_cast<Impl*>(module.get());
  if (layer == nullptr) return false;
  found.layer = module;
  found.mark = mark_of(layer->weight, layer->running_mean);
  found.weight = layer->weight;
  found.exact = typeid(*layer) == typeid(Impl);
  found.replacement = [layer](const ProcessSet& set) {
    return std::make_shared<SyncBatchNormImpl>(*layer, set);
  };
  return true;
}
std::optional<BatchNorm> as_batch_norm(const std::shared_ptr<Module>& module) {
  BatchNorm found;
  if (inspect<torch::nn::BatchNorm1dImpl>(module, found) ||
      inspect<torch::nn::BatchNorm2dImpl>(module, found) ||
      inspect<torch::nn::BatchNorm3dImpl>(module, found))
    return found;
  return std::nullopt;
}

class Conversion {
 public:
  explicit Conversion(const ProcessSet& process_set) : process_set_(process_set) {}

  /// Plans only, so that an error leaves everything as it was.
  void plan_in_place(const BatchNorm& found, const std::string& path) {
    if (!found.mark.defined())
      throw InvalidArgument(formatted(
          "convert_sync_batchnorm: '{}' has neither parameters nor running statistics, and is in "
          "no container in which it could be replaced; make it a hvd::SyncBatchNorm",
          path));
    steps_.emplace_back([this, found] {
      intercept();
      // it may call batch_norm without the statistics that it has
      if (found.weight.defined()) Converted::all().add(found.weight, found.layer, process_set_);
      Converted::all().add(found.mark, found.layer, process_set_);
    });
  }

  void plan_children(Module& parent, const std::string& path) {
    for (const auto& child : parent.named_children()) {
      const std::string name = path.empty() ? child.key() : path + "." + child.key();
      const auto found = as_batch_norm(child.value());
      if (!found) {
        plan_children(*child.value(), name);
      } else if (found->exact && plan_replacement(parent, child.key(), *found)) {
        // A handle that the user has kept is converted too.
        if (found->mark.defined()) plan_in_place(*found, name);
      } else {
        plan_in_place(*found, name);
      }
    }
  }

  void run() const {
    for (const auto& step : steps_) step();
  }

 private:
  /// False where `parent` is no container. A layer that stands in several places stays one layer.
  bool plan_replacement(Module& parent, const std::string& key, const BatchNorm& found) {
    std::function<void(const std::shared_ptr<SyncBatchNormImpl>&)> place;
    if (auto* const sequence = parent.as<torch::nn::SequentialImpl>()) {
      place = [sequence, old = found.layer](const auto& made) {
        for (auto& member : *sequence)
          if (member.ptr() == old) member = torch::nn::AnyModule(made);
      };
    } else if (auto* const list = parent.as<torch::nn::ModuleListImpl>()) {
      place = [list, old = found.layer](const auto& made) {
        for (auto& member : *list)
          if (member == old) member = made;
      };
    } else if (auto* const dictionary = parent.as<torch::nn::ModuleDictImpl>()) {
      place = [dictionary, old = found.layer](const auto& made) {
        for (auto& member : *dictionary)
          if (member.value() == old) member.value() = made;
      };
    } else {
      return false;
    }
    steps_.emplace_back([this, place, &parent, key, found] {
      auto& made = replacements_[found.layer.get()];
      if (!made) made = found.replacement(process_set_);
      place(made);
      parent.replace_module(key, made);
    });
    return true;
  }

  const ProcessSet process_set_;
  std::vector<std::function<void()>> steps_;
  mutable std::unordered_map<const Module*, std::shared_ptr<SyncBatchNormImpl>> replacements_;
};

}  // namespace

void detail::convert_sync_batchnorm(Module& module, const ProcessSet& process_set) {
  Conversion conversion(process_set);
  if (const auto owner = module.weak_from_this().lock()) {
    if (const auto found = as_batch_norm(owner)) conversion.plan_in_place(*found, module.name());
  } else if (as_batch_norm(std::shared_ptr<Module>(std::shared_ptr<Module>(), &module))) {
    throw InvalidArgument("convert_sync_batchnorm: a layer that no shared_ptr owns");
  }
  conversion.plan_children(module, "");
  conversion.run();
  const auto report = sync_batchnorm_report(module);
  if (!report.local.empty() && process_set.rank() <= 0)
    log(LogLevel::Warning,
        "convert_sync_batchnorm: {} of {} layers are no BatchNorm of LibTorch and stay local to "
        "each rank: {}",
        report.local.size(), report.local.size() + report.synchronized.size(),
        joined(report.local, ", "));
}

namespace {

/// Returns the set over which the layer normalises in training; none if it is no SyncBatchNorm.
/// `now`: nor where it evaluates.
std::optional<ProcessSet> set_of(const Module& layer, bool now) {
  if (now && !layer.is_training()) return std::nullopt;
  if (const auto* const sync = dynamic_cast<const SyncBatchNormImpl*>(&layer))
    return sync->process_set();
  const auto found = as_batch_norm(std::const_pointer_cast<Module>(layer.weak_from_this().lock()));
  return found && found->mark.defined() ? Converted::all().find(found->mark, now) : std::nullopt;
}

/// Keeps running statistics, as TorchScript's batch norm and a user's own do, and LibTorch's
/// instance norm too.
bool is_like_batch_norm(const Module& layer) {
  if (dynamic_cast<const torch::nn::InstanceNorm1dImpl*>(&layer) != nullptr ||
      dynamic_cast<const torch::nn::InstanceNorm2dImpl*>(&layer) != nullptr ||
      dynamic_cast<const torch::nn::InstanceNorm3dImpl*>(&layer) != nullptr)
    return false;
  const auto buffers = layer.named_buffers(/*recurse=*/false);
  return buffers.contains("running_mean") && buffers.contains("running_var");
}

void report_on(const Module& layer, const std::string& name, SyncBatchNormReport& report) {
  const auto alias =
      std::shared_ptr<Module>(std::shared_ptr<Module>(), const_cast<Module*>(&layer));
  if (is_sync_batchnorm(layer)) {
    report.synchronized.push_back(name);
  } else if (as_batch_norm(alias) || is_like_batch_norm(layer)) {
    report.local.push_back(name);
  }
}

}  // namespace

bool is_sync_batchnorm(const Module& layer) { return set_of(layer, /*now=*/false).has_value(); }

bool detail::is_synchronizing(const Module& layer) {
  const auto process_set = set_of(layer, /*now=*/true);
  return process_set && process_set->size() > 1;
}

SyncBatchNormReport sync_batchnorm_report(const Module& module) {
  SyncBatchNormReport report;
  report_on(module, module.name(), report);
  for (const auto& layer : module.named_modules({}, /*include_self=*/false))
    report_on(*layer.value(), layer.key(), report);
  return report;
}

}  // namespace hvd
