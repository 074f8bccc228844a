#include "tools/hvd_bench/values.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <type_traits>

#include "ops/kernels/scalar_formats.h"

namespace bench {

namespace {

/// Inputs repeat after so many elements: a prime, so that no chunk boundary of the library falls in
/// step with it.
constexpr std::size_t kPeriod = 1009;

using hvd::kernels::scalar::BFloat;
using hvd::kernels::scalar::Half;
template <class T>
using Plain = hvd::kernels::scalar::Plain<T>;

/// Relative rounding of one operation in the format.
template <class Format>
constexpr double rounding() {
  if constexpr (std::is_same_v<Format, Half>) return 0x1p-10;
  if constexpr (std::is_same_v<Format, BFloat>) return 0x1p-7;
  return std::numeric_limits<typename Format::Value>::epsilon();  // 0 for integers
}

/// Returns the largest integer up to which the type holds all, so that sums up to it are exact.
template <class Format>
double largest_exact() {
  if constexpr (rounding<Format>() > 0) return 2 / rounding<Format>();
  return static_cast<double>(std::numeric_limits<typename Format::Value>::max());
}

template <class Work>
auto with_type(hvd::DataType dtype, const Work& work) {
  switch (dtype) {
    case hvd::DataType::UInt8:
    case hvd::DataType::Bool: return work(Plain<std::uint8_t>{});
    case hvd::DataType::Int8: return work(Plain<std::int8_t>{});
    case hvd::DataType::Int16: return work(Plain<std::int16_t>{});
    case hvd::DataType::Int32: return work(Plain<std::int32_t>{});
    case hvd::DataType::Int64: return work(Plain<std::int64_t>{});
    case hvd::DataType::Float16: return work(Half{});
    case hvd::DataType::BFloat16: return work(BFloat{});
    case hvd::DataType::Float64:
    case hvd::DataType::Complex128: return work(Plain<double>{});
    default: return work(Plain<float>{});
  }
}

double largest_exact(hvd::DataType dtype) {
  return with_type(dtype, [](auto format) { return largest_exact<decltype(format)>(); });
}

/// Returns a number from 0 to at most 10; to less where the sum of so many ranks' would not be
/// exact.
int input(const Question& question, int rank, std::size_t tensor, std::size_t place) {
  const std::size_t mixed = place % kPeriod + tensor * 7 + static_cast<std::size_t>(rank) * 5;
  if (question.dtype == hvd::DataType::Bool) return mixed % 3 == 0 ? 0 : 1;
  if (question.op == hvd::ReduceOp::Product) return mixed % 11 == 0 ? 2 : 1;
  const double most = std::min(largest_exact(question.dtype), largest_exact(question.wire));
  const double numbers = std::clamp(std::floor(most / question.ranks) + 1, 2.0, 11.0);
  return static_cast<int>(mixed * 3 % 11 % static_cast<std::size_t>(numbers));
}

double bitwise(hvd::ReduceOp op, double a, double b) {
  const auto one = static_cast<std::int64_t>(a), other = static_cast<std::int64_t>(b);
  if (op == hvd::ReduceOp::BitAnd) return static_cast<double>(one & other);
  return static_cast<double>(op == hvd::ReduceOp::BitOr ? one | other : one ^ other);
}

double reduced(const Question& question, std::size_t tensor, std::size_t place) {
  double result = input(question, 0, tensor, place);
  for (int rank = 1; rank < question.ranks; ++rank) {
    const double next = input(question, rank, tensor, place);
    switch (question.op) {
      case hvd::ReduceOp::Min: result = std::min(result, next); break;
      case hvd::ReduceOp::Max: result = std::max(result, next); break;
      case hvd::ReduceOp::Product: result *= next; break;
      case hvd::ReduceOp::BitAnd:
      case hvd::ReduceOp::BitOr:
      case hvd::ReduceOp::BitXor: result = bitwise(question.op, result, next); break;
      default: result += next;
    }
  }
  if (question.op != hvd::ReduceOp::Average) return result;
  result /= question.ranks;
  return hvd::is_integer(question.dtype) ? std::trunc(result) : result;
}

std::size_t count_wrong(const Question& question, std::span<const std::byte> got, double relative,
                        double absolute, const std::function<double(std::size_t)>& expected) {
  return with_type(question.dtype, [&](auto format) {
    using T = typename decltype(format)::Stored;
    std::vector<double> tile(kPeriod);
    for (std::size_t place = 0; place < kPeriod; ++place) tile[place] = expected(place);
    const std::size_t count = got.size() / sizeof(T);
    std::size_t wrong = 0;
    for (std::size_t begin = 0; begin < count; begin += kPeriod) {
      const std::size_t end = std::min(count, begin + kPeriod);
      for (std::size_t i = begin; i < end; ++i) {
        T value;
        std::memcpy(&value, got.data() + i * sizeof(T), sizeof(T));
        const double want = tile[i - begin];
        // written so that NaN is wrong
        wrong += !(std::abs(static_cast<double>(format.load(value)) - want) <=
                   relative * want + absolute);
      }
    }
    return wrong;
  });
}

/// Numbers in one element.
std::size_t parts(hvd::DataType dtype) { return hvd::is_complex(dtype) ? 2 : 1; }

double rounding(hvd::DataType dtype) {
  return with_type(dtype, [](auto format) { return rounding<decltype(format)>(); });
}

/// A vector in the tree of pairs: so much of each rank's input, for so many ranks.
struct Combination {
  std::vector<double> factors;
  double ranks = 1;
};

/// The scalar products of all ranks' inputs, of `count` elements; exact, as the inputs are small.
std::vector<std::vector<double>> scalar_products(const Question& question, std::size_t tensor,
                                                 std::size_t count) {
  const auto ranks = static_cast<std::size_t>(question.ranks);
  std::vector<std::vector<double>> products(ranks, std::vector<double>(ranks));
  for (std::size_t place = 0; place < std::min(kPeriod, count); ++place) {
    const auto times = static_cast<double>((count - place - 1) / kPeriod + 1);
    for (std::size_t a = 0; a < ranks; ++a)
      for (std::size_t b = 0; b < ranks; ++b)
        products[a][b] += times * input(question, static_cast<int>(a), tensor, place) *
                          input(question, static_cast<int>(b), tensor, place);
  }
  return products;
}

/// What two vectors have in common counts once (Maleki et al., MLSys 2021).
Combination adasum_of_two(const std::vector<std::vector<double>>& products, const Combination& a,
                          const Combination& b) {
  const auto product = [&](const Combination& x, const Combination& y) {
    double sum = 0;
    for (std::size_t i = 0; i < x.factors.size(); ++i)
      for (std::size_t j = 0; j < y.factors.size(); ++j)
        sum += x.factors[i] * y.factors[j] * products[i][j];
    return sum;
  };
  const auto keeps = [&](const Combination& x) {
    const double square = product(x, x);
    return square > 0 ? 1 - x.ranks / (a.ranks + b.ranks) * product(a, b) / square : 1;
  };
  const double of_a = keeps(a);
  const double of_b = keeps(b);
  Combination sum{std::vector<double>(a.factors.size()), a.ranks + b.ranks};
  for (std::size_t i = 0; i < a.factors.size(); ++i)
    sum.factors[i] = of_a * a.factors[i] + of_b * b.factors[i];
  return sum;
}

/// Neighbours in pairs, the results again in pairs; the last of an odd number waits.
Combination adasum_of_all(const std::vector<std::vector<double>>& products,
                          std::vector<Combination> vectors) {
  while (vectors.size() > 1) {
    std::vector<Combination> next;
    for (std::size_t i = 0; i + 1 < vectors.size(); i += 2)
      next.push_back(adasum_of_two(products, vectors[i], vectors[i + 1]));
    if (vectors.size() % 2 == 1) next.push_back(vectors.back());
    vectors = std::move(next);
  }
  return vectors.front();
}

std::size_t count_wrong_adasum(const Question& question, std::size_t tensor,
                               std::span<const std::byte> got) {
  const auto products =
      scalar_products(question, tensor, got.size() / hvd::element_bytes(question.dtype));
  const auto ranks = static_cast<std::size_t>(question.ranks);
  std::map<int, std::vector<Combination>> hosts;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    Combination own{std::vector<double>(ranks)};
    own.factors[rank] = 1;
    hosts[question.hosts.empty() ? 0 : question.hosts[rank]].push_back(std::move(own));
  }
  std::vector<Combination> results;
  for (const auto& [host, vectors] : hosts) results.push_back(adasum_of_all(products, vectors));
  const std::vector<double> factors = adasum_of_all(products, results).factors;
  // Between hosts intermediate results are rounded to the type; the scalar products are added up in
  // another order.
  const double allowed =
      2 * question.ranks * std::max(rounding(question.dtype), rounding(question.wire)) + 1e-11;
  constexpr double kLargestInput = 10;
  return count_wrong(question, got, allowed, allowed * kLargestInput, [&](std::size_t place) {
    double sum = 0;
    for (std::size_t rank = 0; rank < ranks; ++rank)
      sum += factors[rank] * input(question, static_cast<int>(rank), tensor, place);
    return sum;
  });
}

}  // namespace

