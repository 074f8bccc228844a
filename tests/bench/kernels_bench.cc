// How far the reduction kernels are from the memory limit: memcpy, a loop with nothing around it,
// and `reduce` in place over 2, 3 and 4 buffers, interleaved in one run, medians.
//
//   kernels_bench [MiB per buffer, 64] [rounds, 11]
//
// GB/s counts every byte read and written once: 2 * bytes for a copy, 2 * ranks * bytes in place.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ops/kernels/reduce.h"

namespace {

using hvd::DataType;
using hvd::ReduceOp;
namespace kernels = hvd::kernels;

constexpr std::size_t kBuffers = 4;
using Buffers = std::array<float*, kBuffers>;

/// The comparison: a sum of kRanks buffers of floats in place, as written for this one case.
template <int kRanks>
void plain_sum(const Buffers& buffers, std::size_t count) {
  constexpr std::size_t kLanes = 16;
  for (std::size_t i = 0; i + kLanes <= count; i += kLanes) {
    float sum[kLanes];
    for (std::size_t k = 0; k < kLanes; ++k) sum[k] = buffers[0][i + k];
    for (int r = 1; r < kRanks; ++r) {
      for (std::size_t k = 0; k < kLanes; ++k) sum[k] += buffers[r][i + k];
    }
    for (int r = 0; r < kRanks; ++r) {
      for (std::size_t k = 0; k < kLanes; ++k) buffers[r][i + k] = sum[k];
    }
  }
}

struct Case {
  std::string name;
  double bytes;  ///< read and written by one run
  std::function<void()> run;
  std::vector<double> seconds = {};
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// What is measured, the copy first. The buffers stay the caller's.
std::vector<Case> cases_of(const Buffers& buffers, std::size_t bytes) {
  std::vector<Case> cases;
  cases.push_back({"memcpy", 2.0 * static_cast<double>(bytes),
                   [&buffers, bytes] { std::memcpy(buffers[0], buffers[1], bytes); }});
  cases.push_back({"plain loop fp32 x2", 4.0 * static_cast<double>(bytes),
                   [&buffers, bytes] { plain_sum<2>(buffers, bytes / 4); }});
  cases.push_back({"plain loop fp32 x4", 8.0 * static_cast<double>(bytes),
                   [&buffers, bytes] { plain_sum<4>(buffers, bytes / 4); }});
  for (const DataType dtype : {DataType::Float32, DataType::Float16, DataType::BFloat16}) {
    for (const std::size_t ranks : {2, 3, 4}) {
      for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Average}) {
        for (const auto isa : {kernels::Isa::Baseline, kernels::Isa::Avx2, kernels::Isa::Avx512}) {
          if (!kernels::available(isa) || (op == ReduceOp::Average && isa != kernels::best_isa()))
            continue;
          const auto name = std::string(hvd::name_of(op)) + " " + std::string(hvd::name_of(dtype)) +
                            " x" + std::to_string(ranks) + " " + std::string(kernels::name_of(isa));
          cases.push_back(
              {name, 2.0 * static_cast<double>(ranks * bytes),
               [&buffers, bytes, dtype, ranks, op, isa] {
                 const kernels::Reduction reduction = {
                     .dtype = dtype, .op = op, .divisor = static_cast<int>(ranks), .output = dtype};
                 std::array<const void*, kBuffers> in;
                 std::array<void*, kBuffers> out;
                 std::copy(buffers.begin(), buffers.end(), in.begin());
                 std::copy(buffers.begin(), buffers.end(), out.begin());
                 kernels::reduce(isa, reduction, std::span(in).first(ranks),
                                 std::span(out).first(ranks), bytes / element_bytes(dtype));
               }});
        }
      }
    }
  }

  // Out of place: all four are read, one of them is written.
  for (const DataType dtype : {DataType::Float32, DataType::Float16, DataType::BFloat16}) {
    cases.push_back(
        {"sum " + std::string(hvd::name_of(dtype)) + " x4 to one", 5.0 * static_cast<double>(bytes),
         [&buffers, bytes, dtype] {
           const kernels::Reduction reduction = {
               .dtype = dtype, .op = ReduceOp::Sum, .output = dtype};
           const std::array<const void*, 4> in = {buffers[0], buffers[1], buffers[2], buffers[3]};
           const std::array<void*, 1> out = {buffers[0]};
           kernels::reduce(reduction, in, out, bytes / element_bytes(dtype));
         }});
  }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const double mebibytes = argc > 1 ? std::atof(argv[1]) : 64;
  const int rounds = argc > 2 ? std::max(1, std::atoi(argv[2])) : 11;
  const auto bytes =
      std::max<std::size_t>(4096, static_cast<std::size_t>(mebibytes * (1 << 20)) / 4096 * 4096);
  const int repeats = static_cast<int>(std::max<std::size_t>(1, (std::size_t{16} << 20) / bytes));

  std::array<std::unique_ptr<float, decltype(&std::free)>, kBuffers> owners = {
      {{nullptr, std::free}, {nullptr, std::free}, {nullptr, std::free}, {nullptr, std::free}}};
  Buffers buffers;
  for (std::size_t b = 0; b < kBuffers; ++b) {
    owners[b].reset(static_cast<float*>(std::aligned_alloc(4096, bytes)));
    buffers[b] = owners[b].get();
    std::memset(buffers[b], 0, bytes);
  }

  std::vector<Case> cases = cases_of(buffers, bytes);
  for (int round = 0; round < rounds; ++round) {
    for (Case& one : cases) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < repeats; ++i) one.run();
      one.seconds.push_back(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() /
          repeats);
    }
  }

  std::printf("%zu KiB per buffer, %d rounds, one thread\n%-32s %12s %8s %10s\n", bytes / 1024,
              rounds, "", "us", "GB/s", "of memcpy");
  const double copy = cases.front().bytes / median(cases.front().seconds);
  for (const Case& one : cases) {
    const double rate = one.bytes / median(one.seconds);
    std::printf("%-32s %12.1f %8.1f %9.2fx\n", one.name.c_str(), median(one.seconds) * 1e6,
                rate / 1e9, rate / copy);
  }
}
