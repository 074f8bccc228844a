// send and recv of tensors: layouts, types, what is refused, and what autograd is told.
#include "tests/torch_bindings/support.h"

namespace peers_test {
namespace {

using namespace hvd::test;

int next() { return (hvd::rank() + 1) % hvd::size(); }
int before() { return (hvd::rank() + hvd::size() - 1) % hvd::size(); }

TEST_CASE("tensors of every layout go round") {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kLong, at::kBool, at::kComplexFloat}) {
    const auto of = [&](int rank) {
      return (torch::arange(60) * (rank + 1)).to(type).reshape({3, 4, 5});
    };
    const at::Tensor sources[] = {of(hvd::rank()),
                                  of(hvd::rank()).transpose(0, 2).contiguous().transpose(0, 2)};
    for (const at::Tensor& source : sources) {
      at::Tensor plain = torch::zeros({3, 4, 5}, type);
      at::Tensor strided = torch::zeros({5, 4, 3}, type).transpose(0, 2);
      for (at::Tensor target : {plain, strided}) {
        const auto sent = hvd::send_async(source, {.peer = next(), .tag = 3});
        CHECK(hvd::recv(target, {.peer = before(), .tag = 3}) == before());
        sent.wait();
        CHECK(torch::equal(target, of(before())));
        target.zero_();
        const auto received = hvd::recv_async(target);  // from any
        hvd::send(source, {.peer = next()});
        CHECK(received.wait() == before());
        CHECK(received.wait() == before());
        CHECK(torch::equal(target, of(before())));
        hvd::barrier();
      }
    }
  }
}

TEST_CASE("0-dimensional and empty tensors, and another shape with as many elements") {
  at::Tensor number = torch::zeros({}), none = torch::zeros({0, 3}), flat = torch::zeros({6});
  const auto sent = hvd::send_async(torch::tensor(static_cast<float>(hvd::rank() + 5)),
                                    {.peer = next(), .tag = 1});
  hvd::recv(number, {.peer = before(), .tag = 1});
  CHECK(number.item<float>() == static_cast<float>(before() + 5));
  const auto sent_none = hvd::send_async(torch::zeros({3, 0}), {.peer = next(), .tag = 1});
  hvd::recv(none, {.peer = before(), .tag = 1});
  const auto sent_flat =
      hvd::send_async(torch::full({2, 3}, hvd::rank()).to(at::kFloat), {.peer = next(), .tag = 1});
  hvd::recv(flat, {.peer = before(), .tag = 1});
  CHECK(torch::equal(flat, torch::full({6}, before()).to(at::kFloat)));
  sent.wait();
  sent_none.wait();
  sent_flat.wait();
}

TEST_CASE("a handle may go before its send is done, and the tensor with it") {
  at::Tensor target = torch::zeros({100'000});
  {
    const auto dropped = hvd::send_async(torch::full({100'000}, hvd::rank() + 1).to(at::kFloat),
                                         {.peer = next(), .tag = 2});
  }
  hvd::barrier();
  hvd::recv(target, {.peer = before(), .tag = 2});
  CHECK(torch::equal(target, torch::full({100'000}, before() + 1).to(at::kFloat)));
}

TEST_CASE("what is refused says so, and a recv counts as a change") {
  CHECK_THROWS_AS(hvd::send(at::Tensor(), {.peer = 0}), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::send(torch::zeros({2}), {}), hvd::InvalidArgument);
  CHECK_THROWS_AS(hvd::recv(torch::zeros({1}).expand({4}), {.peer = 0}), hvd::InvalidArgument);
  at::Tensor target = torch::zeros({4});
  const auto version = target._version();
  const auto sent = hvd::send_async(torch::ones({4}), {.peer = hvd::rank()});
  hvd::recv(target, {.peer = hvd::rank()});
  sent.wait();
  CHECK(target._version() > version);
  CHECK(torch::equal(target, torch::ones({4})));
  const auto other = hvd::send_async(torch::ones({4}).to(at::kDouble), {.peer = next()});
  CHECK_THROWS_AS(hvd::recv(target, {.peer = before()}), hvd::Mismatch);
  other.wait();
}

}  // namespace
}  // namespace peers_test
