#include "examples/train/evaluation.h"

#include <hvd/torch.h>

#include <algorithm>

namespace examples {

Tally& Tally::operator+=(const Tally& other) {
  images += other.images;
  loss += other.loss;
  top1 += other.top1;
  top5 += other.top5;
  return *this;
}

Tally score(const torch::Tensor& scores, const torch::Tensor& labels) {
  const auto best = std::get<1>(scores.topk(std::min<std::int64_t>(5, scores.size(1)), 1));
  const auto hits = best.eq(labels.unsqueeze(1)).to(torch::kFloat64);
  const auto losses =
      torch::nn::functional::cross_entropy(scores, labels, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
  return {.images = static_cast<double>(labels.size(0)),
          .loss = losses.to(torch::kFloat64).sum().item<double>(),
          .top1 = hits.select(1, 0).sum().item<double>(),
          .top5 = hits.sum().item<double>()};
}

Indices share_of(std::size_t items, Shard shard) {
  Indices indices;
  for (std::size_t i = shard.rank; i < items; i += shard.ranks) indices.push_back(i);
  return indices;
}

Tally evaluate_share(Classifier& model, const Dataset& data, Shard shard, std::size_t batch_size, torch::Device device) {
  const torch::NoGradGuard no_grad;
  const bool was_training = model.is_training();
  model.eval();
  Tally tally;
  const auto indices = share_of(static_cast<std::size_t>(data.test.size()), shard);
  for (std::size_t begin = 0; begin < indices.size(); begin += batch_size) {
    const auto end = std::min(indices.size(), begin + batch_size);
    const auto batch = make_batch(
        data, data.test, Indices(indices.begin() + static_cast<std::ptrdiff_t>(begin), indices.begin() + static_cast<std::ptrdiff_t>(end)));
    tally += score(model.forward(batch.images.to(device)), batch.labels.to(device));
  }
  model.train(was_training);
  return tally;
}

Evaluation sum_up(const Tally& share) {
  const auto mine = torch::tensor({share.images, share.loss, share.top1, share.top5}, torch::kFloat64);
  const auto sum = hvd::allreduce(mine, {.op = hvd::ReduceOp::Sum});
  const auto* value = sum.data_ptr<double>();
  return {
      .images = static_cast<std::int64_t>(value[0]), .loss = value[1] / value[0], .top1 = value[2] / value[0], .top5 = value[3] / value[0]};
}

}  // namespace examples
