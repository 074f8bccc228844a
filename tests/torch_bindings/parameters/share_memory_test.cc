// hvd::share_memory(module).
#include <memory>

#include "tests/torch_bindings/tied_net.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;

TEST_CASE(
    "share_memory moves parameters and buffers, values and layouts as they were, and training goes "
    "on") {
  torch::nn::Sequential net(torch::nn::Conv2d(3, 8, 3), torch::nn::BatchNorm2d(8));
  hvd::broadcast_parameters(net, 0);
  auto* const conv = net->at<torch::nn::Conv2dImpl>(0).weight.unsafeGetTensorImpl();
  net->at<torch::nn::Conv2dImpl>(0).weight.set_data(
      net->at<torch::nn::Conv2dImpl>(0).weight.contiguous(at::MemoryFormat::ChannelsLast));
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.01));
  hvd::DistributedOptimizer optimizer(adam, net->named_parameters());
  std::vector<at::Tensor> before;
  std::vector<const void*> places;
  for (const auto& all : {net->parameters(), net->buffers()})
    for (const auto& tensor : all) {
      before.push_back(tensor.detach().clone());
      places.push_back(tensor.const_data_ptr());
    }
  CHECK(hvd::share_memory(*net) == before.size());
  std::size_t i = 0;
  for (const auto& all : {net->parameters(), net->buffers()})
    for (const auto& tensor : all) {
      CHECK(torch::equal(tensor, before[i]));
      CHECK(tensor.strides() == before[i].strides());
      CHECK(tensor.const_data_ptr() != places[i]);
      ++i;
    }
  CHECK(net->at<torch::nn::Conv2dImpl>(0).weight.unsafeGetTensorImpl() == conv);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    net->forward(data({4, 3, 6, 6}, kFloat, hvd::rank(), step)).square().mean().backward();
    optimizer.step();
  }
  for (const auto& parameter : net->parameters()) CHECK(same_on_all_ranks(parameter));
  CHECK(!torch::equal(net->parameters()[0], before[0]));
  CHECK(!torch::equal(net->buffers()[0], torch::zeros({8})));
}

TEST_CASE("share_memory takes what holds a module") {
  const torch::nn::Linear holder(3, 2);
  const auto pointer = std::make_shared<torch::nn::LinearImpl>(3, 2);
  CHECK(hvd::share_memory(holder) == 2);
  CHECK(hvd::share_memory(pointer) == 2);
  CHECK(hvd::share_memory(std::shared_ptr<torch::nn::Module>(pointer)) == 2);
  CHECK(contains(error_of<hvd::InvalidArgument>(
                     [] { hvd::share_memory(std::shared_ptr<torch::nn::Module>()); }),
                 "share_memory: a null"));
}

TEST_CASE(
    "share_memory: collectives then take the tensors where they are, and each rank's values are "
    "its own") {
  auto net = small_model(kFloat, 4096);
  CHECK(hvd::share_memory(net) == net->parameters().size());
  const torch::NoGradGuard no_gradient;
  for (auto& parameter : net->parameters()) parameter.fill_(hvd::rank());
  hvd::barrier();
  for (const auto& parameter : net->parameters())
    CHECK(parameter.eq(hvd::rank()).all().item<bool>());
  const auto copied = hvd::stats().bytes_zero_copy;
  for (auto& parameter : net->parameters()) hvd::allreduce_(parameter, {.op = hvd::ReduceOp::Sum});
  for (const auto& parameter : net->parameters())
    CHECK(parameter.eq(hvd::size() * (hvd::size() - 1) / 2).all().item<bool>());
  CHECK((hvd::size() == 1 || hvd::stats().bytes_zero_copy > copied));
}

TEST_CASE(
    "share_memory: tied weights stay tied; what others refer to stays where it is; twice is once "
    "more") {
  TiedNet net;
  CHECK(hvd::share_memory(net) == 3);
  CHECK(net.embedding->weight.is_same(net.decoder->weight));
  CHECK(hvd::share_memory(net) == 3);
  const at::Tensor view = net.hidden->bias.detach();
  CHECK(hvd::share_memory(net) == 2);
  const torch::NoGradGuard no_gradient;
  net.hidden->bias.fill_(3);
  CHECK(view.eq(3).all().item<bool>());
  torch::nn::Sequential empty;
  CHECK(hvd::share_memory(*empty) == 0);
}

}  // namespace
