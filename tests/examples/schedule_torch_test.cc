// Learning-rate schedules of the trainer.
#include <doctest/doctest.h>
#include <hvd/torch.h>
#include <torch/torch.h>

#include <cmath>
#include <numbers>
#include <stdexcept>

#include "examples/train/trainer/options.h"
#include "examples/train/trainer/setup.h"

namespace {

using doctest::Approx;
using examples::Options;
using examples::parse_steps;

/// The rates of the first `steps` steps of an optimizer with two groups, the second of which has
/// half of the first's.
std::vector<double> rates_of(const Options& options, std::int64_t steps_per_epoch, int steps) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double rate : {1.0, 0.5})
    groups.emplace_back(std::vector{torch::zeros({1})},
                        std::make_unique<torch::optim::SGDOptions>(rate));
  torch::optim::SGD optimizer(std::move(groups), torch::optim::SGDOptions(1));
  const auto schedule = examples::make_schedule(options, optimizer, steps_per_epoch);
  std::vector<double> rates;
  for (int step = 0; step < steps; ++step, schedule->step()) {
    rates.push_back(optimizer.param_groups()[0].options().get_lr());
    CHECK(optimizer.param_groups()[1].options().get_lr() == 0.5 * rates.back());
  }
  return rates;
}

TEST_CASE("without a schedule the rate stays, with steps it falls after their epochs") {
  CHECK(rates_of({}, 4, 9) == std::vector<double>(9, 1.0));
  const auto rates = rates_of({.schedule = "step", .lr_steps = {2, 5}, .lr_gamma = 0.1}, 4, 24);
  CHECK(rates[0] == 1);
  CHECK(rates[7] == 1);
  CHECK(rates[8] == Approx(0.1));
  CHECK(rates[19] == Approx(0.1));
  CHECK(rates[20] == Approx(0.01));
}

TEST_CASE("a cosine goes from 1 to 0 over the epochs after the warm-up, and stays") {
  const auto cosine = rates_of({.epochs = 10, .schedule = "cosine"}, 4, 46);
  CHECK(cosine[0] == 1);
  CHECK(cosine[20] == Approx(0.5));
  CHECK(cosine[10] == Approx(0.5 * (1 + std::sqrt(0.5))));
  CHECK(cosine[40] == Approx(0));
  CHECK(cosine[45] == Approx(0));
  const auto warm = rates_of({.epochs = 10, .schedule = "cosine", .warmup_epochs = 2}, 4, 40);
  CHECK(warm[0] == 0.01);
  CHECK(warm[4] == Approx(0.505));
  CHECK(warm[8] == 1);
  CHECK(warm[24] == Approx(0.5));
}

TEST_CASE(
    "a warm-up is a straight line to the whole rate, also when it is longer than training or "
    "passes a step") {
  const auto rates =
      rates_of({.schedule = "step", .lr_steps = {1}, .lr_gamma = 0.5, .warmup_epochs = 4}, 2, 10);
  CHECK(rates[0] == 0.01);
  CHECK(rates[1] == Approx(0.01 + 0.99 / 8));
  CHECK(rates[4] == Approx(0.505));
  CHECK(rates[8] == Approx(0.5));
  CHECK(rates_of({.epochs = 1, .schedule = "cosine", .warmup_epochs = 4}, 2, 2)[1] ==
        Approx(0.01 + 0.99 / 8));
  CHECK(rates_of({.warmup_epochs = 0.3}, 4, 4)[2] == 1);  // the second step ends it
}

TEST_CASE("a rate that was scaled up begins as it was") {
  const int passes = 2 * hvd::size();
  const auto rates = rates_of({.warmup_epochs = 1, .scale_lr = true, .accumulate = 2}, 4, 5);
  CHECK(rates[0] == Approx(1.0 / passes));
  CHECK(rates[4] == 1);
}

TEST_CASE("lists of epochs rise") {
  CHECK(parse_steps("30,60,80") == std::vector<std::int64_t>{30, 60, 80});
  CHECK(parse_steps("1") == std::vector<std::int64_t>{1});
  for (const char* wrong : {"30,20", "0", "a", "1,,2", "1.5", "3,3", "99999999999"})
    CHECK_THROWS_AS(parse_steps(wrong), std::invalid_argument);
}

TEST_CASE("a short set shrinks the batch, one image per pass is the least") {
  CHECK(examples::batch_size_of({.batch_size = 8}, 100, 3) == 8);
  CHECK(examples::batch_size_of({.batch_size = 8}, 11, 3) == 3);
  CHECK(examples::batch_size_of({.batch_size = 8, .accumulate = 3}, 11, 3) == 1);
  CHECK_THROWS_WITH_AS(examples::batch_size_of({}, 2, 3),
                       doctest::Contains("2 training images are too few for 3 ranks"),
                       std::invalid_argument);
}

}  // namespace
