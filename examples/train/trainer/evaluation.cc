#include "examples/train/trainer/evaluation.h"

#include <algorithm>

namespace examples {

hvd::EvaluationTally evaluate_share(Classifier& model, const Dataset& data, Shard shard, std::size_t batch_size, torch::Device device) {
  const torch::NoGradGuard no_grad;
  const bool was_training = model.is_training();
  model.eval();
  hvd::EvaluationTally tally;
  const auto indices =
      hvd::evaluation_share(static_cast<std::size_t>(data.test.size()), static_cast<int>(shard.rank), static_cast<int>(shard.ranks));
  for (std::size_t begin = 0; begin < indices.size(); begin += batch_size) {
    const auto end = std::min(indices.size(), begin + batch_size);
    const auto batch = make_batch(
        data, data.test, Indices(indices.begin() + static_cast<std::ptrdiff_t>(begin), indices.begin() + static_cast<std::ptrdiff_t>(end)));
    tally.add(model.forward(batch.images.to(device)), batch.labels.to(device));
  }
  model.train(was_training);
  return tally;
}

}  // namespace examples
