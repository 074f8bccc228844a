#pragma once
/// This is the arithmetic of who does what: pure functions of sizes and ranks, with the same result
/// on every rank that asks. Nothing fails.

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace hvd {

/// Elements [begin, end).
struct Range {
  std::size_t begin = 0, end = 0;
  [[nodiscard]] std::size_t size() const { return end - begin; }
};

/// Part `index` of `parts` about equal ones; each but the last ends at a multiple of 16 elements
/// from the beginning.
inline Range share(Range whole, std::size_t parts, std::size_t index) {
  constexpr std::size_t kUnit = 16;
  const std::size_t units = (whole.size() + kUnit - 1) / kUnit;
  const auto edge = [&](std::size_t i) {
    return whole.begin +
           std::min(whole.size(), units / parts * i * kUnit + units % parts * i / parts * kUnit);
  };
  return {edge(index), edge(index + 1)};
}

/// Several arrays laid end to end, without being copied.
class Flattened {
 public:
  explicit Flattened(std::span<const std::size_t> counts) {
    ends_.reserve(counts.size());
    for (const std::size_t count : counts) ends_.push_back(size() + count);
  }
  [[nodiscard]] std::size_t size() const { return ends_.empty() ? 0 : ends_.back(); }

  /// Calls `visit(array, first element in it, how many, elements of the range that came before)`
  /// for each run inside `range`.
  template <class Visit>
  void each(Range range, Visit&& visit) const {
    auto array = static_cast<std::size_t>(
        std::upper_bound(ends_.begin(), ends_.end(), range.begin) - ends_.begin());
    for (std::size_t at = range.begin; at < range.end; ++array) {
      const std::size_t begin = array == 0 ? 0 : ends_[array - 1];
      const std::size_t count = std::min(ends_[array], range.end) - at;
      if (count == 0) continue;
      visit(array, at - begin, count, at - range.begin);
      at += count;
    }
  }

 private:
  std::vector<std::size_t> ends_;
};

/// An Arrangement has the ranks of a process set by the domain they are in.
struct Arrangement {
  std::vector<std::vector<int>> domains;  ///< ascending; the domain with the lowest rank first
  std::size_t self_domain = 0;
  std::size_t self_place = 0;  ///< among the ranks of its domain

  [[nodiscard]] const std::vector<int>& here() const { return domains[self_domain]; }
  /// Returns whether this rank is the only one of its domain.
  [[nodiscard]] bool alone() const { return here().size() == 1; }
};

/// `ranks` ascending; `self` is one of them.
inline Arrangement arrange(std::span<const int> ranks, std::span<const int> domain_of_rank,
                           int self) {
  Arrangement result;
  std::vector<int> numbers;
  for (const int rank : ranks) {
    const int number = domain_of_rank[static_cast<std::size_t>(rank)];
    const auto found = static_cast<std::size_t>(std::find(numbers.begin(), numbers.end(), number) -
                                                numbers.begin());
    if (found == numbers.size()) {
      numbers.push_back(number);
      result.domains.emplace_back();
    }
    if (rank == self) {
      result.self_domain = found;
      result.self_place = result.domains[found].size();
    }
    result.domains[found].push_back(rank);
  }
  return result;
}

/// A TreePlace is a place in a binomial tree: who hands on to it, and to whom it hands on.
struct TreePlace {
  std::size_t parent = 0;  ///< its own place for the root
  std::vector<std::size_t> children;
};

/// Returns the place of `self` in the binomial tree over `size` places whose root is place `root`.
inline TreePlace tree_place(std::size_t size, std::size_t root, std::size_t self) {
  TreePlace result;
  const std::size_t turned = (self + size - root) % size;
  result.parent = ((turned & (turned - 1)) + root) % size;
  if (turned == 0) result.parent = root;
  for (std::size_t bit = 1; turned + bit < size && (turned == 0 || bit < (turned & -turned));
       bit <<= 1)
    result.children.push_back((turned + bit + root) % size);
  std::reverse(result.children.begin(), result.children.end());  // the largest subtree first
  return result;
}

/// Returns the place of `self` in the chain over `size` places that begins with place `root`.
inline TreePlace chain_place(std::size_t size, std::size_t root, std::size_t self) {
  TreePlace result;
  result.parent = self == root ? root : (self + size - 1) % size;
  if (const std::size_t next = (self + 1) % size; next != root) result.children.push_back(next);
  return result;
}

}  // namespace hvd
