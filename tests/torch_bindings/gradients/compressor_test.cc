// Compression with error feedback: int8, topk, powersgd, in the optimizer wrapper.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;
using hvd::Compression;
using hvd::DistributedOptimizer;
using hvd::DistributedOptimizerOptions;

const std::vector<std::pair<std::string, Compression>>& lossy() {
  static const std::vector<std::pair<std::string, Compression>> all{
      {"int8", Compression::int8()},
      {"topk", Compression::topk(0.1)},
      {"powersgd", Compression::powersgd(2)}};
  return all;
}

/// Parameters that are given their gradients, and an optimizer that moves them by exactly those.
struct Given {
  Given(std::vector<at::Tensor> gradients, DistributedOptimizerOptions options) {
    std::vector<at::Tensor> parameters;
    for (const auto& gradient : gradients)
      parameters.push_back(at::zeros_like(gradient).requires_grad_());
    list = parameters;
    wrapped = std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(1));
    optimizer = std::make_unique<DistributedOptimizer>(*wrapped, hvd::NamedTensors{}, options);
  }
  /// The reduced gradients.
  std::vector<at::Tensor> reduce(const std::vector<at::Tensor>& gradients) {
    for (std::size_t i = 0; i < list.size(); ++i)
      list[i].mutable_grad() = gradients[i].defined() ? gradients[i].clone() : at::Tensor();
    optimizer->step();
    std::vector<at::Tensor> reduced;
    for (const auto& parameter : list)
      reduced.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    return reduced;
  }
  std::vector<at::Tensor> list;
  std::unique_ptr<torch::optim::SGD> wrapped;
  std::unique_ptr<DistributedOptimizer> optimizer;
};

at::Tensor noise(at::IntArrayRef sizes, at::ScalarType type, int rank, int variant) {
  return torch::randn(
             sizes,
             at::detail::createCPUGenerator(static_cast<std::uint64_t>(rank * 1000 + variant + 1)),
             at::TensorOptions(kDouble))
      .to(type);
}
std::vector<at::Tensor> gradients(at::ScalarType type, int rank, int variant) {
  return {noise({40, 31}, type, rank, variant), noise({700}, type, rank, variant + 50),
          noise({8, 6, 3, 3}, type, rank, variant + 90).contiguous(at::MemoryFormat::ChannelsLast)};
}
at::Tensor mean(std::size_t which, at::ScalarType type, int variant) {
  at::Tensor sum;
  for (const int rank : everyone()) {
    const at::Tensor own = gradients(type, rank, variant)[which];
    sum = sum.defined() ? sum + own : own;
  }
  return sum / hvd::size();
}

TEST_CASE("compression: what is refused") {
  CHECK(contains(error_of<hvd::InvalidArgument>([] { Compression::topk(0); }), "ratio"));
  CHECK(contains(error_of<hvd::InvalidArgument>([] { Compression::topk(1.5); }), "ratio"));
  CHECK(contains(error_of<hvd::InvalidArgument>([] { Compression::powersgd(0); }), "rank"));
  const at::Tensor tensor = torch::ones({300});
  for (const auto& [name, compression] : lossy()) {
    CHECK(contains(error_of<hvd::InvalidArgument>([&] {
                     hvd::sparse_allreduce(tensor.to_sparse(), {.compression = compression});
                   }),
                   name));
    at::Tensor repeated = tensor.clone();
    const std::string words = error_of<hvd::InvalidArgument>(
        [&] { hvd::allreduce_init(repeated, {.compression = compression}); });
    CHECK(contains(words, name));  // and says where it does work
    CHECK(contains(words, "DistributedOptimizer"));
    CHECK(contains(words, "DistributedDataParallel"));
    float value = 1;
    const hvd::Buffer buffer{&value, hvd::DataType::Float32, {1}, {}};
    CHECK(contains(error_of<hvd::InvalidArgument>(
                       [&] { hvd::allreduce(buffer, buffer, {.compression = compression}); }),
                   name));
  }
  CHECK(hvd::allreduce(tensor, {.op = hvd::ReduceOp::Sum}).sum().item<float>() ==
        300.0F * static_cast<float>(hvd::size()));
}

TEST_CASE("topk of everything is no compression") {
  for (const auto type : {kFloat, kDouble}) {
    for (const auto op : {hvd::ReduceOp::Average, hvd::ReduceOp::Sum}) {
      const auto own = gradients(type, hvd::rank(), 3);
      Given all(own, {.compression = Compression::topk(1), .op = op}), none(own, {.op = op});
      for (int step = 0; step < 2; ++step) {
        const auto got = all.reduce(own), expected = none.reduce(own);
        for (std::size_t i = 0; i < own.size(); ++i) CHECK(same(got[i], expected[i]));
      }
    }
  }
}

