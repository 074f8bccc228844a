// What happens if I ... : keep moving averages beside masters, batch norm and masks, or make them
// before the ranks' weights are equal.
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "tests/torch_bindings/support.h"

namespace what_if_average {
namespace {

using namespace hvd::test;
using hvd::DistributedOptimizer, hvd::ExponentialMovingAverage;
using torch::nn::Sequential;
using torch::optim::SGD, torch::optim::SGDOptions;

/// With a running mean, a counter and a mask of minus infinity.
Sequential normed(at::ScalarType type = at::kDouble) {
  Sequential net(torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 3));
  int variant = 0;
  const torch::NoGradGuard no_gradient;
  for (auto& parameter : net->parameters())
    parameter.copy_(data(parameter.sizes(), at::kDouble, 0, variant++) * 0.3);
  net->register_buffer("mask", torch::full({3}, -std::numeric_limits<double>::infinity()));
  net->to(type);
  return net;
}
at::Tensor by_hand(const std::vector<at::Tensor>& values, double decay) {
  at::Tensor average = values.front().clone();
  for (std::size_t i = 1; i < values.size(); ++i)
    average = average * decay + values[i] * (1 - decay);
  return average;
}

TEST_CASE(
    "what happens if I make averages before the ranks' weights are equal: they begin with what is "
    "broadcast") {
  for (const std::string way : {"broadcast_parameters", "DistributedDataParallel"}) {
    CAPTURE(way);
    Sequential net = small_model();
    {
      const torch::NoGradGuard no_gradient;
      for (auto& parameter : net->parameters()) parameter.add_(hvd::rank());
    }
    ExponentialMovingAverage average(*net, {.decay = 0.5});
    SGD sgd(net->parameters(), SGDOptions(0.1));
    std::optional<DistributedOptimizer> optimizer;
    std::optional<hvd::DistributedDataParallel<torch::nn::SequentialImpl>> ddp;
    if (way == "DistributedDataParallel") {
      ddp.emplace(net);
    } else {
      hvd::broadcast_parameters(*net, 0);
      optimizer.emplace(sgd, net->named_parameters());
    }
    std::vector<at::Tensor> seen{net->parameters()[0].detach().clone()};
    for (int step = 0; step < 3; ++step) {
      if (optimizer) optimizer->zero_grad();
      sgd.zero_grad();
      const at::Tensor x = data({5, 6}, at::kDouble, hvd::rank(), step);
      (ddp ? ddp->forward(x) : net->forward(x)).square().mean().backward();
      optimizer ? optimizer->step() : sgd.step();
      average.update();
      seen.push_back(net->parameters()[0].detach().clone());
      if (step == 1) hvd::broadcast_parameters(*net, 0);  // an epoch's, say: the averages go on
    }
    for (const auto& tensor : average.averages()) CHECK(same_on_all_ranks(tensor));
    CHECK(difference(average.averages()[0], by_hand(seen, 0.5)) < 1e-14);
  }
}

TEST_CASE(
    "what happens if I evaluate with averages before the ranks' weights are equal: they begin with "
    "what is broadcast") {
  Sequential net = small_model();
  {
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : net->parameters()) parameter.add_(hvd::rank());
  }
  const at::Tensor before = flat(net).clone();
  ExponentialMovingAverage average(*net);
  {
    const auto guard = average.averaged();
    CHECK(same(flat(net), before));
  }
  hvd::broadcast_parameters(*net, 0);
  for (std::size_t i = 0; i < average.averages().size(); ++i)
    CHECK(same(average.averages()[i], net->parameters()[i].detach()));
}

