// Raw buffers: hvd without LibTorch, for a program that has arrays of its own. A linear classifier
// of the same images, by hand.
//   hvdrun -np 4 ./raw_buffers
#include <hvd/hvd.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "images.h"

/// Adds to `gradient` what one image gives (of the cross entropy of a softmax over kClasses
/// scores), and returns its loss.
double add_gradient(const std::vector<double>& weights, const float* pixels, std::int64_t label,
                    std::vector<double>& gradient) {
  double scores[kClasses], sum = 0;
  for (int c = 0; c < kClasses; ++c) {
    scores[c] = 0;
    for (int i = 0; i < kPixels; ++i) scores[c] += weights[c * kPixels + i] * pixels[i];
  }
  const double highest = *std::max_element(scores, scores + kClasses);
  for (const double score : scores) sum += std::exp(score - highest);
  for (int c = 0; c < kClasses; ++c) {
    const double error = std::exp(scores[c] - highest) / sum - (c == label ? 1 : 0);
    for (int i = 0; i < kPixels; ++i) gradient[c * kPixels + i] += error * pixels[i];
  }
  return std::log(sum) + highest - scores[label];
}

int main() {
  hvd::init();
  const auto images = make_images(kTrainImages, 1);
  std::vector<double> weights(kClasses * kPixels), gradient(weights.size());
  double loss = 0;
  // Buffers describe memory that stays the program's own; the operation is described once and
  // started at every step.
  const hvd::Buffer gradient_buffer{
      .data = gradient.data(), .dtype = hvd::DataType::Float64, .shape = {kClasses, kPixels}};
  const hvd::Buffer weight_buffer{
      .data = weights.data(), .dtype = hvd::DataType::Float64, .shape = {kClasses, kPixels}};
  const hvd::Buffer loss_buffer{.data = &loss, .dtype = hvd::DataType::Float64, .shape = {1}};
  auto sum_gradients =
      hvd::allreduce_init(gradient_buffer, {.name = "gradient", .op = hvd::ReduceOp::Sum});

  hvd::broadcast(weight_buffer, {.root_rank = 0});
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    loss = 0;
    for (int begin = 0; begin < kTrainImages; begin += kBatch) {
      std::fill(gradient.begin(), gradient.end(), 0.0);
      // this rank's images of the batch
      for (int i = begin + hvd::rank(); i < begin + kBatch; i += hvd::size()) {
        loss += add_gradient(weights, &images.pixels[i * kPixels], images.labels[i], gradient);
      }
      sum_gradients.start();
      sum_gradients.wait();
      for (std::size_t i = 0; i < weights.size(); ++i)
        weights[i] -= kLearningRate / 10 * gradient[i] / kBatch;
    }
    hvd::allreduce(loss_buffer, loss_buffer, {.op = hvd::ReduceOp::Sum});
    if (hvd::rank() == 0) report(epoch, loss / kTrainImages);
  }
  hvd::shutdown();
}