TEST_CASE("topk sends the largest") {
  const at::Tensor own = noise({1000}, kDouble, hvd::rank(), 7);
  Given one({own}, {.compression = Compression::topk(0.05)});
  const at::Tensor got = one.reduce({own})[0];
  at::Tensor expected = at::zeros({1000}, kDouble);
  for (const int rank : everyone()) {
    const at::Tensor theirs = noise({1000}, kDouble, rank, 7);
    const at::Tensor places = std::get<1>(theirs.abs().topk(50));
    expected.index_add_(0, places, theirs.index_select(0, places));
  }
  CHECK(same(got, expected / hvd::size()));
  CHECK(one.optimizer->compression_memory()[0].count_nonzero().item<int>() == 950);
}

TEST_CASE("int8: an error is at most half a step, twice") {
  for (const auto type : {kFloat, kDouble, at::kBFloat16}) {
    CAPTURE(type);
    const auto own = gradients(type, hvd::rank(), 1);
    Given one(own, {.compression = Compression::int8()});
    const auto got = one.reduce(own);
    double largest = 0;
    for (const int rank : everyone())
      for (const auto& gradient : gradients(type, rank, 1))
        largest = std::max(largest, gradient.abs().max().item<double>());
    for (std::size_t i = 0; i < own.size(); ++i) {
      CHECK(same_on_all_ranks(got[i]));
      const double error = (got[i].to(kDouble) - mean(i, kDouble, 1).to(type).to(kDouble))
                               .abs()
                               .max()
                               .item<double>();
      CHECK(error <= largest / 127 * 1.01 + (type == at::kBFloat16 ? largest / 64 : 0));
      CHECK(error > 0);
    }
  }
}

TEST_CASE("powersgd of a matrix of low rank is exact, and vectors travel as they are") {
  for (const auto op : {hvd::ReduceOp::Average, hvd::ReduceOp::Sum}) {
    const at::Tensor outer = noise({30, 1}, kDouble, 0, 1).mm(noise({1, 20}, kDouble, 0, 2));
    const at::Tensor vector = noise({50}, kDouble, hvd::rank(), 3);
    Given one({outer, vector}, {.compression = Compression::powersgd(2), .op = op}),
        none({outer, vector}, {.op = op});
    for (int step = 0; step < 3; ++step) {
      const std::vector<at::Tensor> own{outer * (hvd::rank() + 1.0 + step), vector};
      const auto got = one.reduce(own), expected = none.reduce(own);
      CHECK(torch::allclose(got[0], expected[0], 1e-12, 1e-12));
      CHECK(same(got[1], expected[1]));
    }
  }
  {  // from nothing, something can still come
    const at::Tensor zero = at::zeros({30, 20}, kDouble);
    const at::Tensor outer = noise({30, 1}, kDouble, 0, 1).mm(noise({1, 20}, kDouble, 0, 2));
    Given one({zero}, {.compression = Compression::powersgd(2)});
    CHECK(same(one.reduce({zero})[0], zero));
    CHECK(torch::allclose(one.reduce({outer})[0], outer, 1e-12, 1e-12));
  }
}

TEST_CASE("error feedback: what is left out comes later, and all ranks get the same bits") {
  for (const auto& [name, compression] : lossy()) {
    for (const double predivide : {1.0, 3.0}) {
      CAPTURE(name);
      CAPTURE(predivide);
      Given one(gradients(kDouble, 0, 0),
                {.compression = compression, .gradient_predivide_factor = predivide});
      const int steps = 60;
      std::vector<at::Tensor> applied(3), wanted(3);
      double early = 0;
      for (int step = 0; step < steps; ++step) {
        const auto got = one.reduce(gradients(kDouble, hvd::rank(), step % 5));
        double away = 0, all = 0;
        for (std::size_t i = 0; i < 3; ++i) {
          CHECK(same_on_all_ranks(got[i].contiguous()));
          const at::Tensor expected = mean(i, kDouble, step % 5);
          applied[i] = step == 0 ? got[i] : applied[i] + got[i];
          wanted[i] = step == 0 ? expected : wanted[i] + expected;
          away += (applied[i] - wanted[i]).square().sum().item<double>();
          all += wanted[i].square().sum().item<double>();
        }
        if (step == 4) early = std::sqrt(away / all);
        if (step + 1 < steps) continue;
        const double late = std::sqrt(away / all);
        CAPTURE(early);
        CAPTURE(late);
        // what is owed stays bounded, while the sum grows
        CHECK(late < (name == "int8" ? 0.002 : 0.35));
        CHECK(late < early * 0.5);
      }
    }
  }
}

