/// Shares, flattened arrays, arrangements and trees: pure arithmetic.

#include "ops/partition.h"

#include <doctest/doctest.h>

#include <numeric>

namespace hvd::test {

TEST_CASE("shares cover the whole without gaps, about equally, at multiples of 16") {
  for (const std::size_t size : {0UL, 1UL, 15UL, 16UL, 17UL, 1000UL, 65537UL, (1UL << 40U) + 3})
    for (const std::size_t parts : {1UL, 2UL, 3UL, 7UL, 64UL}) {
      std::size_t at = 100;
      for (std::size_t i = 0; i < parts; ++i) {
        const Range range = share({100, 100 + size}, parts, i);
        CHECK(range.begin == at);
        CHECK(range.size() <= ((size + 15) / 16 + parts - 1) / parts * 16);
        if (range.end != 100 + size) CHECK((range.end - 100) % 16 == 0);
        at = range.end;
      }
      CHECK(at == 100 + size);
    }
}

TEST_CASE("a range of flattened arrays is visited once, in order, without empty arrays") {
  const std::vector<std::size_t> counts{0, 3, 0, 0, 5, 1, 0};
  const Flattened flat(counts);
  REQUIRE(flat.size() == 9);
  for (std::size_t begin = 0; begin <= 9; ++begin)
    for (std::size_t end = begin; end <= 9; ++end) {
      std::size_t seen = 0;
      flat.each({begin, end}, [&](std::size_t array, std::size_t first, std::size_t count,
                                  std::size_t before) {
        CHECK(count > 0);
        CHECK(before == seen);
        CHECK(first + count <= counts[array]);
        CHECK(std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(array),
                              std::size_t{0}) +
                  first ==
              begin + seen);
        seen += count;
      });
      CHECK(seen == end - begin);
    }
  CHECK(Flattened(std::vector<std::size_t>{}).size() == 0);
}

TEST_CASE("ranks are arranged by domain, the domain of the lowest rank first") {
  const std::vector<int> domain_of{1, 0, 1, 2, 0};
  const std::vector<int> ranks{0, 1, 2, 4};
  const Arrangement who = arrange(ranks, domain_of, 2);
  CHECK(who.domains == std::vector<std::vector<int>>{{0, 2}, {1, 4}});
  CHECK(who.self_domain == 0);
  CHECK(who.self_place == 1);
  CHECK(!who.alone());
  CHECK(arrange(std::vector<int>{1, 3}, domain_of, 3).alone());
}

TEST_CASE("a tree reaches every place once, from any root, in as few steps as there are bits") {
  for (std::size_t size = 1; size <= 40; ++size)
    for (std::size_t root = 0; root < size; ++root) {
      std::vector<std::size_t> reached(size, 0);
      for (std::size_t self = 0; self < size; ++self) {
        for (const std::size_t child : tree_place(size, root, self).children) {
          CHECK(tree_place(size, root, child).parent == self);
          ++reached[child];
        }
        std::size_t depth = 0;
        for (std::size_t at = self; at != root; at = tree_place(size, root, at).parent)
          REQUIRE(++depth <= 6);
      }
      CHECK(reached[root] == 0);
      for (std::size_t place = 0; place < size; ++place)
        if (place != root) CHECK(reached[place] == 1);
    }
}

TEST_CASE("a chain reaches every place once, from any root, one after the other") {
  for (std::size_t size = 1; size <= 9; ++size)
    for (std::size_t root = 0; root < size; ++root) {
      std::size_t at = root;
      for (std::size_t step = 1; step < size; ++step) {
        const auto children = chain_place(size, root, at).children;
        REQUIRE(children.size() == 1);
        CHECK(chain_place(size, root, children.front()).parent == at);
        at = children.front();
        CHECK(at == (root + step) % size);
      }
      CHECK(chain_place(size, root, at).children.empty());
      CHECK(chain_place(size, root, root).parent == root);
    }
}

}  // namespace hvd::test
