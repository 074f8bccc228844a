// --opt-level of the trainer: the types of weights, buffers, inputs and scores.
#include <doctest/doctest.h>
#include <torch/torch.h>

#include "examples/train/models/models.h"
#include "examples/train/trainer/setup.h"

namespace {

using examples::Precision;

examples::Options level(const std::string& opt_level, const std::string& amp) {
  examples::Options options;
  options.opt_level = opt_level;
  options.amp = amp;
  return options;
}

bool is(const torch::Tensor& tensor, torch::ScalarType type) {
  return tensor.scalar_type() == type;
}

bool is_norm(const std::string& name) {
  return name.find("bn") != std::string::npos || name.find("downsample.1") != std::string::npos;
}

TEST_CASE("--opt-level: which weights and buffers are in 16 bits") {
  for (const std::string amp : {"bf16", "fp16"}) {
    const auto narrow = amp == "bf16" ? torch::kBFloat16 : torch::kHalf;
    for (const std::string name : {"O0", "O1", "O2", "O3"}) {
      CAPTURE(name);
      const Precision precision = examples::precision_of(level(name, amp));
      const auto model =
          examples::make_model({.name = "resnet18", .image = {3, 32, 32}, .classes = 10});
      const auto first = model->parameters().front();
      examples::take_weights_to(precision, *model);
      CHECK(first.is_same(model->parameters().front()));  // an optimizer has it
      const auto expected = [&](const std::string& of) {
        return name == "O3" || (name == "O2" && !is_norm(of)) ? narrow : torch::kFloat;
      };
      int norms = 0;
      for (const auto& parameter : model->named_parameters()) {
        CHECK_MESSAGE(is(parameter.value(), expected(parameter.key())), parameter.key());
        norms += is_norm(parameter.key()) ? 1 : 0;
      }
      CHECK(norms == 40);
      for (const auto& buffer : model->named_buffers()) {
        const bool counts = buffer.key().find("num_batches_tracked") != std::string::npos;
        CHECK_MESSAGE(is(buffer.value(), counts ? torch::kLong : expected(buffer.key())),
                      buffer.key());
      }
      const auto scores = model->forward(precision.input(torch::rand({2, 3, 32, 32})));
      CHECK(is(scores, name > "O1" ? narrow : torch::kFloat));
      CHECK(is(precision.output(scores), torch::kFloat));
      CHECK(is(precision.input(torch::ones({1}, torch::kLong)), torch::kLong));
      CHECK(precision.masters == (name == "O2"));
      CHECK(precision.autocast == (name == "O1"));
      CHECK(precision.scales_loss == (amp == "fp16" && (name == "O1" || name == "O2")));
    }
  }
}

}  // namespace
