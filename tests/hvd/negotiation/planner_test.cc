/// The planner: which agreed tensors travel together.
#include <doctest/doctest.h>

#include <deque>
#include <vector>

#include "hvd/negotiation/table/planner.h"
#include "tests/support/signatures.h"

namespace hvd::test {
namespace {

AgreedUnit unit(std::uint32_t id, std::int64_t elements, DataType dtype = DataType::Float32) {
  return {id,
          0,
          shared(signature_of(dtype, {elements})),
          {true},
          {elements * static_cast<std::int64_t>(element_bytes(dtype))}};
}

std::vector<std::uint32_t> ids(const PlannedBatch& batch) {
  std::vector<std::uint32_t> result;
  for (const auto& tensor : batch.tensors) result.push_back(tensor.unit);
  return result;
}

}  // namespace

TEST_CASE("the planner fuses what can travel together, in order, up to the threshold") {
  std::deque<AgreedUnit> queue{unit(1, 100), unit(2, 100, DataType::Int32), unit(3, 100),
                               unit(4, 1000), unit(5, 1)};
  auto batches = cut(queue, 1200);
  // 400 + 400 + 400 bytes; the fourth is too large, and nothing overtakes it
  REQUIRE(batches.size() == 2);
  CHECK(ids(batches[0]) == std::vector<std::uint32_t>{1, 3});
  CHECK(ids(batches[1]) == std::vector<std::uint32_t>{2});
  batches = cut(queue, 1200);
  CHECK(ids(batches.at(0)) == std::vector<std::uint32_t>{4});  // larger than the threshold: alone
  CHECK(ids(cut(queue, 1200).at(0)) == std::vector<std::uint32_t>{5});
  CHECK(cut(queue, 1200).empty());

  queue = {unit(1, 10), unit(2, 10)};
  CHECK(ids(cut(queue, 0).at(0)) == std::vector<std::uint32_t>{1});  // no fusion
  CHECK(queue.size() == 1);
  queue = {unit(1, 0), unit(2, 0)};
  CHECK(ids(cut(queue, 0).at(0)) == std::vector<std::uint32_t>{1});  // nor of nothing
  CHECK(ids(cut(queue, 0).at(0)) == std::vector<std::uint32_t>{2});

  // Other scales do not travel together, but what fits further back does.
  queue = {unit(1, 10), unit(2, 10), unit(3, 10)};
  Signature scaled = *queue[1].signature;
  scaled.postscale_factor = 2;
  queue[1].signature = shared(scaled);
  CHECK(ids(cut(queue, 1 << 20).at(0)) == std::vector<std::uint32_t>{1, 3});
  CHECK(ids(cut(queue, 1 << 20).at(0)) == std::vector<std::uint32_t>{2});
}

TEST_CASE("the planner keeps groups apart where it is asked to") {
  AgreedUnit group = unit(2, 10);
  Signature two = *group.signature;
  two.tensors.push_back(two.tensors.front());
  group = {2, 0, shared(two), {true, true}, {40, 40}, {}};
  std::deque<AgreedUnit> queue{unit(1, 10), group, unit(3, 10)};
  CHECK(ids(cut(queue, 1 << 20, true).at(0)) == std::vector<std::uint32_t>{1, 3});
  CHECK(ids(cut(queue, 1 << 20, true).at(0)) == std::vector<std::uint32_t>{2, 2});
  queue = {group, unit(3, 10)};
  CHECK(ids(cut(queue, 1 << 20, true).at(0)) == std::vector<std::uint32_t>{2, 2});
  queue = {group, unit(3, 10)};
  CHECK(ids(cut(queue, 1 << 20, false).at(0)) == std::vector<std::uint32_t>{2, 2, 3});
}

}  // namespace hvd::test
