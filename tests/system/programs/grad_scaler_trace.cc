// Does with GradScaler what the lines of standard input say, and prints after each what it left;
// grad_scaler_trace.py does the same with PyTorch's own. A line: an operation and its numbers (see
// `apply`). The rest of its start is in the first line.
#include <hvd/torch.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Words = std::vector<std::string>;

double number(const std::string& word) { return std::stod(word); }
std::string show(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%a", value);
  return std::isnan(value) ? "nan" : text;
}

class Replay {
 public:
  explicit Replay(const Words& start)
      : options_{.init_scale = number(start.at(0)),
                 .growth_factor = number(start.at(1)),
                 .backoff_factor = number(start.at(2)),
                 .growth_interval = std::stol(start.at(3))},
        scaler_(std::make_unique<hvd::GradScaler>(options_)) {
    for (int i = 0; i < 2; ++i) {
      parameters_.push_back(torch::ones({2}, torch::requires_grad()));
      optimizers_.push_back(
          std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{parameters_.back()}, 0.125));
    }
  }

  void apply(const Words& words) {
    const std::string& what = words.at(0);
    const auto which = static_cast<std::size_t>(words.size() > 1 ? number(words[1]) : 0);
    if (what == "backward") {
      const at::Tensor gradient =
          torch::tensor({number(words.at(2)), number(words.at(3))}, torch::kFloat32);
      scaler_->scale((parameters_.at(which) * gradient).sum()).backward();
    } else if (what == "zero") {
      optimizers_.at(which)->zero_grad();
    } else if (what == "unscale") {
      scaler_->unscale_(*optimizers_.at(which));
    } else if (what == "step") {
      scaler_->step(*optimizers_.at(which));
    } else if (what == "update") {
      scaler_->update();
    } else if (what == "set") {
      scaler_->update(number(words.at(1)));
    } else if (what == "reload") {
      const auto state = scaler_->state();
      scaler_ = std::make_unique<hvd::GradScaler>(options_);
      scaler_->load_state(state);
    }
  }

  [[nodiscard]] std::string left() const {
    std::string text =
        show(scaler_->get_scale()) + " " + std::to_string(scaler_->state().growth_tracker);
    for (const auto& parameter : parameters_) {
      for (int i = 0; i < 2; ++i) text += " " + show(parameter[i].item<double>());
      if (!parameter.grad().defined()) text += " none";
      for (int i = 0; parameter.grad().defined() && i < 2; ++i)
        text += " " + show(parameter.grad()[i].item<double>());
    }
    return text;
  }

 private:
  hvd::GradScalerOptions options_;
  std::unique_ptr<hvd::GradScaler> scaler_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::unique_ptr<torch::optim::SGD>> optimizers_;
};

Words split(const std::string& line) {
  std::istringstream in(line);
  Words words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

}  // namespace

int main() {
  try {
    std::unique_ptr<Replay> replay;
    for (std::string line; std::getline(std::cin, line);) {
      const Words words = split(line);
      if (words.empty()) continue;
      if (words[0] == "start") {
        replay = std::make_unique<Replay>(Words(words.begin() + 1, words.end()));
        continue;
      }
      bool refused = false;
      try {
        replay->apply(words);
      } catch (const hvd::InvalidArgument&) {
        refused = true;
      }
      std::cout << line << (refused ? " : refused " : " : done ") << replay->left() << "\n";
    }
  } catch (const std::exception& error) {
    std::cerr << "grad_scaler_trace: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