void fill(const Question& question, int rank, std::size_t tensor, std::span<std::byte> to) {
  with_type(question.dtype, [&](auto format) {
    using Format = decltype(format);
    using T = typename Format::Stored;
    std::vector<T> tile(kPeriod);
    for (std::size_t place = 0; place < kPeriod; ++place)
      tile[place] =
          Format::store(static_cast<typename Format::Value>(input(question, rank, tensor, place)));
    for (std::size_t begin = 0; begin < to.size(); begin += kPeriod * sizeof(T))
      std::memcpy(to.data() + begin, tile.data(), std::min(kPeriod * sizeof(T), to.size() - begin));
  });
}

std::size_t count_wrong_reduced(const Question& question, std::size_t tensor,
                                std::span<const std::byte> got, std::size_t first) {
  if (question.op == hvd::ReduceOp::Adasum) return count_wrong_adasum(question, tensor, got);
  const double allowed = question.op == hvd::ReduceOp::Average
                             ? std::max(rounding(question.dtype), rounding(question.wire))
                             : 0;
  return count_wrong(question, got, allowed, 0, [&](std::size_t place) {
    return reduced(question, tensor, first * parts(question.dtype) + place);
  });
}

std::size_t count_wrong_copied(const Question& question, int rank, std::size_t tensor,
                               std::span<const std::byte> got, std::size_t first) {
  return count_wrong(question, got, 0, 0, [&](std::size_t place) {
    return input(question, rank, tensor, first * parts(question.dtype) + place);
  });
}

}  // namespace bench
