// What happens to the gradients of one bucket on their way, without a reducer; between ranks only
// what is collective.
#include "torch_bindings/gradients/gradient_bucket.h"

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "tests/torch_bindings/support.h"

namespace gradient_bucket_test {
namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;
using hvd::GradientSlot;

GradientSlot slot_of(const at::Tensor& gradient) {
  GradientSlot slot({"p", torch::zeros({4}, at::TensorOptions(kFloat).requires_grad(true))});
  slot.gradient() = gradient;
  slot.set_mark();
  return slot;
}

/// Four slots, whose gradients are there.
struct Bucket {
  explicit Bucket(bool are_taken_together) {
    for (int i = 0; i < 4; ++i) slots.push_back(slot_of(data({4}, kFloat, i)));
    bucket.emplace("bucket", std::vector<GradientSlot*>{&slots[0], &slots[1], &slots[2], &slots[3]},
                   terms);
    hvd::BucketMemory::make_room({&bucket->memory}, are_taken_together, nullptr);
    for (std::size_t i = 0; i < 4; ++i) {
      bucket->memory.take_in(i, false);
      bucket->memory.pack(i);
      bucket->round.find(i, true);
      slots[i].set_mark();
    }
  }
  /// Its round has given what was sent; no rank had a gradient of the last.
  void reduce() {
    const auto pending = std::make_shared<hvd::HandleState>();
    pending->present_anywhere = {true, true, true, false};
    pending->done = true;
    bucket->round.submit(pending);
  }
  hvd::BucketMemory::Terms terms{};
  std::vector<GradientSlot> slots;
  std::optional<hvd::GradientBucket> bucket;
};

TEST_CASE(
    "gradient slot: what is a sum already is shared out once, unless a user has put another in its "
    "place") {
  const at::NoGradGuard no_gradient;
  const auto shared_out = [](int ranks, bool is_reduced, bool is_replaced) {
    GradientSlot slot = slot_of(torch::full({4}, 6.0F));
    slot.reduced = is_reduced;
    if (is_replaced) slot.gradient() = torch::full({4}, 6.0F);
    slot.share_out(ranks);
    CHECK(!slot.reduced);
    slot.share_out(ranks);
    return slot.gradient()[0].item<float>();
  };
  CHECK(shared_out(3, true, false) == 2);
  CHECK(shared_out(3, true, true) == 6);
  CHECK(shared_out(3, false, false) == 6);
  CHECK(shared_out(1, true, false) == 6);
}

TEST_CASE(
    "gradient slot: sparse gradients become dense, or are known to be sparse; others follow their "
    "parameter's type") {
  const at::NoGradGuard no_gradient;
  for (const bool as_dense : {true, false}) {
    GradientSlot slot = slot_of(data({4}, kFloat, 0).to_sparse(1));
    slot.follow_layout(as_dense);
    CHECK(slot.sparse_dims == (as_dense ? 0 : 1));
    CHECK(slot.gradient().is_sparse() == !as_dense);
  }
  GradientSlot slot = slot_of(torch::zeros({4}));
  CHECK(slot.is_zero());
  slot.named.parameter.set_data(torch::zeros({4}, kDouble));
  CHECK(!slot.kind.is_of(slot.named.parameter));
  slot.convert();
  CHECK((slot.gradient().scalar_type() == kDouble && !slot.is_replaced()));
  slot.named.parameter.set_data(torch::zeros({5}, kDouble));
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { slot.convert(); }),
                 "parameter 'p' is [5] now, and its gradient [4]"));
}

TEST_CASE(
    "gradient bucket: results become gradients, those that came late get their share, and what a "
    "user has changed stays") {
  const at::NoGradGuard no_gradient;
  Bucket made(false);
  auto& [name, slots, memory, round, streams] = *made.bucket;
  made.reduce();
  for (const std::size_t i : {0, 1, 2, 3}) memory.result(i).fill_(8);
  slots[0]->gradient().reset();
  slots[1]->gradient() = torch::full({4}, 1.0F);
  round.come_late(1, true);
  slots[2]->gradient() = torch::full({4}, 2.0F);
  round.keep(2, true);
  slots[3]->gradient() = torch::full({4}, 3.0F);
  made.bucket->give_back(0.5);
  const std::array values{8.0F, 5.0F, 2.0F, 3.0F};
  for (std::size_t i = 0; i < values.size(); ++i)
    CHECK(made.slots[i].gradient().equal(torch::full({4}, values[i])));
  CHECK(memory.has_gradient(0));
}

TEST_CASE(
    "gradient bucket: what the backend was to copy is put back where the round has failed, and its "
    "mark with it") {
  const at::NoGradGuard no_gradient;
  Bucket made(true);
  const void* const before = made.slots[0].gradient().const_data_ptr();
  made.bucket->round.find(3, false);
  made.bucket->take_in_together(false);
  CHECK((made.bucket->memory.has_gradient(0) && !made.bucket->memory.has_gradient(3) &&
         !made.slots[0].is_replaced()));
  CHECK(made.slots[0].gradient().const_data_ptr() != before);
  made.bucket->put_given_back();
  CHECK(made.slots[0].gradient().const_data_ptr() == before);
  CHECK(made.slots[0].since_mark() == hvd::detail::GradientMark::Since::Same);
}

TEST_CASE("gradient bucket: gradients are weighed once, and what was sent in vain is as it was") {
  const at::NoGradGuard no_gradient;
  hvd::GradientWeights weights{hvd::ProcessSet{}};
  weights.set(hvd::rank() + 1);
  weights.ask("gradient bucket/weights", false);
  CHECK(weights.learn());
  const double factor = (hvd::rank() + 1) * 2.0 / (hvd::size() + 1);
  CHECK(weights.factor() == doctest::Approx(factor));
  Bucket made(false);
  made.bucket->round.find(1, false);
  for (int times = 0; times < 2; ++times) made.bucket->weigh(weights);
  CHECK(torch::allclose(made.slots[0].gradient(), data({4}, kFloat, 0) * factor));
  CHECK(same(made.slots[1].gradient(), data({4}, kFloat, 1)));
  CHECK(made.slots[0].since_mark() == hvd::detail::GradientMark::Since::Same);
  made.bucket->put_back_weighed(weights.factor());
  CHECK(torch::allclose(made.slots[0].gradient(), data({4}, kFloat, 0)));
  made.bucket->weigh(weights);
  made.reduce();
  made.bucket->put_back_weighed(weights.factor());  // not in vain
  CHECK(torch::allclose(made.slots[0].gradient(), data({4}, kFloat, 0) * factor));
}

TEST_CASE(
    "gradient bucket: all ranks know of a sparse gradient that one of them has, and that they do") {
  const at::NoGradGuard no_gradient;
  Bucket made(false);
  made.slots[2].sparse_dims = last() ? 2 : 0;
  CHECK(made.bucket->learn_sparse({}) == (hvd::size() > 1));
  CHECK(made.slots[2].sparse_dims == 2);
  CHECK(made.slots[1].sparse_dims == 0);
  CHECK(!made.bucket->learn_sparse({}));
}

}  // namespace
}  // namespace gradient_bucket_test
