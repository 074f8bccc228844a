#include "examples/train/trainer/evaluation.h"

#include <algorithm>

#include "examples/train/data/ordered_workers.h"

namespace examples {

hvd::EvaluationTally evaluate_share(Classifier& model, const Dataset& data, Shard shard, std::size_t batch_size, torch::Device device,
                                    std::size_t workers, std::vector<BadImage>* bad, const Precision& precision) {
  const torch::NoGradGuard no_grad;
  const bool was_training = model.is_training();
  model.eval();
  hvd::EvaluationTally tally;
  const auto indices =
      hvd::evaluation_share(static_cast<std::size_t>(data.test.size()), static_cast<int>(shard.rank), static_cast<int>(shard.ranks));
  OrderedWorkers<Batch> batches(workers);
  std::size_t begin = 0;
  const auto order = [&] {
    const auto end = std::min(indices.size(), begin + batch_size);
    Indices some(indices.begin() + static_cast<std::ptrdiff_t>(begin), indices.begin() + static_cast<std::ptrdiff_t>(end));
    batches.order([&data, some = std::move(some)] { return make_batch(data, data.test, some); });
    begin = end;
  };
  while (begin < indices.size() || batches.ordered() > 0) {
    while (begin < indices.size() && batches.ordered() < workers + 1) order();
    const auto batch = batches.take();
    if (bad != nullptr) bad->insert(bad->end(), batch.bad.begin(), batch.bad.end());
    if (batch.labels.size(0) == 0) continue;
    tally.add(precision.output(model.forward(precision.input(batch.images.to(device)))), batch.labels.to(device));
  }
  model.train(was_training);
  return tally;
}

}  // namespace examples
