#include "tests/support/oracle/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <limits>
#include <mutex>
#include <numeric>
#include <type_traits>

#include "tests/support/oracle/oracle_numbers.h"

namespace hvd::oracle {

namespace {

__extension__ using Wide = __int128;

/// An integer times a factor: in double, truncated toward zero, the nearest there is where the type
/// has no such value.
template <class T>
T scaled_whole(T value, double factor) {
  if (factor == 1) return value;
  using Limits = std::numeric_limits<T>;
  const double product = static_cast<double>(value) * factor;
  if (product <= static_cast<double>(Limits::min())) return Limits::min();
  return product >= static_cast<double>(Limits::max()) ? Limits::max() : static_cast<T>(product);
}

template <class N>
typename N::Stored fold_whole(const Reduction& what, const std::vector<Block>& inputs,
                              std::size_t i) {
  using T = typename N::Stored;
  using Unsigned = std::make_unsigned_t<T>;
  Wide sum = 0;
  T extreme = 0;
  std::uint64_t product = 1, all = ~std::uint64_t{0}, any = 0, odd = 0;
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    const T value = scaled_whole(N::get(inputs[r].data(), i), what.prescale);
    sum += value;
    const auto bits = static_cast<std::uint64_t>(value);
    product *= bits;
    all &= bits;
    any |= bits;
    odd ^= bits;
    const bool better = what.op == ReduceOp::Min ? value < extreme : value > extreme;
    if (r == 0 || better) extreme = value;
  }
  T result = extreme;
  if (what.op == ReduceOp::Average) result = static_cast<T>(sum / static_cast<Wide>(inputs.size()));
  if (what.op == ReduceOp::Sum) result = static_cast<T>(static_cast<Unsigned>(sum));  // wraps
  if (what.op == ReduceOp::Product) result = static_cast<T>(static_cast<Unsigned>(product));
  if (what.op == ReduceOp::BitAnd) result = static_cast<T>(static_cast<Unsigned>(all));
  if (what.op == ReduceOp::BitOr) result = static_cast<T>(static_cast<Unsigned>(any));
  if (what.op == ReduceOp::BitXor) result = static_cast<T>(static_cast<Unsigned>(odd));
  return scaled_whole(result, what.postscale);
}

struct Fold {
  double magnitude = 0;  ///< of what was added up, scaled as the result
};

template <class N>
typename N::Value fold_real(const Reduction& what, const std::vector<Block>& inputs, std::size_t i,
                            Fold& fold) {
  using T = typename N::Value;
  const auto pre = static_cast<T>(what.prescale);
  T result = 0;
  double magnitude = 0;
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    const T value = what.prescale == 1 ? N::get(inputs[r].data(), i)
                                       : static_cast<T>(N::get(inputs[r].data(), i) * pre);
    magnitude += std::fabs(static_cast<double>(value));
    if (r == 0) {
      result = value;
    } else if (what.op == ReduceOp::Min) {
      result = std::min(result, value);
    } else if (what.op == ReduceOp::Max) {
      result = std::max(result, value);
    } else if (what.op == ReduceOp::Product) {
      result *= value;
    } else {
      result += value;
    }
  }
  if (what.op == ReduceOp::Product) magnitude = std::fabs(static_cast<double>(result));
  if (what.op == ReduceOp::Average) {
    const std::size_t divisor = what.divisor == 0 ? inputs.size() : what.divisor;
    result /= static_cast<T>(divisor);
    magnitude /= static_cast<double>(divisor);
  }
  if (what.postscale != 1) result *= static_cast<T>(what.postscale);
  fold.magnitude = magnitude * std::fabs(what.postscale);
  return result;
}

bool fold_truth(ReduceOp op, const std::vector<Block>& inputs, std::size_t i) {
  const auto holds = [&](const Block& input) { return Truth::get(input.data(), i); };
  const auto true_ones = std::count_if(inputs.begin(), inputs.end(), holds);
  if (op == ReduceOp::BitXor) return true_ones % 2 == 1;
  const bool wants_all = op == ReduceOp::Min || op == ReduceOp::BitAnd;
  return wants_all ? true_ones == static_cast<std::ptrdiff_t>(inputs.size()) : true_ones > 0;
}

using Vector = std::vector<long double>;

