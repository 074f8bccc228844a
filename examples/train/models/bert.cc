#include "examples/train/models/bert.h"

#include <stdexcept>

namespace examples {
namespace {

namespace nn = torch::nn;

/// Attention and a two-layer perceptron, each with a way around it and a norm after both.
class Layer : public nn::Module {
 public:
  Layer(std::int64_t width, std::int64_t heads)
      : heads_(heads),
        query(width, width),
        key(width, width),
        value(width, width),
        output(width, width),
        norm1(nn::LayerNormOptions({width})),
        up(width, 4 * width),
        down(4 * width, width),
        norm2(nn::LayerNormOptions({width})) {
    register_module("query", query);
    register_module("key", key);
    register_module("value", value);
    register_module("output", output);
    register_module("norm1", norm1);
    register_module("up", up);
    register_module("down", down);
    register_module("norm2", norm2);
  }

  torch::Tensor forward(const torch::Tensor& input) {
    const auto items = input.size(0);
    const auto sequence = input.size(1);
    const auto by_head = [&](const torch::Tensor& all) {
      return all.view({items, sequence, heads_, -1}).transpose(1, 2);
    };
    const auto seen = at::scaled_dot_product_attention(by_head(query(input)), by_head(key(input)),
                                                       by_head(value(input)));
    const auto x = norm1(input + output(seen.transpose(1, 2).reshape({items, sequence, -1})));
    return norm2(x + down(torch::gelu(up(x))));
  }

 private:
  std::int64_t heads_;
  nn::Linear query, key, value, output;
  nn::LayerNorm norm1;
  nn::Linear up, down;
  nn::LayerNorm norm2;
};

class Bert : public Classifier {
 public:
  explicit Bert(const BertOptions& options)
      : words(options.vocabulary, options.width),
        positions(options.positions, options.width),
        sentences(2, options.width),
        norm(nn::LayerNormOptions({options.width})),
        pooler(options.width, options.width),
        classifier(options.width, options.classes) {
    register_module("words", words);
    register_module("positions", positions);
    register_module("sentences", sentences);
    register_module("norm", norm);
    for (std::int64_t i = 0; i < options.layers; ++i)
      layers.push_back(register_module("layer" + std::to_string(i),
                                       std::make_shared<Layer>(options.width, options.heads)));
    register_module("pooler", pooler);
    register_module("classifier", classifier);
    initialise();
  }

  torch::Tensor forward(const torch::Tensor& tokens) override {
    const auto places = torch::arange(tokens.size(1), tokens.options());
    auto x = norm(words(tokens) + positions(places) + sentences(torch::zeros_like(tokens)));
    for (const auto& layer : layers) x = layer->forward(x);
    return classifier(torch::tanh(pooler(x.select(1, 0))));
  }

 private:
  void initialise() {
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : named_parameters()) {
      // they start with weight 1 and bias 0
      if (parameter.key().find("norm") != std::string::npos) continue;
      if (parameter.value().dim() > 1) {
        parameter.value().normal_(0, 0.02);
      } else {
        parameter.value().zero_();
      }
    }
  }

  nn::Embedding words, positions, sentences;
  nn::LayerNorm norm;
  std::vector<std::shared_ptr<Layer>> layers;
  nn::Linear pooler, classifier;
};

}  // namespace

std::shared_ptr<Classifier> bert(const BertOptions& options) {
  if (options.heads < 1 || options.width % options.heads != 0)
    throw std::invalid_argument("bert: the heads must divide the width");
  return std::make_shared<Bert>(options);
}

}  // namespace examples
