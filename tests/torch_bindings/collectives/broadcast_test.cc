// Broadcast of tensors.
#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;

TEST_CASE("broadcast: every type from every root") {
  for (int root = 0; root < hvd::size(); ++root) {
    for (const auto type : kTypes) {
      CAPTURE(std::string(at::toString(type)));
      const at::Tensor expected = data({2, 3}, type, root);
      const at::Tensor given = data({2, 3}, type, hvd::rank());
      CHECK(same(hvd::broadcast(given, {.root_rank = root}), expected));
      CHECK(same(given, data({2, 3}, type, hvd::rank())));
      CHECK(same(hvd::broadcast_async(given, {.root_rank = root}).wait(), expected));
      CHECK(hvd::broadcast_(given, {.root_rank = root}).is_same(given));
      CHECK(same(given, expected));
      const at::Tensor again = data({2, 3}, type, hvd::rank(), 1);
      CHECK(hvd::broadcast_async_(again, {.root_rank = root}).wait().is_same(again));
      CHECK(same(again, data({2, 3}, type, root, 1)));
    }
  }
}

}  // namespace
