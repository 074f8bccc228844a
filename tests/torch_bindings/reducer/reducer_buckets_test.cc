// The buckets of gradients: their memory, how many leave together and when, layouts.
#include <memory>

#include "tests/torch_bindings/wrapped_optimizers.h"
#include "torch_bindings/reducer/reducer.h"

namespace reducer_buckets_test {
namespace {

using namespace hvd::test;
using namespace hvd::test::wrapped;
using at::kDouble, at::kFloat, at::kHalf;
using hvd::DistributedOptimizer;
using hvd::DistributedOptimizerOptions;

TEST_CASE("gradients live in shared memory: no copies, the same place every step") {
  Sequential net = small_model(kFloat);
  const auto wrapped = sgd(net->parameters());
  DistributedOptimizer optimizer(*wrapped, net->named_parameters());
  std::vector<const void*> places;
  std::int64_t bytes = 0;
  for (const auto& parameter : net->parameters()) bytes += parameter.numel() * 4;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto before = hvd::stats();
    small_loss(net, hvd::rank(), step).backward();
    optimizer.step();
    const auto after = hvd::stats();
    if (hvd::Config::from_environment().shared_memory == hvd::SharedMemory::Auto)
      CHECK(after.bytes_zero_copy - before.bytes_zero_copy == static_cast<std::uint64_t>(bytes));
    CHECK(after.bytes_reduced - before.bytes_reduced == static_cast<std::uint64_t>(bytes));
    std::vector<const void*> now;
    for (const auto& parameter : net->parameters()) {
      now.push_back(parameter.grad().const_data_ptr());
      CHECK(parameter.grad().strides() == parameter.strides());
    }
    if (step > 0) CHECK(now == places);
    places = now;
  }
}

TEST_CASE("fusion: the 62 gradients of a model travel in few batches, and start before step()") {
  torch::manual_seed(1);
  Sequential net;
  for (int i = 0; i < 31; ++i) net->push_back(torch::nn::Linear(16, 16));
  const auto wrapped = sgd(net->parameters());
  DistributedOptimizer optimizer(*wrapped, net->named_parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto before = hvd::stats();
    net->forward(torch::ones({2, 16}) * (hvd::rank() + 1)).sum().backward();
    CHECK(hvd::stats().tensors_submitted - before.tensors_submitted == 62);
    optimizer.step();
    const auto after = hvd::stats();
    CHECK(after.tensors_submitted - before.tensors_submitted == 62);
    CHECK(after.batches_run - before.batches_run <= 4);
    CHECK(after.tensors_fused - before.tensors_fused >= 58);
  }
}

TEST_CASE("gradients taken when their bucket is complete are those taken one by one") {
  // How gradients on a GPU get to where they are reduced; it needs none.
  using hvd::GradientReducer;
  // the host's is allocate_shared
  CHECK(hvd::allocate_on_device(64, {}, hvd::DataType::Float32) == nullptr);
  int number = 0;
  for (const auto& compression : {hvd::Compression::none(), hvd::Compression::fp16()}) {
    for (const int passes : {1, 2}) {
      for (const bool set_to_none : {true, false}) {
        std::vector<std::vector<at::Tensor>> all;
        for (const auto taking :
             {GradientReducer::Taking::ByDevice, GradientReducer::Taking::Together}) {
          auto net = small_model(kFloat);
          std::vector<GradientReducer::Named> named;
          for (const auto& item : net->named_parameters())
            named.push_back({item.key(), item.value()});
          const DistributedOptimizerOptions options{.compression = compression,
                                                    .backward_passes_per_step = passes,
                                                    .gradient_predivide_factor = 2,
                                                    .groups = 2};
          const auto reducer =
              std::make_shared<GradientReducer>(named, options, number++, "taken", taking);
          reducer->hook();
          auto& gradients = all.emplace_back();
          std::vector<const void*> homes;
          for (int step = 0; step < 4; ++step) {
            for (int pass = 0; pass < passes; ++pass) {
              // The last layer gets no gradient on the last rank now and then, and nowhere in the
              // last step.
              const bool whole = step < 3 && (step != 1 || hvd::rank() + 1 < hvd::size());
              const at::Tensor x = data({5, 6}, kFloat, hvd::rank(), step * 2 + pass);
              (whole ? small_loss(net, hvd::rank(), step * 2 + pass)
                     : net[0]->as<torch::nn::Linear>()->forward(x).square().mean())
                  .backward();
            }
            reducer->synchronize();
            for (const auto& each : named) {
              const at::Tensor& gradient = each.parameter.grad();
              gradients.push_back(gradient.defined() ? gradient.clone() : at::Tensor());
              if (compression == hvd::Compression::none() && step == 0)
                homes.push_back(gradient.const_data_ptr());
              if (compression == hvd::Compression::none() && gradient.defined())
                CHECK(gradient.const_data_ptr() ==
                      homes[static_cast<std::size_t>(&each - named.data())]);
              if (set_to_none) {
                each.parameter.mutable_grad() = at::Tensor();
              } else if (gradient.defined()) {
                gradient.zero_();
              }
            }
            reducer->begin_step();
          }
          reducer->unhook();
        }
        REQUIRE(all[0].size() == all[1].size());
        for (std::size_t i = 0; i < all[0].size(); ++i) {
          CHECK(all[0][i].defined() == all[1][i].defined());
          if (all[0][i].defined()) CHECK(all[0][i].equal(all[1][i]));
        }
        CHECK(all[0].back().defined() == !set_to_none);
      }
    }
  }
}

TEST_CASE("parameters in other layouts, empty ones, and of several types") {
  at::Tensor image =
      data({2, 3, 4, 5}, kFloat, 0).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  at::Tensor turned = data({4, 6}, kFloat, 0).t().requires_grad_();
  at::Tensor empty = torch::empty({0, 3}).requires_grad_();
  at::Tensor scalar = torch::tensor(2.0, kDouble).requires_grad_();
  at::Tensor half = data({7}, kHalf, 0).requires_grad_();
  const auto wrapped = sgd({image, turned, empty, scalar, half});
  for (const auto& compression : {hvd::Compression::none(), hvd::Compression::fp16()}) {
    DistributedOptimizer optimizer(*wrapped, {}, {.compression = compression});
    optimizer.zero_grad();
    const float scale = static_cast<float>(hvd::rank() + 1);
    const float mean = static_cast<float>(hvd::size() + 1) / 2;
    (image.square().sum() * scale + turned.square().sum() * scale + empty.sum() + scalar * scale +
     (half * scale).sum())
        .backward();
    optimizer.synchronize();
    CHECK(torch::allclose(image.grad(), 2 * mean * image, 1e-3, 1e-3));
    CHECK(torch::allclose(turned.grad(), 2 * mean * turned, 1e-3, 1e-3));
    CHECK(torch::allclose(scalar.grad(), torch::tensor(mean, kDouble)));
    CHECK(torch::allclose(half.grad().to(kFloat), torch::full({7}, mean)));
    CHECK(image.grad().strides() == image.strides());
    optimizer.step();
    for (const auto& parameter : {image, turned, scalar, half}) CHECK(same_on_all_ranks(parameter));
  }
}

TEST_CASE(
    "a group with a parameter on a device that no collective reaches is refused, which only a look "
    "at each device finds") {
  const at::Tensor here = torch::ones({3}, torch::requires_grad()),
                   elsewhere = torch::ones({3}, at::TensorOptions(at::kMeta).requires_grad(true));
  for (const auto& options :
       {DistributedOptimizerOptions{.groups = std::vector<Parameters>{{here, elsewhere}}},
        {.groups = 1},
        {}}) {
    torch::optim::SGD wrapped({here, elsewhere}, 0.1);
    CHECK(contains(
        error_of<hvd::InvalidArgument>([&] { DistributedOptimizer(wrapped, {}, options); }),
        "meta"));
  }
}

}  // namespace
}  // namespace reducer_buckets_test