long double dot(const Vector& a, const Vector& b) {
  long double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// A vector, and how many ranks it stands for.
struct Weighted {
  Vector of;
  long double ranks;
};

/// Maleki et al., MLSys 2021: what two vectors have in common counts once.
Weighted pair_of(const Weighted& a, const Weighted& b) {
  const long double common = dot(a.of, b.of);
  const long double aa = dot(a.of, a.of), bb = dot(b.of, b.of), both = a.ranks + b.ranks;
  const long double of_a = aa == 0 ? 1 : 1 - a.ranks / both * common / aa;
  const long double of_b = bb == 0 ? 1 : 1 - b.ranks / both * common / bb;
  Weighted sum{Vector(a.of.size()), both};
  for (std::size_t i = 0; i < a.of.size(); ++i) sum.of[i] = of_a * a.of[i] + of_b * b.of[i];
  return sum;
}

std::vector<std::size_t> all_places(std::size_t size) {
  std::vector<std::size_t> places(size);
  std::iota(places.begin(), places.end(), std::size_t{0});
  return places;
}

/// In pairs of neighbours, the last of an odd number as it is, and what they have become again.
/// `cancels`: two of them nearly do, compared with `most`, the largest square of an input.
Weighted combined(std::vector<Weighted> vectors, long double most, bool& cancels) {
  while (vectors.size() > 1) {
    for (std::size_t i = 0; i < vectors.size() / 2 * 2; ++i) {
      const long double square = dot(vectors[i].of, vectors[i].of);
      cancels = cancels || (square > 0 && square < 1e-4L * most);
    }
    std::vector<Weighted> next;
    for (std::size_t i = 0; i + 1 < vectors.size(); i += 2)
      next.push_back(pair_of(vectors[i], vectors[i + 1]));
    if (vectors.size() % 2 == 1) next.push_back(vectors.back());
    vectors = std::move(next);
  }
  return vectors.front();
}

template <class N>
Expected adasum(const Reduction& what, const std::vector<Block>& inputs, std::size_t count,
                const Domains& domains) {
  std::vector<Vector> vectors;
  double largest = 0;
  for (const Block& input : inputs) {
    Vector& vector = vectors.emplace_back(count);
    for (std::size_t i = 0; i < count; ++i) {
      vector[i] = N::get(input.data(), i) * static_cast<long double>(what.prescale);
      largest = std::max(largest, std::fabs(static_cast<double>(vector[i])));
    }
  }
  bool cancels = false;
  long double most = 0;
  for (const Vector& vector : vectors) most = std::max(most, dot(vector, vector));
  std::vector<Weighted> of_domains;
  for (const auto& places : domains) {
    std::vector<Weighted> own;
    for (const std::size_t place : places) own.push_back({vectors[place], 1});
    of_domains.push_back(combined(std::move(own), most, cancels));
  }
  const Vector result = combined(std::move(of_domains), most, cancels).of;
  Expected expected{what.dtype, Block(count * sizeof(typename N::Stored)),
                    std::vector<double>(count), cancels};
  for (std::size_t i = 0; i < count; ++i) {
    const auto value = static_cast<double>(result[i]) * what.postscale;
    N::put(expected.bytes, i, static_cast<typename N::Value>(value));
    // Between hosts what two have become is rounded to the type before it goes on.
    const double roundings = 2 * static_cast<double>(inputs.size());
    expected.bound[i] = 2 * N::kEpsilon * std::fabs(value) +
                        (roundings * N::kEpsilon + 1e-11) * largest * std::fabs(what.postscale);
  }
  return expected;
}

}  // namespace

Expected reduced(const Reduction& what, const std::vector<Block>& inputs, bool any_order) {
  const std::size_t count = inputs.front().size() / type_bytes(what.dtype);
  Expected expected{what.dtype, Block(inputs.front().size()), {}, false};
  with_number(what.dtype, [&]<class N>(N) {
    if constexpr (N::kKind == Kind::Real) {
      if (what.op == ReduceOp::Adasum) {
        expected = adasum<N>(what, inputs, count, {all_places(inputs.size())});
        return;
      }
    }
    const double roundings = static_cast<double>(inputs.size()) + 3;
    for (std::size_t i = 0; i < count * N::kParts; ++i) {
      if constexpr (N::kKind == Kind::Truth) {
        N::put(expected.bytes, i, fold_truth(what.op, inputs, i));
      } else if constexpr (N::kKind == Kind::Whole) {
        N::put(expected.bytes, i, fold_whole<N>(what, inputs, i));
      } else {
        Fold fold;
        N::put(expected.bytes, i, fold_real<N>(what, inputs, i, fold));
        if (any_order)
          expected.bound.push_back(roundings * (N::kEpsilon * fold.magnitude + N::kLeast));
      }
    }
  });
  return expected;
}

