// The code of the kernel that makes results of an abort unusable, run on the host: each thread in
// turn.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ops/gpu/kernels/poison_kernel.h"
#include "tests/support/gpu/host_kernels.h"

namespace hvd::gpu::test {
namespace {

/// Returns the number of launches.
int poison_on_host(const PoisonJob& job) {
  int launches = 0;
  const CudaCode code = poison::in_launches(job, [&](const poison::Table& table, int blocks) {
    ++launches;
    CHECK(blocks >= 1);
    CHECK(blocks <= poison::kMostBlocks);
    const auto threads = static_cast<std::size_t>(blocks) * poison::kThreads;
    for (std::size_t thread = 0; thread < threads; ++thread) poison::fill(table, thread, threads);
    return CudaCode::Success;
  });
  CHECK(code == CudaCode::Success);
  return launches;
}

}  // namespace

TEST_CASE(
    "poison: every byte of the items, and none beside them, whatever their sizes and addresses") {
  std::vector<std::uint8_t> memory(300'000, 7);
  const std::vector<PoisonItem> items{{&memory[1], 1},
                                      {&memory[5], 0},
                                      {&memory[7], 33},
                                      {&memory[64], 70'001},
                                      {&memory[80'000], 200'000}};
  CHECK(poison_on_host({.items = items, .mark = nullptr, .dtype = DataType::Float32}) == 1);
  std::vector<std::uint8_t> expected(memory.size(), 7);
  for (const auto& [begin, bytes] : items)
    std::memset(expected.data() + (static_cast<std::uint8_t*>(begin) - memory.data()), 0xff, bytes);
  CHECK(memory == expected);
}

TEST_CASE("poison: a launch for each 128 items, none for nothing, and what is refused ends it") {
  std::vector<std::uint8_t> memory(300, 0);
  std::vector<PoisonItem> items;
  for (auto& byte : memory) items.push_back({&byte, 1});
  CHECK(poison_on_host({.items = items, .mark = nullptr, .dtype = DataType::Int32}) == 3);
  CHECK(memory == std::vector<std::uint8_t>(300, 0x80));
  CHECK(poison_on_host({}) == 0);
  int launches = 0;
  CHECK(poison::in_launches({.items = items, .mark = nullptr, .dtype = DataType::Int32},
                            [&](const poison::Table&, int) {
                              ++launches;
                              return CudaCode::InvalidValue;
                            }) == CudaCode::InvalidValue);
  CHECK(launches == 1);
}

TEST_CASE(
    "poison: floats are NaN in every format, signed integers far below zero, truth values true") {
  const auto value_of = [](DataType dtype) {
    double value = 0;
    with_host_type(dtype, [&](auto tag) {
      typename decltype(tag)::Native poisoned;
      std::memset(static_cast<void*>(&poisoned), poison_byte(dtype), sizeof poisoned);
      value = static_cast<double>(poisoned);
    });
    return value;
  };
  using enum DataType;
  for (const DataType dtype : {Float16, BFloat16, Float32, Float64})
    CHECK(std::isnan(value_of(dtype)));
  CHECK(poison_byte(Complex64) == poison_byte(Float32));
  CHECK(value_of(Int8) == -128);
  CHECK(value_of(Int32) == -2139062144);
  CHECK(value_of(Int64) < -1e18);
  CHECK(value_of(UInt8) == 128);
  CHECK(poison_byte(Bool) == 1);
}

}  // namespace hvd::gpu::test
