#include "torch_bindings/modules/sync_batch_norm.h"

#include <torch/torch.h>

#include <string>
#include <utility>

#include "hvd/api/world.h"
#include "hvd/base/text.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/gradients/gradient_weights.h"
#include "torch_bindings/modules/recomputation.h"

namespace hvd {

namespace {

/// Returns the type that the numbers per channel are computed and kept in.
at::ScalarType statistics_type(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

struct Statistics {
  at::Tensor mean, variance;  ///< of the whole batch, biased; statistics_type
  double count = 0;           ///< values per channel on all ranks
  bool is_trained = false;    ///< some rank's input needs a gradient
};

/// Returns what the ranks' batches have together. Collective. `is_trained`: this rank's input needs
/// a gradient.
Statistics gather(const at::Tensor& input, bool is_trained, const ProcessSet& process_set) {
  const std::int64_t channels = input.size(1);
  const double here = static_cast<double>(input.numel()) / static_cast<double>(channels);
  at::Tensor row =
      at::zeros({1, 2 * channels + 2}, input.options().dtype(at::kDouble).requires_grad(false));
  row[0][2 * channels + 1].fill_(is_trained);
  if (input.numel() > 0) {
    // there the statistics would be in 16 bits too
    const bool narrow = input.is_cpu() && input.element_size() == 2;
    const auto [mean, variance] =
        at::batch_norm_update_stats(narrow ? input.to(at::kFloat) : input, {}, {}, 0);
    row[0].slice(0, 0, channels).copy_(mean);
    row[0].slice(0, channels, 2 * channels).copy_(variance).mul_(here);
    row[0][2 * channels].fill_(here);
  }
  const at::Tensor all =
      allgather(row, {.name = formatted("sync_batch_norm/statistics of {} channels", channels),
                      .process_set = process_set});
  const at::Tensor means = all.slice(1, 0, channels);
  const at::Tensor counts = all.slice(1, 2 * channels, 2 * channels + 1);
  const at::Tensor totals = all.slice(1, 2 * channels).sum(0).cpu();
  Statistics statistics;
  statistics.count = totals[0].item<double>();
  statistics.is_trained = totals[1].item<double>() > 0;
  const at::Tensor mean = (means * (counts / statistics.count)).sum(0);
  const at::Tensor deviations =
      all.slice(1, channels, 2 * channels).sum(0) + (counts * (means - mean).square()).sum(0);
  statistics.mean = mean.to(statistics_type(input));
  statistics.variance = (deviations / statistics.count).to(statistics_type(input));
  return statistics;
}

/// Collective. Returns the sums over the ranks, in double, as this rank's gradients are to be
/// before set_weight() is applied to them.
at::Tensor weighted_sums(const at::Tensor& mine, bool has_rows, const std::string& name,
                         const ProcessSet& process_set) {
  const auto [weight, is_clear] = detail::present_weight();
  const double said[] = {weight, weight == 0 && has_rows ? 1.0 : 0.0, is_clear ? 0.0 : 1.0};
  const at::Tensor wide = mine.to(at::kDouble);  // a weight may be large or small
  const at::Tensor all =
      allreduce(at::cat({weight == 0 ? at::zeros_like(wide) : wide * weight,
                         torch::tensor(at::ArrayRef<double>(said), at::kDouble).to(wide.device())}),
                {.name = "sync_batch_norm/gradients " + name,
                 .op = ReduceOp::Sum,
                 .process_set = process_set});
  const at::Tensor words = all.slice(0, mine.numel()).cpu();
  if (words[2].item<double>() > 0)
    throw InvalidArgument(
        "SyncBatchNorm: two optimizers or modules have different weights while backward runs on "
        "some rank; call set_weight() of the one whose loss it is, and step before the other's");
  if (words[1].item<double>() > 0 && words[0].item<double>() > 0)
    throw InvalidArgument(
        "SyncBatchNorm: a rank with set_weight(0) has rows in the batch, through which the others' "
        "losses have gradients that would be lost; give it a small weight, or no rows");
  return all.slice(0, 0, mine.numel()) / (weight == 0 ? 1 : weight);
}

/// The world of a forward pass, for its backward pass in a thread of autograd's.
struct SavedWorld : torch::CustomClassHolder {
  World world = World::current();
};

class Normalize : public torch::autograd::Function<Normalize> {
 public:
  using Optional = std::optional<at::Tensor>;  // autograd takes no undefined tensors
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const Optional& weight, const Optional& bias, const at::Tensor& mean,
                            const at::Tensor& variance, double count, double eps,
                            std::int64_t process_set) {
    const auto type = mean.scalar_type();
    context->save_for_backward({input, weight.value_or(at::Tensor()), mean, variance});
    context->saved_data["count"] = count;
    context->saved_data["eps"] = eps;
    context->saved_data["process_set"] = process_set;
    context->saved_data["world"] = c10::IValue::make_capsule(c10::make_intrusive<SavedWorld>());
    if (input.numel() == 0) return at::empty_like(input);
    const auto as_statistics = [type](const Optional& tensor) {
      return tensor ? tensor->to(type) : at::Tensor();
    };
    // "Evaluation" with the statistics of the whole batch.
    return std::get<0>(at::native_batch_norm(input, as_statistics(weight), as_statistics(bias),
                                             mean, variance, false, 0, eps));
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& from) {
    if (at::GradMode::is_enabled())
      throw InvalidArgument("SyncBatchNorm cannot be differentiated twice (create_graph)");
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &variance = saved[3];
    const double count = context->saved_data["count"].toDouble();
    const double eps = context->saved_data["eps"].toDouble();
    const auto world = context->saved_data["world"].toCapsule();
    const WorldScope scope(static_cast<const SavedWorld*>(world.get())->world,
                           WorldScope::kAlsoGlobal);
    const ProcessSet process_set(static_cast<int>(context->saved_data["process_set"].toInt()),
                                 current_world_number());
    const std::int64_t channels = input.size(1);
    const at::Tensor gradient = from[0].defined() ? from[0] : at::zeros_like(input);
    const at::Tensor scale = weight.defined() ? weight.to(mean.scalar_type()) : at::ones_like(mean);

    at::Tensor sum = at::zeros_like(mean);        // of the gradient, per channel
    at::Tensor projected = at::zeros_like(mean);  // of the gradient times the normalised input
    if (input.numel() > 0)
      std::tie(std::ignore, projected, sum) = at::native_batch_norm_backward(
          gradient, input, scale, mean, variance, {}, {}, false, eps, {false, true, true});
    torch::autograd::variable_list gradients(8);
    if (weight.defined()) {
      gradients[1] = projected.to(weight.scalar_type());
      gradients[2] = sum.to(weight.scalar_type());
    }
    if (!context->needs_input_grad(0)) return gradients;

    const at::Tensor sums = (weighted_sums(at::cat({sum, projected}), input.numel() > 0,
                                           formatted("of {} channels", channels), process_set) /
                             count)
                                .to(mean.scalar_type());
    std::vector<std::int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
    shape[1] = channels;
    const at::Tensor inverse = (variance + eps).rsqrt();
    const at::Tensor factor = scale * inverse;
    // factor * (gradient - mean of gradient - normalised input * mean of gradient times normalised
    // input)
    const at::Tensor of_gradient = factor.view(shape);
    const at::Tensor of_input = (-factor * inverse * sums.slice(0, channels)).view(shape);
    const at::Tensor constant = (-factor * sums.slice(0, 0, channels)).view(shape);
    gradients[0] = at::addcmul(constant, input - mean.view(shape), of_input)
                       .addcmul_(gradient, of_gradient)
                       .to(input.scalar_type());
    return gradients;
  }
};

InvalidArgument too_few_values() {
  return InvalidArgument("SyncBatchNorm: one value per channel on all ranks together is too few");
}

}  // namespace

at::Tensor detail::sync_batch_norm(const at::Tensor& input, const at::Tensor& weight,
                                   const at::Tensor& bias, const at::Tensor& running_mean,
                                   const at::Tensor& running_var, double momentum, double eps,
                                   const ProcessSet& process_set) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const bool is_trained = at::GradMode::is_enabled() && input.requires_grad();
  Statistics statistics;
  {
    const at::NoGradGuard no_gradient;
    statistics = gather(input.detach(), is_trained, process_set);
    if (statistics.count == 1) throw too_few_values();
    if (statistics.count > 0 && running_mean.defined() && !KeptStatistics::are_kept()) {
      const at::Tensor unbiased = statistics.variance * (statistics.count / (statistics.count - 1));
      running_mean.copy_(running_mean.to(unbiased.scalar_type()) * (1 - momentum) +
                         statistics.mean * momentum);
      running_var.copy_(running_var.to(unbiased.scalar_type()) * (1 - momentum) +
                        unbiased * momentum);
    }
  }
  const auto optional = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  // The gradients of the others' inputs need this rank in backward, also where its own needs none.
  const bool is_needed = statistics.is_trained && !is_trained && at::GradMode::is_enabled();
  const at::Tensor own = is_needed ? input.detach().requires_grad_() : input;
  return Normalize::apply(own, optional(weight), optional(bias), statistics.mean,
                          statistics.variance, statistics.count, eps,
                          static_cast<std::int64_t>(process_set.id()));
}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options_,
                                     ProcessSet process_set)
    : options(options_), process_set_(process_set) {
  SyncBatchNormImpl::reset();
}

