// model_outputs MODEL WEIGHTS CASE: a model of examples/models with weights that Python wrote, against what Python computed with them.
// CASE: a file that Python wrote with torch.save: {"images", "training", "evaluation", "gradient"}: scores in training mode, then in
// evaluation mode (so that the running statistics count), and the gradient of the sum of the squared training scores for "conv1.weight".
// Prints the largest differences, each relative to the largest value; exit code 1 if one is above 1e-5 (gradient: 1e-4).
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/import_read.h>
#include <torch/torch.h>

#include <cstdio>
#include <string>

#include "examples/models/models.h"
#include "examples/models/weights.h"

namespace {

double difference(const torch::Tensor& got, const torch::Tensor& expected) {
  return ((got - expected).abs().max() / expected.abs().max()).item<double>();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  try {
    caffe2::serialize::PyTorchStreamReader reader{std::string(argv[3])};
    const auto known =
        torch::jit::readArchiveAndTensors("data", "", "", std::nullopt, std::nullopt, torch::Device(torch::kCPU), reader).toGenericDict();
    const auto images = known.at("images").toTensor();
    const auto expected = known.at("training").toTensor();
    const auto model =
        examples::make_model({.name = argv[1], .image = images.sizes().slice(1).vec(), .classes = static_cast<int>(expected.size(1))});
    if (std::string(argv[2]) != "-") examples::load_weights(*model, argv[2]);
    model->train();
    const auto scores = model->forward(images);
    scores.square().sum().backward();
    const double training = difference(scores, expected);
    const double gradient = difference(model->named_parameters().find("conv1.weight")->grad(), known.at("gradient").toTensor());
    model->eval();
    const torch::NoGradGuard no_grad;
    const double evaluation = difference(model->forward(images), known.at("evaluation").toTensor());
    std::printf("%s: %zu parameters; largest difference in training %.1e, evaluation %.1e, gradient %.1e\n", argv[1],
                model->parameters().size(), training, evaluation, gradient);
    return training <= 1e-5 && evaluation <= 1e-5 && gradient <= 1e-4 ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "model_outputs: %s\n", error.what());
    return 1;
  }
}