Expected reduced_by_domains(const Reduction& what, const std::vector<Block>& inputs,
                            const Domains& domains) {
  std::size_t most_ranks = 0;
  for (const auto& places : domains) most_ranks = std::max(most_ranks, places.size());
  const bool averages = what.op == ReduceOp::Average;
  if (domains.size() == 1 || most_ranks == 1 || (averages && is_whole(what.dtype)))
    return reduced(what, inputs, false);
  if (what.op == ReduceOp::Adasum) {
    Expected expected;
    with_number(what.dtype, [&]<class N>(N) {
      if constexpr (N::kKind == Kind::Real)
        expected = adasum<N>(what, inputs, inputs.front().size() / type_bytes(what.dtype), domains);
    });
    return expected;
  }
  // What a domain has summed in halves overflows nowhere: it travels divided, and is scaled then.
  const bool is_scaled_late =
      what.dtype == DataType::Float16 && (averages || what.op == ReduceOp::Sum);
  double shrinks = 1;
  while (is_scaled_late && shrinks < static_cast<double>(most_ranks)) shrinks *= 2;
  std::vector<Block> contributions;
  std::vector<bool> counted(inputs.size());
  for (const auto& places : domains) {
    std::vector<Block> own;
    for (const std::size_t place : places) {
      own.push_back(inputs[place]);
      counted[place] = true;
    }
    contributions.push_back(reduced({what.dtype, averages ? ReduceOp::Sum : what.op,
                                     is_scaled_late ? 1 : what.prescale, 1 / shrinks},
                                    own, false)
                                .bytes);
  }
  for (std::size_t place = 0; place < inputs.size(); ++place)
    if (!counted[place]) contributions.push_back(inputs[place]);
  return reduced({what.dtype, what.op, is_scaled_late ? shrinks * what.prescale : 1, what.postscale,
                  inputs.size()},
                 contributions, false);
}

namespace {

template <class T>
std::string digits(T value) {
  if constexpr (std::is_integral_v<T>) return std::to_string(value);
  char text[40];
  std::snprintf(text, sizeof text, "%.17g", static_cast<double>(value));
  return text;
}

}  // namespace

std::shared_ptr<const Worked> worked_out(const std::string& key,
                                         const std::function<Worked()>& work) {
  static std::mutex mutex;
  static std::deque<std::pair<std::string, std::shared_ptr<const Worked>>> known;
  constexpr std::size_t kKept = 64;  // more than one case asks for
  const std::lock_guard lock(mutex);
  for (const auto& [other, worked] : known)
    if (other == key) return worked;
  known.emplace_front(key, std::make_shared<const Worked>(work()));
  if (known.size() > kKept) known.pop_back();
  return known.front().second;
}

std::string difference(const Expected& expected, const std::byte* got) {
  if (expected.bytes.empty() || std::memcmp(expected.bytes.data(), got, expected.bytes.size()) == 0)
    return "";
  std::string text;
  with_number(expected.dtype, [&]<class N>(N) {
    const std::size_t numbers = expected.bytes.size() / sizeof(typename N::Stored);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < numbers; ++i) {
      if (N::raw(expected.bytes.data(), i) == N::raw(got, i)) continue;
      const auto want = N::get(expected.bytes.data(), i);
      const auto have = N::get(got, i);
      if constexpr (N::kKind == Kind::Real) {
        if (want == have || (std::isnan(want) && std::isnan(have))) continue;
        const double off = std::fabs(static_cast<double>(want) - static_cast<double>(have));
        if (!expected.bound.empty() && off <= expected.bound[i]) continue;
      }
      if (wrong++ != 0) continue;
      text = "element " + std::to_string(i / N::kParts) + " of " +
             std::to_string(numbers / N::kParts) + " is " + digits(have) + ", not " + digits(want);
    }
    if (wrong > 1) text += " (" + std::to_string(wrong) + " are wrong)";
  });
  return text;
}

std::string difference(DataType dtype, const Block& expected, const std::byte* got) {
  if (expected.empty() || std::memcmp(expected.data(), got, expected.size()) == 0) return "";
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (expected[i] != got[i])
      return "element " + std::to_string(i / type_bytes(dtype)) + " has other bytes than were sent";
  return "";
}

}  // namespace hvd::oracle
