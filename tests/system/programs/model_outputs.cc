// model_outputs MODEL WEIGHTS CASE: a model of examples/models with weights that Python wrote,
// against what Python computed with them. CASE: a file that Python wrote with torch.save:
// {"images", "training", "evaluation", "gradient"}: scores in training mode, then in evaluation
// mode (so that the running statistics count), and the gradient of the sum of the squared training
// scores for "conv1.weight". Prints the largest differences, each relative to the largest value;
// exit code 1 if one is above 1e-5 (gradient: 1e-4).
#include <torch/torch.h>

#include <cstdio>
#include <string>

#include "examples/train/models/models.h"

namespace {

double difference(const torch::Tensor& got, const torch::Tensor& expected) {
  return ((got - expected).abs().max() / expected.abs().max()).item<double>();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  try {
    const auto known = examples::read_tensors(argv[3]);
    const auto images = known.at("images");
    const auto expected = known.at("training");
    const auto model = examples::make_model({.name = argv[1],
                                             .image = images.sizes().slice(1).vec(),
                                             .classes = static_cast<int>(expected.size(1))});
    if (std::string(argv[2]) != "-") examples::load_weights(*model, argv[2]);
    model->train();
    const auto scores = model->forward(images);
    scores.square().sum().backward();
    const double training = difference(scores, expected);
    const double gradient =
        difference(model->named_parameters().find("conv1.weight")->grad(), known.at("gradient"));
    model->eval();
    const torch::NoGradGuard no_grad;
    const double evaluation = difference(model->forward(images), known.at("evaluation"));
    std::printf(
        "%s: %zu parameters; largest difference in training %.1e, evaluation %.1e, gradient %.1e\n",
        argv[1], model->parameters().size(), training, evaluation, gradient);
    return training <= 1e-5 && evaluation <= 1e-5 && gradient <= 1e-4 ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "model_outputs: %s\n", error.what());
    return 1;
  }
}
