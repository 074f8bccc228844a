#include "examples/train/trainer/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <sstream>
#include <stdexcept>

namespace examples {
namespace {

double after_warmup(const Schedule& schedule, double epochs_done) {
  if (schedule.kind == "step") {
    const auto passed = std::count_if(schedule.steps.begin(), schedule.steps.end(),
                                      [&](std::int64_t step) { return epochs_done >= static_cast<double>(step) - 1e-9; });
    return std::pow(schedule.gamma, static_cast<double>(passed));
  }
  if (schedule.kind == "cosine") {
    const double length = std::max(schedule.epochs - schedule.warmup_epochs, 1e-9);
    const double part = std::clamp((epochs_done - schedule.warmup_epochs) / length, 0.0, 1.0);
    return 0.5 * (1 + std::cos(std::numbers::pi * part));
  }
  return 1;
}

}  // namespace

double rate_factor(const Schedule& schedule, double epochs_done) {
  const double factor = after_warmup(schedule, epochs_done);
  if (epochs_done >= schedule.warmup_epochs) return factor;
  return factor * (schedule.first_factor + (1 - schedule.first_factor) * epochs_done / schedule.warmup_epochs);
}

std::vector<std::int64_t> parse_steps(const std::string& text) {
  std::vector<std::int64_t> steps;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) {
    const bool digits = !word.empty() && word.size() < 10 && word.find_first_not_of("0123456789") == std::string::npos;
    const std::int64_t step = digits ? std::stoll(word) : 0;
    if (step <= (steps.empty() ? 0 : steps.back())) {
      throw std::invalid_argument("'" + text + "' is no list of epochs that rise, such as 30,60,80");
    }
    steps.push_back(step);
  }
  return steps;
}

}  // namespace examples
