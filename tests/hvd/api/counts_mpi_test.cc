/// Reducescatters of element counts on raw buffers: each form gives each rank its own elements, and
/// what is wrong is told. And waiting for so long only.

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "hvd/hvd.h"
#include "tests/support/error_of.h"
#include "tests/support/running.h"

namespace hvd::test::uneven {
namespace {

using Floats = std::vector<float>;
using Counts = std::vector<std::int64_t>;
constexpr std::int64_t kWidth = 7;

/// All elements to one rank, none to another, odd numbers.
std::vector<Counts> counts_of(std::int64_t elements) {
  const auto ranks = static_cast<std::size_t>(size());
  std::vector<Counts> all;
  for (const std::size_t to : {std::size_t{0}, ranks - 1}) {
    all.emplace_back(ranks, 0);
    all.back()[to] = elements;
  }
  Counts odd(ranks, 0);
  std::int64_t left = elements;
  for (std::size_t r = 1; r < ranks; ++r) left -= odd[r] = left / 3;
  odd[0] = left;
  all.push_back(odd);
  return all;
}

float value(int of, std::int64_t i, int round) {
  return static_cast<float>((of + 1) * (i % 11 + round));
}

struct Case {
  std::int64_t rows;
  Counts counts;
  int round;
  [[nodiscard]] Floats input() const {
    Floats values(static_cast<std::size_t>(rows * kWidth));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = value(rank(), static_cast<std::int64_t>(i), round);
    return values;
  }
  [[nodiscard]] Floats expected() const {
    const auto self = static_cast<std::size_t>(rank());
    const std::int64_t begin =
        std::accumulate(counts.begin(), counts.begin() + rank(), std::int64_t{0});
    Floats sums(static_cast<std::size_t>(counts[self]));
    for (std::size_t i = 0; i < sums.size(); ++i)
      for (int r = 0; r < size(); ++r)
        sums[i] += value(r, begin + static_cast<std::int64_t>(i), round);
    return sums;
  }
};

bool same(const Gathered& result, const Floats& expected) {
  return result.shape == Shape{static_cast<std::int64_t>(expected.size())} &&
         result.data.size() == expected.size() * sizeof(float) &&
         (expected.empty() ||
          std::memcmp(result.data.data(), expected.data(), result.data.size()) == 0);
}

void check_all_forms(const Case& what, const std::string& name) {
  Floats input = what.input();
  const Buffer from{input.data(), DataType::Float32, {what.rows, kWidth}, {}};
  const auto options = [&](const char* form) {
    return ReducescatterOptions{.name = name + form, .op = ReduceOp::Sum, .counts = what.counts};
  };
  const Floats expected = what.expected();
  CHECK(same(reducescatter(from, options(".plain")), expected));
  CHECK(same(reducescatter_async(from, options(".async")).wait(), expected));
  CHECK(same(grouped_reducescatter({from}, options(".grouped")).front(), expected));
  Floats output(expected.size(), -1);
  const Buffer to{output.data(), DataType::Float32, {static_cast<std::int64_t>(output.size())}, {}};
  reducescatter_into(to, from, options(".into"));
  CHECK(output == expected);
  output.assign(output.size(), -1);
  reducescatter_into_async(to, from, options(".into_async")).wait();
  CHECK(output == expected);
  CHECK(input == what.input());
}

}  // namespace

TEST_CASE("reducescatter of element counts: every form, in shared memory and without") {
  in_both_worlds([] {
    for (const std::int64_t rows : {0, 1, 5, 4096}) {
      CAPTURE(rows);
      // Each name with one signature, often enough to be repeated; and all under one name.
      std::size_t number = 0;
      for (const auto& counts : counts_of(rows * kWidth)) {
        for (int round = 0; round < 4; ++round)
          check_all_forms({rows, counts, round},
                          "counts." + std::to_string(rows) + "." + std::to_string(number));
        check_all_forms({rows, counts, 9}, "counts");
        ++number;
      }
    }
  });
}

TEST_CASE("reducescatter of element counts: repeated by rows and by counts under one name") {
  const Running running;
  const std::int64_t elements = 12 * size();
  Counts counts(static_cast<std::size_t>(size()), 12);
  counts.front() += 5;
  counts.back() -= 5;
  for (int round = 0; round < 12; ++round) {
    Floats input(static_cast<std::size_t>(elements), static_cast<float>(rank() + 1));
    const Buffer from{input.data(), DataType::Float32, {elements}, {}};
    const bool by_counts = round % 6 >= 3;
    const ReducescatterOptions options{
        .name = "both", .op = ReduceOp::Sum, .counts = by_counts ? counts : Counts{}};
    const std::int64_t own = by_counts ? counts[static_cast<std::size_t>(rank())] : 12;
    CHECK(
        same(reducescatter(from, options),
             Floats(static_cast<std::size_t>(own), static_cast<float>(size() * (size() + 1)) / 2)));
  }
}

TEST_CASE("reducescatter of element counts: a persistent one") {
  const Running running;
  for (const auto& counts : counts_of(5 * kWidth)) {
    Case what{5, counts, 0};
    Floats input = what.input();
    Floats output(what.expected().size(), -1);
    auto again = reducescatter_init(
        {output.data(), DataType::Float32, {static_cast<std::int64_t>(output.size())}, {}},
        {input.data(), DataType::Float32, {5, kWidth}, {}},
        {.op = ReduceOp::Sum, .counts = counts});
    for (what.round = 0; what.round < 5; ++what.round) {
      std::ranges::copy(what.input(), input.begin());  // its memory stays
      again.start();
      again.wait();
      CHECK(output == what.expected());
    }
  }
}

TEST_CASE("reducescatter of element counts: what is wrong is told") {
  const Running running;
  Floats input(6, 1);
  const Buffer from{input.data(), DataType::Float32, {2, 3}, {}};
  Counts counts(static_cast<std::size_t>(size()), 0);
  counts.back() = 5;
  CHECK(error_of<InvalidArgument>([&] {
          reducescatter(from, {.name = "few", .counts = counts});
        }).find("are not all 6 elements") != std::string::npos);
  counts.back() = 6;
  CHECK(error_of<InvalidArgument>([&] {
          grouped_reducescatter({from, from}, {.name = "two", .counts = counts});
        }).starts_with("reducescatter 'two': element counts"));
  Floats output(6);
  const Buffer wrong{output.data(), DataType::Float32, {4}, {}};
  CHECK_THROWS_AS(reducescatter_into(wrong, from, {.name = "room", .counts = counts}),
                  InvalidArgument);
  Counts with_one_more = counts;
  with_one_more.push_back(0);
  CHECK_THROWS_AS(reducescatter(from, {.name = "more", .counts = with_one_more}), InvalidArgument);
  for (const Shape& impossible :
       {Shape{-2, -3}, Shape{std::int64_t{1} << 33, std::int64_t{1} << 33}})
    CHECK_THROWS_AS(reducescatter({input.data(), DataType::Float32, impossible, {}},
                                  {.name = "impossible", .counts = counts}),
                    InvalidArgument);
  CHECK_THROWS_AS(
      allreduce({input.data(), DataType::Float32, {4}, {}}, {nullptr, DataType::Float32, {4}, {}},
                {.name = "nowhere", .compression = Compression::fp16()}),
      InvalidArgument);
  if (size() == 1) return;
  Counts differs(static_cast<std::size_t>(size()), 0);
  differs[static_cast<std::size_t>(rank() == 0 ? 0 : size() - 1)] = 6;
  CHECK(error_of<Mismatch>([&] {
          reducescatter(from, {.name = "differs", .counts = differs});
        }).starts_with("reducescatter 'differs': the splits differ"));
  CHECK(reducescatter(from, {.name = "differs", .counts = counts}).shape ==
        Shape{counts[static_cast<std::size_t>(rank())]});
}

TEST_CASE("wait_for: returns in time, whether it is done or not, and the operation goes on") {
  using namespace std::chrono_literals;
  in_both_worlds([] {
    std::int32_t mine = rank(), sum = -1;
    const Buffer from{&mine, DataType::Int32, {1}, {}}, to{&sum, DataType::Int32, {1}, {}};
    barrier();
    if (rank() == size() - 1 && size() > 1) std::this_thread::sleep_for(400ms);
    const auto begin = std::chrono::steady_clock::now();
    const auto handle = allreduce_async(from, to, {.name = "late", .op = ReduceOp::Sum});
    if (rank() != size() - 1) {
      CHECK_FALSE(handle.wait_for(-1s));
      CHECK_FALSE(handle.wait_for(std::chrono::nanoseconds::min()));
      CHECK_FALSE(handle.wait_for(20ms));
      CHECK(std::chrono::steady_clock::now() - begin >= 20ms);
    }
    CHECK(handle.wait_for(std::chrono::nanoseconds::max()));
    CHECK(handle.done());
    CHECK(handle.wait_for(0s));
    handle.wait();
    CHECK(sum == size() * (size() - 1) / 2);
  });
  CHECK_THROWS_AS(static_cast<void>(Handle<void>().wait_for(1s)), InvalidArgument);
}

}  // namespace hvd::test::uneven