TEST_CASE("compressed gradients that some or all ranks do not have") {
  for (const auto& [name, compression] : lossy()) {
    CAPTURE(name);
    const auto own = gradients(kDouble, hvd::rank(), 2);
    Given one(own, {.compression = compression});
    one.reduce(own);
    const auto remembered = one.optimizer->compression_memory()[0].clone();
    // what the rounding of sums left out, of the first gradient on rank 0, which begins with it
    const auto of_sums = [&] {
      const at::Tensor blocks = one.optimizer->compression_memory().back();
      return blocks.narrow(0, 0, std::min<std::int64_t>(5, blocks.size(0))).clone();
    };
    const bool has_sums = name == "int8" && hvd::rank() == 0;
    const at::Tensor sums_before = has_sums ? of_sums() : at::Tensor();
    // The first: on no rank. The second: on rank 0 only. The third: on all.
    const auto got = one.reduce({at::Tensor(), hvd::rank() == 0 ? own[1] : at::Tensor(), own[2]});
    CHECK(!got[0].defined());
    CHECK(same(one.optimizer->compression_memory()[0], remembered));
    if (has_sums) CHECK(same(of_sums(), sums_before));
    REQUIRE(got[1].defined());
    CHECK(same_on_all_ranks(got[1]));
    CHECK(same_on_all_ranks(got[2].contiguous()));
    for (int step = 0; step < 2; ++step)
      CHECK(!one.reduce(std::vector<at::Tensor>(3))[1].defined());
  }
}

TEST_CASE("compression: an optimizer that is given another's memory goes on as that would") {
  for (const auto& [name, compression] : lossy()) {
    CAPTURE(name);
    const auto zeros = std::vector<at::Tensor>{at::zeros({30, 20}, kDouble)};
    Given one(zeros, {.compression = compression}), other(zeros, {.compression = compression});
    for (int step = 0; step < 2; ++step) one.reduce(zeros);  // powersgd draws random columns
    const auto from = one.optimizer->compression_memory(),
               to = other.optimizer->compression_memory();
    REQUIRE(from.size() == to.size());
    for (std::size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
    for (int step = 0; step < 3; ++step) {
      const auto own = step == 0 ? zeros[0] : noise({30, 20}, kDouble, hvd::rank(), step);
      CHECK(same(one.reduce({own})[0], other.reduce({own})[0]));
    }
  }
}

TEST_CASE("compression: a group that comes later has a memory, too, after those there were") {
  const auto own = std::vector<at::Tensor>{noise({1000}, kDouble, hvd::rank(), 7)};
  Given one(own, {.compression = Compression::topk(0.05)});
  at::Tensor later = at::zeros({600}, kDouble).requires_grad_();
  one.optimizer->add_param_group(torch::optim::OptimizerParamGroup({later}));
  later.mutable_grad() = noise({600}, kDouble, hvd::rank(), 8);
  one.reduce(own);
  const auto memory = one.optimizer->compression_memory();
  REQUIRE(memory.size() == 2);
  CHECK(memory[0].numel() == 1000);
  CHECK(memory[1].count_nonzero().item<int>() == 570);
}

TEST_CASE(
    "compression with a memory from before, and a loss that is scaled from then on: nothing of the "
    "memory is lost") {
  const auto own = std::vector<at::Tensor>{noise({1000}, kDouble, hvd::rank(), 7)};
  Given one(own, {.compression = Compression::topk(0.05)});
  const at::Tensor memory = one.optimizer->compression_memory()[0];
  memory.copy_(noise({1000}, kDouble, hvd::rank(), 8));  // as a checkpoint gives it back
  const at::Tensor owed = memory + own[0];
  hvd::GradScaler scaler({.init_scale = 64});
  one.list[0].mutable_grad() = scaler.scale(own[0].clone());
  one.optimizer->synchronize();  // it knows of no scale yet
  scaler.step(*one.optimizer);
  const at::Tensor left = hvd::allreduce(owed - memory, {.op = hvd::ReduceOp::Average});
  CHECK(torch::allclose(one.list[0].grad(), left, 1e-12, 1e-12));
}

TEST_CASE("compressed gradients that are not finite: so is the result, everywhere, and only then") {
  for (const auto& [name, compression] : lossy()) {
    for (const double wrong :
         {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
      CAPTURE(name);
      CAPTURE(wrong);
      auto own = gradients(kFloat, hvd::rank(), 2);
      Given one(own, {.compression = compression});
      one.reduce(own);
      auto bad = gradients(kFloat, hvd::rank(), 2);
      if (last()) bad[0][3][4] = wrong;
      CHECK(!one.reduce(bad)[0].isfinite().all().item<bool>());
      for (int step = 0; step < 3; ++step) {
        for (const auto& gradient : one.reduce(own)) {
          CHECK(gradient.isfinite().all().item<bool>());
          CHECK(same_on_all_ranks(gradient.contiguous()));
        }
      }
    }
  }
}

TEST_CASE("compression: a model learns as without, for fewer bytes") {
  const auto train = [](const Compression& compression, std::uint64_t& bytes) {
    torch::nn::Sequential net(torch::nn::Linear(10, 64), torch::nn::Tanh(),
                              torch::nn::Linear(64, 64), torch::nn::Tanh(),
                              torch::nn::Linear(64, 1));
    {
      const torch::NoGradGuard no_gradient;
      int variant = 0;
      for (auto& parameter : net->parameters())
        parameter.copy_(noise(parameter.sizes(), kFloat, 0, variant++) * 0.15);
    }
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05));
    DistributedOptimizer optimizer(sgd, net->named_parameters(), {.compression = compression});
    const at::Tensor x = noise({64, 10}, kFloat, hvd::rank(), 20);
    const at::Tensor y = torch::sin(x.sum(1, true));
    at::Tensor loss;
    for (int step = 0; step < 150; ++step) {
      optimizer.zero_grad();
      loss = torch::mse_loss(net->forward(x), y);
      loss.backward();
      optimizer.step();
    }
    for (const auto& parameter : net->parameters()) CHECK(same_on_all_ranks(parameter));
    bytes = optimizer.bytes_sent();
    return hvd::allreduce(loss.detach()).item<double>();
  };
  std::uint64_t bytes_of_none = 0;
  const double of_none = train(Compression::none(), bytes_of_none);
  CHECK(of_none < 0.4);
  for (const auto& [name, compression, saved] :
       std::vector<std::tuple<std::string, Compression, double>>{
           {"int8", Compression::int8(), 3.0},
           {"topk", Compression::topk(0.05), 4},
           {"powersgd", Compression::powersgd(4), 4}}) {
    CAPTURE(name);
    std::uint64_t bytes = 0;
    const double loss = train(compression, bytes);
    CAPTURE(of_none);
    CHECK(loss < of_none + 0.1);
    if (hvd::size() > 1)
      CHECK(static_cast<double>(bytes) * saved < static_cast<double>(bytes_of_none));
  }
}

