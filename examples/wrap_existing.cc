// An ordinary LibTorch training loop, made to run on N ranks by nine lines, marked hvd 1 … hvd 9.
// Run it alone or on several ranks: ./wrap_existing, hvdrun -np 4 ./wrap_existing
#include <hvd/torch.h>
#include <torch/torch.h>

#include <cstdio>

namespace {

constexpr int kEpochs = 5, kBatch = 32;  // kBatch: of each rank

/// Points of the plane; the label says whether both coordinates have the same sign.
class Quadrants : public torch::data::datasets::Dataset<Quadrants> {
 public:
  explicit Quadrants(std::int64_t items)
      : points_(torch::rand({items, 2}) * 2 - 1),
        labels_(points_.prod(1).gt(0).to(torch::kInt64)) {}

  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {points_[i], labels_[i]};
  }
  std::optional<std::size_t> size() const override {
    return static_cast<std::size_t>(labels_.size(0));
  }

 private:
  torch::Tensor points_, labels_;
};

}  // namespace

int main() {
  hvd::init();                              // hvd 1: one process becomes rank() of size()
  const auto device = hvd::local_device();  // hvd 2: its GPU, or the CPU

  constexpr int seed = 1;
  torch::manual_seed(seed);  // so all ranks make the same points
  auto dataset = Quadrants(4096).map(torch::data::transforms::Stack<>());
  torch::nn::Sequential model(torch::nn::Linear(2, 32), torch::nn::ReLU(),
                              torch::nn::Linear(32, 2));
  model->to(device);
  // hvd 3: 0.05 is good for one rank's batch; N make N times that
  const double rate = hvd::scaled_learning_rate(0.05, kBatch, kBatch);
  auto sgd = std::make_unique<torch::optim::SGD>(model->parameters(),
                                                 torch::optim::SGDOptions(rate).momentum(0.9));

  hvd::broadcast_parameters(*model, 0);  // hvd 4: all ranks start from rank 0's weights
  // hvd 5: from here on each has dropout masks and noise of its own
  torch::manual_seed(seed + hvd::rank());
  // hvd 6: step() uses the mean gradient of all ranks
  hvd::DistributedOptimizer optimizer(std::move(sgd), model->named_parameters());
  // hvd 7: each rank trains on its share (was RandomSampler)
  hvd::ElasticSampler sampler(*dataset.size());

  const auto loader = torch::data::make_data_loader(std::move(dataset), sampler, kBatch);
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    // hvd 8: another order in each epoch; the loader's copy knows of it
    sampler.set_epoch(static_cast<std::size_t>(epoch));
    // on the device: item() would wait for it at each step
    auto loss_sum = torch::zeros({}, device);
    double items = 0;
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      auto loss =
          torch::cross_entropy_loss(model->forward(batch.data.to(device)), batch.target.to(device));
      loss.backward();
      optimizer.step();
      // the last batch may be smaller
      const auto count = static_cast<double>(batch.target.size(0));
      loss_sum += loss.detach() * count;
      items += count;
    }
    // hvd 9: all ranks call it, one prints
    const auto means = hvd::average_metrics({{"loss", loss_sum.item<double>() / items}}, items);
    if (hvd::rank() == 0) std::printf("epoch %d: loss %.4f\n", epoch, means.at("loss"));
  }
  hvd::shutdown();
}
