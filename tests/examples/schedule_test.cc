// Learning-rate schedules of the trainer.
#include "examples/train/trainer/schedule.h"

#include <doctest/doctest.h>

#include <cmath>
#include <stdexcept>

namespace {

using doctest::Approx;
using examples::parse_steps;
using examples::rate_factor;
using examples::Schedule;

TEST_CASE("without a schedule the rate stays, with steps it falls after their epochs") {
  CHECK(rate_factor({}, 0) == 1);
  CHECK(rate_factor({}, 99.5) == 1);
  const Schedule step{.kind = "step", .steps = {2, 5}, .gamma = 0.1};
  CHECK(rate_factor(step, 0) == 1);
  CHECK(rate_factor(step, 1.99) == 1);
  CHECK(rate_factor(step, 2) == Approx(0.1));
  CHECK(rate_factor(step, 4.99) == Approx(0.1));
  CHECK(rate_factor(step, 5) == Approx(0.01));
}

TEST_CASE("a cosine goes from 1 to 0 over the epochs after the warm-up, and stays") {
  const Schedule cosine{.kind = "cosine", .epochs = 10};
  CHECK(rate_factor(cosine, 0) == 1);
  CHECK(rate_factor(cosine, 5) == Approx(0.5));
  CHECK(rate_factor(cosine, 2.5) == Approx(0.5 * (1 + std::sqrt(0.5))));
  CHECK(rate_factor(cosine, 10) == Approx(0));
  CHECK(rate_factor(cosine, 11) == Approx(0));
  const Schedule warm{.kind = "cosine", .epochs = 10, .warmup_epochs = 2, .first_factor = 0.25};
  CHECK(rate_factor(warm, 0) == 0.25);
  CHECK(rate_factor(warm, 1) == Approx(0.625));
  CHECK(rate_factor(warm, 2) == 1);
  CHECK(rate_factor(warm, 6) == Approx(0.5));
}

TEST_CASE("a warm-up is a straight line to what the schedule says, also when it is longer than training or passes a step") {
  const Schedule schedule{.kind = "step", .steps = {1}, .gamma = 0.5, .epochs = 1, .warmup_epochs = 4, .first_factor = 0};
  CHECK(rate_factor(schedule, 0) == 0);
  CHECK(rate_factor(schedule, 0.5) == Approx(0.125));
  CHECK(rate_factor(schedule, 2) == Approx(0.25));
  CHECK(rate_factor(schedule, 4) == Approx(0.5));
  CHECK(rate_factor({.kind = "cosine", .epochs = 1, .warmup_epochs = 4}, 0.5) == Approx(0.125));
}

TEST_CASE("lists of epochs rise") {
  CHECK(parse_steps("30,60,80") == std::vector<std::int64_t>{30, 60, 80});
  CHECK(parse_steps("1") == std::vector<std::int64_t>{1});
  for (const char* wrong : {"30,20", "0", "a", "1,,2", "1.5", "3,3", "99999999999"})
    CHECK_THROWS_AS(parse_steps(wrong), std::invalid_argument);
}

}  // namespace
