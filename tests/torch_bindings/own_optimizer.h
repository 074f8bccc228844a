#pragma once
/// What users write themselves: an optimizer with momentum, with options and a state of its own,
/// that overrides as many of LibTorch's virtual functions as the template says; and a module with
/// tied weights.

#include "tests/torch_bindings/support.h"

namespace hvd::test {

/// Which virtual functions are overridden.
struct Overrides {
  bool rate = true;         ///< get_lr and set_lr of the options
  bool options = true;      ///< serialize of the options
  bool state = true;        ///< serialize of the state
  bool save = false;        ///< save and load of the optimizer
  bool load = save;         ///< its load, by itself
  bool clone_state = true;  ///< clone of the state
  bool reads_into = false;  ///< the state is read into the tensor that is there
};

template <Overrides kHas>
struct OwnOptions : torch::optim::OptimizerCloneableOptions<OwnOptions<kHas>> {
  using Base = torch::optim::OptimizerOptions;
  double rate = 0.1, decay = 0.5;
  [[nodiscard]] double get_lr() const override { return kHas.rate ? rate : Base::get_lr(); }
  void set_lr(double value) override {
    kHas.rate ? static_cast<void>(rate = value) : Base::set_lr(value);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    if (!kHas.options) return Base::serialize(archive);
    archive.write("rate", c10::IValue(rate));
    archive.write("decay", c10::IValue(decay));
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    if (!kHas.options) return Base::serialize(archive);
    c10::IValue value;
    archive.read("rate", value);
    rate = value.toDouble();
    archive.read("decay", value);
    decay = value.toDouble();
  }
};

template <Overrides kHas>
struct OwnState : torch::optim::OptimizerParamState {
  using Base = torch::optim::OptimizerParamState;
  at::Tensor momentum;
  std::int64_t steps = 0;
  [[nodiscard]] std::unique_ptr<Base> clone() const override {
    return kHas.clone_state ? std::make_unique<OwnState>(*this) : Base::clone();
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    if (!kHas.state) return Base::serialize(archive);
    archive.write("momentum", momentum);
    archive.write("steps", c10::IValue(steps));
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    if (!kHas.state) return Base::serialize(archive);
    c10::IValue value;
    if (kHas.reads_into) {
      archive.read("momentum", momentum);
    } else {
      archive.read("momentum", value);
      momentum = value.toTensor();
    }
    archive.read("steps", value);
    steps = value.toInt();
  }
};

template <Overrides kHas>
class OwnOptimizer : public torch::optim::Optimizer {
 public:
  using Options = OwnOptions<kHas>;
  using State = OwnState<kHas>;

  OwnOptimizer(std::vector<at::Tensor> parameters, double rate, double decay)
      : Optimizer(std::move(parameters), make_options(rate, decay)) {}

  at::Tensor step(LossClosure closure = nullptr) override {
    const at::Tensor loss = closure ? closure() : at::Tensor();
    const torch::NoGradGuard no_gradient;
    for (auto& group : param_groups_) {
      const auto& options = static_cast<const Options&>(group.options());
      for (auto& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        auto& slot = state_[parameter.unsafeGetTensorImpl()];
        if (!slot) slot = std::make_unique<State>();
        auto& state = static_cast<State&>(*slot);
        state.momentum = state.momentum.defined()
                             ? state.momentum * options.decay + parameter.grad()
                             : parameter.grad().clone();
        ++state.steps;
        parameter.sub_(state.momentum, options.rate);
      }
    }
    return loss;
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    if (!kHas.save) return Optimizer::save(archive);
    archive.write("rate", c10::IValue(options().rate));
    archive.write("decay", c10::IValue(options().decay));
    const auto& all = param_groups_[0].params();
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto found = state_.find(all[i].unsafeGetTensorImpl());
      if (found == state_.end()) continue;
      archive.write("momentum/" + std::to_string(i),
                    static_cast<const State&>(*found->second).momentum);
      archive.write("steps/" + std::to_string(i),
                    c10::IValue(static_cast<const State&>(*found->second).steps));
    }
  }
  void load(torch::serialize::InputArchive& archive) override {
    if (!kHas.load) return Optimizer::load(archive);
    c10::IValue value;
    archive.read("rate", value);
    options().rate = value.toDouble();
    archive.read("decay", value);
    options().decay = value.toDouble();
    const auto& all = param_groups_[0].params();
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!archive.try_read("momentum/" + std::to_string(i), value)) continue;
      auto state = std::make_unique<State>();
      state->momentum = value.toTensor();
      archive.read("steps/" + std::to_string(i), value);
      state->steps = value.toInt();
      state_[all[i].unsafeGetTensorImpl()] = std::move(state);
    }
  }

  Options& options() { return static_cast<Options&>(param_groups_[0].options()); }
  [[nodiscard]] const Options& options() const {
    return static_cast<const Options&>(param_groups_[0].options());
  }
  /// Of the first parameter; -1 without a state.
  [[nodiscard]] std::int64_t steps() const {
    const auto found = state_.find(param_groups_[0].params()[0].unsafeGetTensorImpl());
    return found == state_.end() ? -1 : static_cast<const State&>(*found->second).steps;
  }

 private:
  static std::unique_ptr<Options> make_options(double rate, double decay) {
    auto options = std::make_unique<Options>();
    options->rate = rate;
    options->decay = decay;
    return options;
  }
};

/// Two layers with one weight, which named_parameters() and parameters() list twice. The same
/// values on all ranks.
struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(bool tied = true, int seed = 0)
      : weight(register_parameter("first", data({3, 3}, at::kFloat, seed))),
        second(register_parameter("second", tied ? weight : data({3, 3}, at::kFloat, seed + 1))),
        bias(register_parameter("bias", data({3}, at::kFloat, seed))) {}
  at::Tensor forward(const at::Tensor& x) {
    return torch::linear(torch::tanh(torch::linear(x, weight)), second, bias);
  }
  at::Tensor weight, second, bias;
};
TORCH_MODULE(Tied);

}  // namespace hvd::test