void SyncBatchNormImpl::reset() {
  const auto made = [this](bool wanted) {
    return wanted ? at::empty({options.num_features()}) : at::Tensor();
  };
  weight = register_parameter("weight", made(options.affine()), options.affine());
  bias = register_parameter("bias", made(options.affine()), options.affine());
  running_mean = register_buffer("running_mean", made(options.track_running_stats()));
  running_var = register_buffer("running_var", made(options.track_running_stats()));
  num_batches_tracked =
      register_buffer("num_batches_tracked",
                      options.track_running_stats() ? at::zeros({}, at::kLong) : at::Tensor());
  reset_parameters();
}

void SyncBatchNormImpl::reset_running_stats() {
  if (!options.track_running_stats()) return;
  running_mean.zero_();
  running_var.fill_(1);
  num_batches_tracked.zero_();
}

void SyncBatchNormImpl::reset_parameters() {
  reset_running_stats();
  if (!options.affine()) return;
  torch::nn::init::ones_(weight);
  torch::nn::init::zeros_(bias);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << formatted(
      "hvd::SyncBatchNorm({}, eps={}, momentum={}, affine={}, track_running_stats={})",
      options.num_features(), options.eps(),
      options.momentum() ? formatted("{}", *options.momentum()) : "None", options.affine(),
      options.track_running_stats());
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  if (input.dim() < 2 || input.dim() > 5 || input.size(1) != options.num_features())
    throw InvalidArgument(formatted(
        "SyncBatchNorm of {} channels: an input of shape {}; it must be [N, {}], with up to three "
        "dimensions more",
        options.num_features(), to_string(Shape(input.sizes().vec())), options.num_features()));
  double momentum = options.momentum().value_or(0);
  if (is_training() && options.track_running_stats()) {
    num_batches_tracked += 1;
    // the average of all batches so far
    if (!options.momentum()) momentum = 1 / num_batches_tracked.item<double>();
  }
  const bool is_alone = is_training() && process_set_.size() == 1;
  if (is_alone && input.numel() == options.num_features()) throw too_few_values();
  if (!is_training() || is_alone)
    return torch::batch_norm(input, weight, bias, running_mean, running_var,
                             is_training() || !options.track_running_stats(), momentum,
                             options.eps(), at::globalContext().userEnabledCuDNN());
  return detail::sync_batch_norm(input, weight, bias, running_mean, running_var, momentum,
                                 options.eps(), process_set_);
}

}  // namespace hvd
