// The memory of one bucket: what lies where in it, and how gradients get there and back. Nothing is
// reduced.
#include "torch_bindings/gradients/bucket_memory.h"

#include <deque>

#include "tests/torch_bindings/support.h"

namespace bucket_memory_test {
namespace {

using namespace hvd::test;
using at::kFloat;
using hvd::BucketMemory;
using hvd::Compression;
using hvd::DataType;

constexpr std::size_t kAlignment = 64;

std::deque<hvd::NamedParameter> parameters_of(const std::vector<std::vector<std::int64_t>>& sizes) {
  std::deque<hvd::NamedParameter> all;
  for (const auto& each : sizes)
    all.push_back({"p" + std::to_string(all.size()), data(each, kFloat, 0).requires_grad_()});
  return all;
}

std::vector<const hvd::NamedParameter*> members_of(
    const std::deque<hvd::NamedParameter>& parameters) {
  std::vector<const hvd::NamedParameter*> members;
  for (const auto& each : parameters) members.push_back(&each);
  return members;
}

at::Tensor& gradient_of(const hvd::NamedParameter& of) { return of.parameter.mutable_grad(); }

std::size_t distance(const at::Tensor& from, const at::Tensor& to) {
  return static_cast<std::size_t>(static_cast<const std::byte*>(to.const_data_ptr()) -
                                  static_cast<const std::byte*>(from.const_data_ptr()));
}

TEST_CASE(
    "bucket memory: buckets share a block, members lie at multiples of the alignment, in the "
    "layout of their parameters") {
  const at::NoGradGuard no_gradient;
  auto first = parameters_of({{3}, {0}, {4, 5}}), second = parameters_of({{17}, {1}});
  first[2].parameter = data({5, 4}, kFloat, 0).t().requires_grad_();
  for (const auto& compression : {Compression::none(), Compression::bf16()}) {
    const BucketMemory::Terms terms{.compression = compression};
    BucketMemory one(members_of(first), terms), other(members_of(second), terms);
    CHECK(!one.has_room());
    BucketMemory::make_room({&one, &other}, false, nullptr);
    CHECK((one.has_room() && other.has_room() && !one.is_taken_together()));
    const bool travels_as_it_is = compression == Compression::none();
    const std::size_t longer = travels_as_it_is ? 2 * kAlignment : kAlignment;  // 80 bytes, or 40
    CHECK(distance(one.result(0), one.result(2)) == kAlignment);
    CHECK(distance(one.result(2), other.result(0)) == longer);
    CHECK(distance(other.result(0), other.result(1)) == longer);
    CHECK(one.result(2).strides() == first[2].parameter.strides());
    CHECK((one.result(2).scalar_type() == (travels_as_it_is ? kFloat : at::kBFloat16)));
    CHECK(one.is_home(2) == travels_as_it_is);
  }
}

TEST_CASE(
    "bucket memory: a gradient lives in it, another type travels as a copy, and without views it "
    "is the result that is copied") {
  const at::NoGradGuard no_gradient;
  struct Case {
    Compression compression;
    bool are_views, lives_there;
  };
  for (const auto& [compression, are_views, lives_there] :
       {Case{Compression::none(), true, true}, Case{Compression::none(), false, false},
        Case{Compression::fp16(), true, false}}) {
    const auto parameters = parameters_of({{2, 3}});
    const BucketMemory::Terms terms{.compression = compression, .are_views = are_views};
    BucketMemory memory(members_of(parameters), terms);
    BucketMemory::make_room({&memory}, false, nullptr);
    at::Tensor& gradient = gradient_of(parameters[0]);
    const at::Tensor given = data({2, 3}, kFloat, 1), twice = given * 2;
    gradient = given.clone();
    memory.take_in(0, false);
    memory.pack(0);
    CHECK(memory.has_gradient(0) == lives_there);
    CHECK(memory.sends_gradient(0) == lives_there);
    CHECK(same(gradient, given));
    CHECK(memory.sent(0).to(kFloat).equal(given));

    std::vector<std::shared_ptr<void>> kept;
    const hvd::TensorArgument argument = memory.argument(0, kept);
    CHECK(argument.name == "p0");
    CHECK((argument.input == memory.sent(0).const_data_ptr() &&
           argument.output == memory.result(0).const_data_ptr()));
    CHECK(argument.padded);
    CHECK(kept.size() == 1);

    memory.result(0).mul_(2);  // two ranks have reduced it
    memory.note_result(0);
    memory.give_back({0});
    CHECK(same(gradient, twice));
    gradient.reset();
    memory.give_back({0});  // of a rank that has none
    CHECK(same(gradient, twice));
    CHECK(memory.has_gradient(0) == lives_there);
  }
}

TEST_CASE("bucket memory: zeros are written once, as long as nothing else is") {
  const at::NoGradGuard no_gradient;
  const auto parameters = parameters_of({{4}});
  const BucketMemory::Terms terms{};
  BucketMemory memory(members_of(parameters), terms);
  BucketMemory::make_room({&memory}, false, nullptr);
  // past LibTorch, as a reduction does
  auto* const written = static_cast<float*>(memory.result(0).data_ptr());
  const auto is_zero_after = [&](const auto& change) {
    memory.note_result(0);
    memory.fill_with_zeros(0);
    CHECK(written[0] == 0);
    written[0] = 1;
    change();
    memory.fill_with_zeros(0);
    return written[0] == 0;
  };
  CHECK(!is_zero_after([] {}));
  CHECK(is_zero_after([&] { memory.note_result(0); }));
  CHECK(is_zero_after([&] { memory.result(0).add_(1); }));
}

TEST_CASE(
    "bucket memory: gradients taken together are copied by the backend, and come back where that "
    "has failed") {
  const at::NoGradGuard no_gradient;
  for (const bool is_alone : {false, true}) {
    const auto parameters = parameters_of({{4}, {4}, {4}});
    const BucketMemory::Terms terms{.is_alone = is_alone};
    BucketMemory memory(members_of(parameters), terms);
    BucketMemory::make_room({&memory}, true, nullptr);
    CHECK(memory.is_taken_together());
    std::vector<const void*> made;
    for (std::size_t i = 0; i < 3; ++i) {
      at::Tensor& gradient = gradient_of(parameters[i]) = data({4}, kFloat, static_cast<int>(i));
      made.push_back(gradient.const_data_ptr());
      memory.take_in(i, true);
      memory.pack(i);
      CHECK(!memory.has_gradient(i));
    }
    gradient_of(parameters[2]).reset();  // thrown away before its bucket is complete
    memory.take_in_together({0, 1, 2}, false, false);
    for (const std::size_t i : {0, 1}) {
      CHECK(memory.has_gradient(i));
      CHECK((memory.sent(i).const_data_ptr() == made[i]) == !is_alone);
      CHECK(same(memory.sent(i), data({4}, kFloat, static_cast<int>(i))));
    }
    CHECK(memory.sent(2).equal(torch::zeros({4})));
    CHECK(memory.put_given_back(0) == !is_alone);
    CHECK(!memory.put_given_back(0));
    CHECK(memory.has_gradient(0) == is_alone);
    CHECK(same(gradient_of(parameters[0]), data({4}, kFloat, 0)));
    memory.let_go_of_given();
    CHECK(!memory.put_given_back(1));
    CHECK(memory.sends_gradient(1));

    memory.take_in_together({0, 1}, true, false);  // `.grad` is what has come since
    CHECK(memory.sent(1).equal(torch::zeros({4})));
    CHECK(!memory.has_gradient(1));
  }
}

TEST_CASE(
    "bucket memory: without room what travels is the gradient, and what was given up stays with "
    "its gradient") {
  const at::NoGradGuard no_gradient;
  const hvd::NamedParameter nowhere{
      "nowhere", torch::empty({2, 3}, at::TensorOptions(at::kMeta).requires_grad(true))};
  for (const auto& compression : {Compression::none(), Compression::fp16()}) {
    const BucketMemory::Terms terms{.compression = compression};
    BucketMemory memory({&nowhere}, terms);
    std::size_t asked = 0;
    BucketMemory::make_room({&memory}, true, [&](DataType, std::size_t bytes) {
      asked = bytes;
      return nullptr;
    });
    CHECK(asked == kAlignment);
    CHECK((!memory.has_room() && !memory.is_taken_together() && !memory.is_home(0) &&
           !memory.result(0).defined()));
    gradient_of(nowhere) = torch::empty({2, 3}, at::kMeta);
    memory.take_in(0, true);
    memory.pack(0);
    CHECK(memory.result(0).is_same(gradient_of(nowhere)) == (compression == Compression::none()));
    memory.fill_with_zeros(0);
    CHECK((memory.result(0).scalar_type() ==
           (compression == Compression::none() ? kFloat : at::kHalf)));
    CHECK(!memory.result(0).is_same(gradient_of(nowhere)));
  }

  const auto parameters = parameters_of({{4}});
  const BucketMemory::Terms terms{};
  BucketMemory memory(members_of(parameters), terms);
  BucketMemory::make_room({&memory}, true, nullptr);
  at::Tensor& gradient = gradient_of(parameters[0]) = data({4}, kFloat, 0);
  memory.take_in_together({0}, false, false);
  memory.let_go_of_given();
  CHECK(memory.has_gradient(0));
  gradient.fill_(3);
  memory.give_up();
  CHECK((!memory.has_room() && !memory.is_taken_together() && !memory.has_gradient(0) &&
         !memory.result(0).defined()));
  CHECK(gradient.equal(torch::full({4}, 3.0F)));
}

TEST_CASE("bucket memory: what travels of conjugated and negated gradients is their values") {
  const at::NoGradGuard no_gradient;
  std::deque<hvd::NamedParameter> parameters;
  parameters.push_back({"complex", data({4}, at::kComplexFloat, 0).requires_grad_()});
  parameters.push_back({"number", torch::ones({}).requires_grad_()});
  const at::Tensor given = data({4}, at::kComplexFloat, 1);
  const auto give = [&](at::Device device) {
    gradient_of(parameters[0]) = given.to(device).conj();
    gradient_of(parameters[1]) = torch::imag(given.to(device)[1].conj());
  };
  const BucketMemory::Terms terms{};
  for (const bool are_taken_together : {false, true}) {
    BucketMemory memory(members_of(parameters), terms);
    BucketMemory::make_room({&memory}, are_taken_together, nullptr);
    give(at::kCPU);
    for (const std::size_t i : {0, 1}) {
      memory.take_in(i, true);
      memory.pack(i);
    }
    if (are_taken_together) memory.take_in_together({0, 1}, false, false);
    std::vector<std::shared_ptr<void>> kept;
    const auto sent = [&](std::size_t i) {
      return static_cast<const float*>(memory.argument(i, kept).input);
    };
    CHECK(sent(0)[3] == -torch::imag(given)[1].item<float>());
    CHECK(sent(1)[0] == -torch::imag(given)[1].item<float>());
  }

  for (auto& each : parameters)
    each.parameter = each.parameter.detach().to(at::kMeta).requires_grad_();
  BucketMemory nowhere(members_of(parameters), terms);  // without room
  give(at::kMeta);
  for (const std::size_t i : {0, 1}) {
    nowhere.pack(i);
    CHECK((!nowhere.sent(i).is_conj() && !nowhere.sent(i).is_neg()));
    CHECK(nowhere.sent(i).is_same(gradient_of(parameters[i])));
  }
}

TEST_CASE("bucket memory: rooms are not made across devices") {
  auto parameters = parameters_of({{4}, {4}});
  const BucketMemory::Terms terms{};
  BucketMemory memory(members_of(parameters), terms);
  parameters[1].parameter = torch::empty({4}, at::kMeta);
  BucketMemory::make_room({&memory}, false, nullptr);
  CHECK(!memory.has_room());
}

}  // namespace
}  // namespace bucket_memory_test