TEST_CASE("compression with accumulation, and a model that differs between ranks") {
  const auto own = gradients(kDouble, hvd::rank(), 4);
  Given one(own, {.compression = Compression::topk(1), .backward_passes_per_step = 2});
  for (int pass = 0; pass < 2; ++pass)
    for (std::size_t i = 0; i < own.size(); ++i) (one.list[i] * own[i]).sum().backward();
  one.optimizer->step();
  for (std::size_t i = 0; i < own.size(); ++i)
    CHECK(torch::allclose(one.list[i].grad(), mean(i, kDouble, 4) * 2, 1e-12, 1e-12));
  for (auto& parameter : one.list)
    CHECK_THROWS_AS(
        [&] {
          for (int pass = 0; pass < 3; ++pass) parameter.sum().backward();
        }(),
        hvd::InvalidArgument);
  one.optimizer->zero_grad();
  if (hvd::size() == 1) return;
  const at::Tensor other = at::zeros({last() ? 600 : 500}, kDouble);
  Given wrong({other}, {.compression = Compression::int8()});
  CHECK(contains(error_of<hvd::Mismatch>([&] { wrong.reduce({other}); }), "parameter.0.0"));
}

TEST_CASE("compression in another way on one rank: a Mismatch on all, which says the way of each") {
  if (hvd::size() == 1) return;
  const at::Tensor gradient = noise({40, 31}, kDouble, hvd::rank(), 7);
  const auto refused = [&](const Compression& mine, const std::string& of_last,
                           const std::string& of_others) {
    Given wrong({gradient}, {.compression = mine});
    for (int step = 0; step < 2; ++step) {  // and so it stays
      const std::string text = error_of<hvd::Mismatch>([&] { wrong.reduce({gradient}); });
      CAPTURE(text);
      const std::string way = ": gradient 0 'parameter.0.0' is float64 [40, 31] by ";
      CHECK(contains(text, "rank " + std::to_string(hvd::size() - 1) + way + of_last));
      const std::string others =
          hvd::size() == 2 ? "rank 0" : "ranks 0-" + std::to_string(hvd::size() - 2);
      CHECK(contains(text, others + way + of_others));
    }
  };
  refused(Compression::topk(last() ? 0.5 : 0.25), "topk(0.5)", "topk(0.25)");
  refused(Compression::powersgd(last() ? 3 : 2), "powersgd(3)", "powersgd(2)");
  refused(last() ? Compression::int8() : Compression::topk(0.25), "int8", "topk(0.25)");
  Given alike({gradient}, {.compression = Compression::topk(1)});
  CHECK(same_on_all_ranks(alike.reduce({gradient})[0]));
}

}  // namespace