TEST_CASE(
    "what happens if I save, update or copy averages inside of their guard, or open a second one: "
    "they stay what they are, and the weights come back") {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    CAPTURE(std::string(c10::toString(type)));
    Sequential net = normed(type);
    ExponentialMovingAverage average(*net, {.decay = 0.5});
    const at::Tensor mean = net->named_buffers()["1.running_mean"];
    for (int step = 0; step < 3; ++step) {
      const torch::NoGradGuard no_gradient;
      for (auto& parameter : net->parameters()) parameter.add_(hvd::rank() + 1);
      mean.add_(hvd::rank() + 1);
      average.update();
    }
    const auto all_of = [](const ExponentialMovingAverage& one) {
      std::vector<at::Tensor> all = one.averages();
      for (const auto& tensor : one.of_rank()) all.push_back(tensor);
      return all;
    };
    std::vector<at::Tensor> expected;
    for (const auto& tensor : all_of(average)) expected.push_back(tensor.clone());
    const auto are_averages = [&](const ExponentialMovingAverage& one) {
      for (std::size_t i = 0; i < expected.size(); ++i) CHECK(same(all_of(one)[i], expected[i]));
    };
    const auto are_in = [&] {
      for (std::size_t i = 0; i < net->parameters().size(); ++i)
        CHECK(same(net->parameters()[i].detach(), expected[i].to(type)));
    };
    const at::Tensor weights = flat(net).clone(), mean_of_rank = mean.clone();
    {
      const auto guard = average.averaged();
      are_in();
      CHECK(difference(mean, mean_of_rank) > 0.5);
      { const auto second = average.averaged(); }
      are_in();
      std::stringstream file;
      torch::serialize::OutputArchive out;
      average.save(out);
      out.save_to(file);
      torch::serialize::InputArchive in;
      in.load_from(file);
      Sequential of_file = normed(type);
      ExponentialMovingAverage read(*of_file);
      read.load(in);
      are_averages(read);
      average.copy_to_parameters();
      are_in();
      if (type != at::kBFloat16) average.update();  // with what is rounded it would be another
      are_averages(average);
    }
    CHECK(same(flat(net), weights));
    CHECK(same(mean, mean_of_rank));
    are_averages(average);
    average.copy_to_parameters();
    are_in();
  }
}

TEST_CASE(
    "what happens if I average a model with masters: the masters are averaged, where a rank has "
    "them whole") {
  for (const bool wrapped : {false, true}) {
    for (const bool sharded : {false, true}) {
      if (sharded && !wrapped) continue;
      CAPTURE(wrapped);
      CAPTURE(sharded);
      Sequential net = small_model(at::kBFloat16), exact = small_model(at::kBFloat16);
      exact->to(at::kFloat);
      SGD sgd(net->parameters(), SGDOptions(1e-4));
      hvd::MasterWeights masters(sgd);
      std::optional<DistributedOptimizer> optimizer;
      if (wrapped)
        optimizer.emplace(masters, net->named_parameters(),
                          hvd::DistributedOptimizerOptions{.shard_optimizer_state = sharded});
      ExponentialMovingAverage average(*net, {.decay = 0.5});
      std::vector<at::Tensor> seen{exact->parameters()[0].detach().clone()};
      for (int step = 0; step < 6; ++step) {  // each too small for 16 bits
        for (auto& parameter : net->parameters())
          parameter.mutable_grad() = torch::ones_like(parameter);
        if (optimizer) optimizer->synchronize();
        optimizer ? optimizer->step() : masters.step();
        average.update();
        seen.push_back(seen.back() - 1e-4);
      }
      const double off = difference(average.averages()[0], by_hand(seen, 0.5));
      if (!sharded) CHECK(off < 1e-6);
      if (sharded) CHECK(off < 1e-2);  // the parameters'
      const at::Tensor before = flat(net).clone();
      {
        const auto guard = average.averaged();
        CHECK(same(net->parameters()[0].detach(), average.averages()[0].to(at::kBFloat16)));
      }
      CHECK(same(flat(net), before));
      // What a user writes counts, and nothing else is lost by it.
      {
        const torch::NoGradGuard no_gradient;
        net->parameters()[0].fill_(0.5);
      }
      const at::Tensor last = average.averages()[0].clone(), other = average.averages()[1].clone();
      average.update();
      CHECK(difference(average.averages()[0], last * 0.5 + 0.25) < 1e-7);
      if (!sharded) {
        optimizer ? optimizer->zero_grad() : masters.zero_grad();
      }
      CHECK(difference(average.averages()[1], other) < 1e-3);
    }
  }
}

