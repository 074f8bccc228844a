#include "torch_bindings/training/metrics.h"

#include <torch/torch.h>

#include <algorithm>

#include "hvd/base/log.h"
#include "hvd/base/text.h"
#include "hvd/negotiation/values/unit_names.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/objects.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd {

std::vector<std::size_t> evaluation_share(std::size_t items, const ProcessSet& process_set) {
  return evaluation_share(items, process_set.rank(), process_set.size());
}

std::vector<std::size_t> evaluation_share(std::size_t items, int rank, int ranks) {
  if (rank < 0 || rank >= ranks)
    throw InvalidArgument(formatted("evaluation_share: rank {} of {}", rank, ranks));
  std::vector<std::size_t> indices;
  for (auto i = static_cast<std::size_t>(rank); i < items; i += static_cast<std::size_t>(ranks))
    indices.push_back(i);
  return indices;
}

EvaluationTally& EvaluationTally::operator+=(const EvaluationTally& other) {
  samples += other.samples;
  loss += other.loss;
  top1 += other.top1;
  top5 += other.top5;
  return *this;
}

EvaluationTally& EvaluationTally::add(const at::Tensor& scores, const at::Tensor& labels) {
  if (scores.dim() != 2 || labels.dim() != 1 || scores.size(0) != labels.size(0))
    throw InvalidArgument(formatted(
        "EvaluationTally: scores {} and labels {}; they must be [samples, classes] and [samples]",
        to_string(scores.sizes().vec()), to_string(labels.sizes().vec())));
  if (labels.size(0) == 0) return *this;
  const at::NoGradGuard no_gradient;
  namespace nn = torch::nn::functional;
  const at::Tensor best = std::get<1>(scores.topk(std::min<std::int64_t>(5, scores.size(1)), 1));
  const at::Tensor hits = best.eq(labels.unsqueeze(1)).to(torch::kFloat64);
  const at::Tensor losses =
      nn::cross_entropy(scores, labels, nn::CrossEntropyFuncOptions().reduction(torch::kNone));
  return *this += {.samples = static_cast<double>(labels.size(0)),
                   .loss = losses.to(torch::kFloat64).sum().item<double>(),
                   .top1 = hits.select(1, 0).sum().item<double>(),
                   .top5 = hits.sum().item<double>()};
}

Evaluation EvaluationTally::average(const ProcessSet& process_set) const {
  const at::Tensor sum = allreduce(
      torch::tensor({samples, loss, top1, top5}, torch::kFloat64),
      {.name = library_name("EvaluationTally"), .op = ReduceOp::Sum, .process_set = process_set});
  const auto* const value = sum.const_data_ptr<double>();
  const double all = std::max(value[0], 1.0);
  return {.samples = static_cast<std::int64_t>(value[0]),
          .loss = value[1] / all,
          .top1 = value[2] / all,
          .top5 = value[3] / all};
}

std::map<std::string, double> average_metrics(const std::map<std::string, double>& means,
                                              double count, const ProcessSet& process_set) {
  if (!(count >= 0))
    throw InvalidArgument(
        formatted("average_metrics: the count is {}; it must be at least 0", count));
  std::string names;
  std::vector<double> sums{count};
  for (const auto& [name, mean] : means) {
    names += (names.empty() ? "" : ", ") + name;
    sums.push_back(count > 0 ? mean * count : 0);
  }
  const auto all_names = detail::allgather_text(names, process_set);
  if (std::any_of(all_names.begin(), all_names.end(),
                  [&](const auto& theirs) { return theirs != all_names.front(); }))
    throw Mismatch("average_metrics: the ranks give different names; this one gives: " + names);
  const at::Tensor all = allreduce(
      torch::tensor(sums, torch::kFloat64),
      {.name = library_name("average_metrics"), .op = ReduceOp::Sum, .process_set = process_set});
  const auto* value = all.const_data_ptr<double>();
  const double samples = *value > 0 ? *value : 1;
  std::map<std::string, double> averages;
  for (const auto& [name, mean] : means) averages[name] = *++value / samples;
  return averages;
}

at::Tensor gather_predictions(const at::Tensor& predictions, const at::Tensor& indices,
                              std::int64_t items, const ProcessSet& process_set) {
  if (indices.dim() != 1 || predictions.dim() < 1 || predictions.size(0) != indices.size(0))
    throw InvalidArgument(formatted(
        "gather_predictions: predictions {} and indices {}; they must be [n, ...] and [n]",
        to_string(predictions.sizes().vec()), to_string(indices.sizes().vec())));
  if (indices.scalar_type() != at::kLong)
    throw InvalidArgument("gather_predictions: the indices are not int64");
  const at::NoGradGuard no_gradient;
  const auto all =
      grouped_allgather({predictions.detach(), indices.to(predictions.device())},
                        {.name = library_name("gather_predictions"), .process_set = process_set});
  const at::Tensor places = all[1].cpu();
  const auto* const place = places.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> row_of(static_cast<std::size_t>(items), -1);
  for (std::int64_t row = 0; row < places.numel(); ++row) {
    if (place[row] < 0 || place[row] >= items)
      throw InvalidArgument(formatted("gather_predictions: sample {} of {}", place[row], items));
    auto& first = row_of[static_cast<std::size_t>(place[row])];
    if (first < 0) first = row;
  }
  const auto missing = std::find(row_of.begin(), row_of.end(), -1);
  if (missing != row_of.end())
    throw InvalidArgument(
        formatted("gather_predictions: no rank predicted sample {}", missing - row_of.begin()));
  return all[0].index_select(0, torch::tensor(row_of, at::kLong).to(all[0].device()));
}

namespace {
/// "norm.num_batches_tracked"
bool is_counter(std::string_view name) {
  return name.substr(name.rfind('.') + 1) == "num_batches_tracked";
}
}  // namespace

AveragedBuffers::AveragedBuffers(const torch::nn::Module& module, const ProcessSet& process_set) {
  const at::NoGradGuard no_gradient;
  std::map<std::string, at::Tensor> by_name;  // ranks may have registered them in another order
  for (const auto& item : module.named_buffers()) by_name.emplace(item.key(), item.value());
  std::vector<at::Tensor> values;
  for (const auto& [name, buffer] : by_name) {
    if (!buffer.defined() || !buffer.is_floating_point() || is_counter(name)) continue;
    own_.emplace_back(buffer, detail::unexpanded(buffer.detach()).clone());
    values.push_back(own_.back().second);
  }
  if (values.empty()) return;
  const auto means = grouped_allreduce(
      values, {.name = library_name("AveragedBuffers"), .process_set = process_set});
  for (std::size_t i = 0; i < means.size(); ++i) detail::unexpanded(own_[i].first).copy_(means[i]);
}

AveragedBuffers::~AveragedBuffers() {
  const at::NoGradGuard no_gradient;
  try {
    for (auto& [buffer, value] : own_) detail::unexpanded(buffer).copy_(value);
  } catch (const std::exception& error) {
    log(LogLevel::Error, "buffers could not be given back their own values: {}", error.what());
  }
}

}  // namespace hvd
