// An ordinary LibTorch training loop, made to run on N ranks by five lines, marked hvd 1 … hvd 5.
// Run it alone or on several ranks: ./wrap_existing, mpirun -np 4 ./wrap_existing
#include <hvd/torch.h>
#include <torch/torch.h>

#include <cstdio>

namespace {

/// Points of the plane; the label says whether both coordinates have the same sign.
class Quadrants : public torch::data::datasets::Dataset<Quadrants> {
 public:
  explicit Quadrants(std::int64_t items) : points_(torch::rand({items, 2}) * 2 - 1), labels_(points_.prod(1).gt(0).to(torch::kInt64)) {}

  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {points_[i], labels_[i]};
  }
  std::optional<std::size_t> size() const override { return static_cast<std::size_t>(labels_.size(0)); }

 private:
  torch::Tensor points_, labels_;
};

}  // namespace

int main() {
  hvd::init();  // hvd 1: one process becomes rank() of size()

  torch::manual_seed(1);
  auto dataset = Quadrants(4096).map(torch::data::transforms::Stack<>());
  torch::nn::Sequential model(torch::nn::Linear(2, 32), torch::nn::ReLU(), torch::nn::Linear(32, 2));
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));

  hvd::broadcast_parameters(*model, 0);                                 // hvd 2: all ranks start from rank 0's weights
  hvd::DistributedOptimizer optimizer(sgd, model->named_parameters());  // hvd 3: step() uses the mean gradient of all ranks
  hvd::ElasticSampler sampler(*dataset.size());                         // hvd 4: each rank trains on its share (was RandomSampler)

  const auto loader = torch::data::make_data_loader(std::move(dataset), sampler, 32);
  for (int epoch = 1; epoch <= 5; ++epoch) {
    sampler.set_epoch(static_cast<std::size_t>(epoch));  // hvd 5: another order in each epoch; the loader's copy knows of it
    double loss_sum = 0;
    int steps = 0;
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      auto loss = torch::cross_entropy_loss(model->forward(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      loss_sum += loss.item<double>();
      ++steps;
    }
    if (hvd::rank() == 0) std::printf("epoch %d: loss %.4f\n", epoch, loss_sum / steps);
  }
  hvd::shutdown();
}
