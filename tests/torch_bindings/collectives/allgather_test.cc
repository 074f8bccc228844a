// Allgather of tensors.
#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kFloat, at::kLong;
using Tensors = std::vector<at::Tensor>;

TEST_CASE("allgather: every type, rows that differ by rank, none at all, groups") {
  for (const auto type : kTypes) {
    CAPTURE(std::string(at::toString(type)));
    Tensors parts;
    // rank 0 has no rows
    for (int r = 0; r < hvd::size(); ++r) parts.push_back(data({r, 2}, type, r));
    CHECK(same(hvd::allgather(parts[static_cast<std::size_t>(hvd::rank())]), torch::cat(parts)));
    CHECK(same(hvd::allgather_async(parts[static_cast<std::size_t>(hvd::rank())]).wait(),
               torch::cat(parts)));
  }
  CHECK(same(hvd::allgather(torch::empty({0, 4})), torch::empty({0, 4})));
  CHECK(same(hvd::allgather(torch::empty({2, 0})), torch::empty({2 * hvd::size(), 0})));
  const auto mine = [](int r) {
    return Tensors{data({2, 3}, kFloat, r), data({4 - r % 3}, kLong, r, 1)};
  };
  const Tensors group = hvd::grouped_allgather(mine(hvd::rank()));
  const Tensors later = hvd::grouped_allgather_async(mine(hvd::rank())).wait();
  for (std::size_t i = 0; i < 2; ++i) {
    Tensors parts;
    for (int r = 0; r < hvd::size(); ++r) parts.push_back(mine(r)[i]);
    CHECK(same(group[i], torch::cat(parts)));
    CHECK(same(later[i], torch::cat(parts)));
  }
  CHECK_THROWS_AS(hvd::allgather(torch::tensor(1.0)), hvd::InvalidArgument);
}

}  // namespace
