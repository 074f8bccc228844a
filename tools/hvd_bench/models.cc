#include "tools/hvd_bench/models.h"

#include <algorithm>

namespace bench {

namespace {

class Parameters {
 public:
  /// A convolution without bias, and the batch norm after it.
  void convolution(std::size_t in, std::size_t out, std::size_t kernel) {
    counts_.insert(counts_.end(), {in * out * kernel * kernel, out, out});
  }
  void linear(std::size_t in, std::size_t out) { counts_.insert(counts_.end(), {in * out, out}); }
  void embedding(std::size_t words, std::size_t width) { counts_.push_back(words * width); }
  void layer_norm(std::size_t width) { counts_.insert(counts_.end(), {width, width}); }
  std::vector<std::size_t> backward() && {
    std::reverse(counts_.begin(), counts_.end());
    return std::move(counts_);
  }

 private:
  std::vector<std::size_t> counts_;
};

std::vector<std::size_t> resnet(const std::vector<std::size_t>& blocks, bool bottleneck) {
  Parameters parameters;
  parameters.convolution(3, 64, 7);
  std::size_t in = 64;
  for (std::size_t stage = 0; stage < blocks.size(); ++stage) {
    const std::size_t width = std::size_t{64} << stage;
    const std::size_t out = bottleneck ? 4 * width : width;
    for (std::size_t block = 0; block < blocks[stage]; ++block) {
      if (bottleneck) {
        parameters.convolution(in, width, 1);
        parameters.convolution(width, width, 3);
        parameters.convolution(width, out, 1);
      } else {
        parameters.convolution(in, width, 3);
        parameters.convolution(width, out, 3);
      }
      if (block == 0 && (bottleneck || stage > 0)) parameters.convolution(in, out, 1);
      in = out;
    }
  }
  parameters.linear(in, 1000);
  return std::move(parameters).backward();
}

std::vector<std::size_t> bert(std::size_t layers, std::size_t width) {
  Parameters parameters;
  parameters.embedding(30522, width);  // words
  parameters.embedding(512, width);    // positions
  parameters.embedding(2, width);      // first or second sentence
  parameters.layer_norm(width);
  for (std::size_t layer = 0; layer < layers; ++layer) {
    for (int i = 0; i < 4; ++i) parameters.linear(width, width);  // query, key, value, output
    parameters.layer_norm(width);
    parameters.linear(width, 4 * width);
    parameters.linear(4 * width, width);
    parameters.layer_norm(width);
  }
  parameters.linear(width, width);  // pooler
  return std::move(parameters).backward();
}

}  // namespace

const std::vector<std::string>& model_names() {
  static const std::vector<std::string> names{"resnet18", "resnet50", "bert-base"};
  return names;
}

std::vector<std::size_t> gradients_of(const std::string& name) {
  if (name == "bert-base") return bert(12, 768);
  return name == "resnet18" ? resnet({2, 2, 2, 2}, false) : resnet({3, 4, 6, 3}, true);
}

}  // namespace bench
