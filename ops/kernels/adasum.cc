#include "ops/kernels/adasum.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>

namespace hvd::kernels {

namespace {

// elements converted at a time: n blocks of double stay in the first cache
constexpr std::size_t kBlock = 512;

/// A vector as a combination of the inputs.
using Combination = std::vector<double>;
/// The same, and how many ranks it stands for.
struct Vector {
  Combination of;
  double ranks;
};

struct Product {
  double value = 0;
  double magnitude = 0;  ///< sum of the absolute values of what was added up
};

Product product(std::span<const double> products, std::size_t n, const Combination& a,
                const Combination& b) {
  Product sum;
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j < n; ++j) {
      const double term = a[i] * b[j] * products[i * n + j];
      sum.value += term;
      sum.magnitude += std::abs(term);
    }
  return sum;
}

/// 1 - weight a.b / |a|^2
double share(double weight, const Product& common, const Product& square) {
  constexpr double kRoundingErrors = 1e-12;
  if (!(square.value > kRoundingErrors * square.magnitude)) return 1;
  return 1 - weight * common.value / square.value;
}

class Blocks {
 public:
  explicit Blocks(const Reduction& reduction, std::size_t count)
      : reduction_(reduction), count_(count) {}
  [[nodiscard]] std::size_t size() const { return (count_ + kBlock - 1) / kBlock; }
  [[nodiscard]] std::size_t count(std::size_t block) const {
    return std::min(kBlock, count_ - block * kBlock);
  }
  void load(std::size_t block, const void* from, std::span<double> to) const {
    if (from == nullptr) return std::fill(to.begin(), to.end(), 0.0);
    const auto* bytes =
        static_cast<const std::byte*>(from) + block * kBlock * element_bytes(reduction_.dtype);
    convert(to.data(), DataType::Float64, bytes, reduction_.dtype, count(block),
            reduction_.prescale);
  }
  void store(std::size_t block, std::span<const double> from, void* to) const {
    auto* bytes = static_cast<std::byte*>(to) + block * kBlock * element_bytes(reduction_.dtype);
    convert(bytes, reduction_.dtype, from.data(), DataType::Float64, count(block),
            reduction_.postscale);
  }

 private:
  const Reduction& reduction_;
  std::size_t count_;
};

double dot(std::span<const double> a, std::span<const double> b, std::size_t count, double scale) {
  std::array<double, 8> sums{};
  std::size_t i = 0;
  for (; i + sums.size() <= count; i += sums.size())
    for (std::size_t lane = 0; lane < sums.size(); ++lane)
      sums[lane] += (a[i + lane] * scale) * (b[i + lane] * scale);
  for (; i < count; ++i) sums[0] += (a[i] * scale) * (b[i] * scale);
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

}  // namespace

bool adasum_supported(DataType dtype) {
  return dtype == DataType::Float16 || dtype == DataType::BFloat16 || dtype == DataType::Float32 ||
         dtype == DataType::Float64;
}

std::vector<double> adasum_coefficients(std::span<const double> products, std::size_t n,
                                        std::span<const double> ranks) {
  std::vector<Vector> vectors;
  for (std::size_t i = 0; i < n; ++i) {
    vectors.push_back({Combination(n, 0.0), ranks.empty() ? 1 : ranks[i]});
    vectors.back().of[i] = 1;
  }
  while (vectors.size() > 1) {
    std::vector<Vector> next;
    for (std::size_t i = 0; i + 1 < vectors.size(); i += 2) {
      const Vector& a = vectors[i];
      const Vector& b = vectors[i + 1];
      const double both = a.ranks + b.ranks;
      const Product common = product(products, n, a.of, b.of);
      const double of_a = share(a.ranks / both, common, product(products, n, a.of, a.of));
      const double of_b = share(b.ranks / both, common, product(products, n, b.of, b.of));
      Vector& sum = next.emplace_back(Combination(n), both);
      for (std::size_t k = 0; k < n; ++k) sum.of[k] = of_a * a.of[k] + of_b * b.of[k];
    }
    if (vectors.size() % 2 == 1) next.push_back(std::move(vectors.back()));
    vectors = std::move(next);
  }
  return vectors.empty() ? Combination{} : std::move(vectors.front().of);
}

void adasum(const Reduction& reduction, std::span<const void* const> in, std::span<void* const> out,
            std::size_t count, std::span<const double> ranks) {
  if (!adasum_supported(reduction.dtype))
    throw std::invalid_argument("adasum: not a type of real floating-point numbers");
  const std::size_t n = in.size();
  const Blocks blocks(reduction, count);
  std::vector<double> values(n * kBlock);
  const auto row = [&](std::size_t i) { return std::span(values).subspan(i * kBlock, kBlock); };

  double largest = 0;
  if (reduction.dtype == DataType::Float64) {  // squares of the others' values fit into double
    for (std::size_t block = 0; block < blocks.size(); ++block)
      for (std::size_t i = 0; i < n; ++i) {
        blocks.load(block, in[i], row(0));
        for (std::size_t k = 0; k < blocks.count(block); ++k)
          if (std::isfinite(values[k])) largest = std::max(largest, std::abs(values[k]));
      }
  }
  const double scale =
      largest > 0 ? std::ldexp(1.0, -std::clamp(std::ilogb(largest), -1000, 1000)) : 1;

  std::vector<double> products(n * n, 0.0);
  for (std::size_t block = 0; block < blocks.size(); ++block) {
    for (std::size_t i = 0; i < n; ++i) blocks.load(block, in[i], row(i));
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = i; j < n; ++j)
        products[i * n + j] += dot(row(i), row(j), blocks.count(block), scale);
  }
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j < i; ++j) products[i * n + j] = products[j * n + i];
  const std::vector<double> coefficients = adasum_coefficients(products, n, ranks);

  std::array<double, kBlock> sum{};
  for (std::size_t block = 0; block < blocks.size(); ++block) {
    sum.fill(0);
    for (std::size_t i = 0; i < n; ++i) {
      blocks.load(block, in[i], row(i));
      for (std::size_t k = 0; k < blocks.count(block); ++k)
        sum[k] += coefficients[i] * values[i * kBlock + k];
    }
    for (void* output : out) blocks.store(block, sum, output);
  }
}

}  // namespace hvd::kernels