TEST_CASE(
    "what happens if I average a model with buffers: running statistics are averaged, counters and "
    "masks are what they are") {
  for (const auto type : {at::kDouble, at::kFloat}) {
    Sequential net = normed(type);
    ExponentialMovingAverage average(*net, {.decay = 0.5});
    const at::Tensor mean = net->named_buffers()["1.running_mean"],
                     count = net->named_buffers()["1.num_batches_tracked"];
    std::vector<at::Tensor> seen{mean.detach().clone()};
    for (int step = 0; step < 3; ++step) {
      net->forward(data({5, 6}, type, hvd::rank(), step));
      average.update();
      seen.push_back(mean.detach().clone());
    }
    const at::Tensor last = mean.clone();
    const auto mask = net->named_buffers()["mask"];
    const auto version = mask._version();
    const auto check_averaged = [&] {
      CHECK(difference(mean, by_hand(seen, 0.5)) < 1e-6);
      CHECK(difference(mean, last) > 1e-3);
      CHECK(count.item<std::int64_t>() == 3);
      CHECK(mask.isinf().all().item<bool>());
    };
    {
      const auto guard = average.averaged();
      check_averaged();
    }
    CHECK(same(mean, last));
    CHECK(mask._version() == version);  // a DistributedDataParallel would send it again
    // A file has them, and one of other buffers is refused, and changes nothing.
    std::stringstream file;
    torch::serialize::OutputArchive out;
    average.save(out);
    out.save_to(file);
    const auto load = [&file](ExponentialMovingAverage& into) {
      std::stringstream again(file.str());
      torch::serialize::InputArchive in;
      in.load_from(again);
      into.load(in);
    };
    Sequential other = normed(type);
    ExponentialMovingAverage resumed(*other, {.decay = 0.5});
    load(resumed);
    hvd::broadcast_parameters(*other, 0);  // what is loaded has begun
    resumed.copy_to_parameters();
    CHECK(difference(other->named_buffers()["1.running_mean"], by_hand(seen, 0.5)) < 1e-6);
    Sequential bare = normed(type);
    ExponentialMovingAverage without(bare->parameters(), {.decay = 0.5});
    const at::Tensor before = without.averages()[0].clone();
    CHECK(contains(error_of<c10::Error>([&] { load(without); }), "averages of 4 buffers"));
    CHECK(same(without.averages()[0], before));
    average.copy_to_parameters();
    check_averaged();
  }
}

TEST_CASE(
    "what happens if I average a model with parameters of integers or bool: they are copied") {
  torch::nn::Linear net(6, 4);
  net->register_parameter("count", data({3}, at::kLong, hvd::rank()), false);
  net->register_parameter("mask", data({3}, at::kBool, hvd::rank()), false);
  auto parameters = net->named_parameters();
  std::vector<at::Tensor> seen{net->weight.detach().clone()};
  ExponentialMovingAverage average(*net, {.decay = 0.5});
  const torch::NoGradGuard no_gradient;
  net->weight.mul_(3);
  seen.push_back(net->weight.detach().clone());
  parameters["count"].add_(1);
  parameters["mask"].logical_not_();
  average.update();
  const at::Tensor count = parameters["count"].clone(), mask = parameters["mask"].clone();
  parameters["count"].add_(1);
  {
    const auto guard = average.averaged();
    CHECK(same(parameters["count"], count));
    CHECK(same(parameters["mask"], mask));
    CHECK(difference(net->weight, by_hand(seen, 0.5)) < 1e-6);
  }
  CHECK(same(parameters["count"], count + 1));
}

}  // namespace
}  // namespace what_if_average
