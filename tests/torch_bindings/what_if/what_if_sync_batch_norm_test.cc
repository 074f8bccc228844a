// What happens if I ... : batch norm of all ranks.
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "examples/train/models/models.h"
#include "examples/train/trainer/setup.h"
#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;

TEST_CASE("what happens if a module has batch norm that cannot be converted: the report names it") {
  struct Foreign : torch::nn::Module {  // as a TorchScript module looks from outside
    Foreign() {
      register_buffer("running_mean", torch::zeros({3}));
      register_buffer("running_var", torch::ones({3}));
    }
  };
  torch::nn::Sequential net;
  net->push_back("first", torch::nn::BatchNorm1d(3));
  net->push_back("norm", torch::nn::InstanceNorm1d(
                             torch::nn::InstanceNorm1dOptions(3).track_running_stats(true)));
  net->push_back("linear", torch::nn::Linear(3, 3));
  auto holder = std::make_shared<torch::nn::Module>();
  holder->register_module("net", net.ptr());
  holder->register_module("foreign", std::make_shared<Foreign>());
  holder->register_module("own", torch::nn::BatchNorm2d(3).ptr());
  using Names = std::vector<std::string>;
  CHECK(hvd::sync_batchnorm_report(*holder).local == Names{"net.first", "foreign", "own"});
  CHECK(hvd::sync_batchnorm_report(*holder).synchronized.empty());
  hvd::convert_sync_batchnorm(holder);
  CHECK(hvd::sync_batchnorm_report(*holder).local == Names{"foreign"});
  CHECK(hvd::sync_batchnorm_report(*holder).synchronized == Names{"net.first", "own"});
  CHECK(hvd::sync_batchnorm_report(torch::nn::Linear(3, 3)).synchronized.empty());
  torch::nn::BatchNorm1d alone(3);
  CHECK(hvd::sync_batchnorm_report(alone).local.size() == 1);
  hvd::convert_sync_batchnorm(alone);
  CHECK(hvd::sync_batchnorm_report(alone).synchronized.size() == 1);
}

TEST_CASE(
    "what happens if I ask for --sync-bn with a TorchScript model: the trainer refuses it and "
    "names the layer") {
  torch::jit::Module script("Net"), layer("Layer");
  layer.register_buffer("running_mean", torch::zeros({3}));
  layer.register_buffer("running_var", torch::ones({3}));
  script.register_module("norm", layer);
  script.define(
      "def forward(self, x):\n  return torch.batch_norm(x, None, None, self.norm.running_mean, "
      "self.norm.running_var, True, 0.1, 1e-5, "
      "False)\n");
  const auto file = std::filesystem::temp_directory_path() /
                    ("hvd_what_if_" + std::to_string(::getpid()) + ".pt");
  script.save(file.string());
  const auto model = examples::script_model(file.string());
  std::filesystem::remove(file);
  CHECK(contains(error_of<std::runtime_error>([&] { examples::synchronize_batch_norm(*model); }),
                 "--sync-bn: 'norm'"));
}

/// Rows of a rank: unequal, and none on the second of three or more.
std::int64_t rows_of(int rank) { return hvd::size() > 2 && rank == 1 ? 0 : 2 + 3 * rank; }

torch::nn::Sequential normed_model(bool affine) {
  torch::nn::Sequential net(torch::nn::Linear(6, 8),
                            torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(8).affine(affine)),
                            torch::nn::Tanh(), torch::nn::Linear(8, 3));
  net->to(at::kDouble);
  const torch::NoGradGuard no_gradient;
  int variant = 0;
  for (auto& parameter : net->parameters())
    parameter.copy_(data(parameter.sizes(), at::kDouble, 0, variant++));
  return net;
}

at::Tensor rows(int rank, int variant) {
  return data({rows_of(rank), variant % 2 == 0 ? 6 : 3}, at::kDouble, rank, variant);
}

TEST_CASE(
    "what happens if I set weights with unequal batches and SyncBatchNorm: gradients are those of "
    "one process, by either wrapper") {
  for (const bool affine : {true, false}) {
    for (const bool by_optimizer : {true, false}) {
      CAPTURE(affine);
      CAPTURE(by_optimizer);
      auto net = normed_model(affine), alone = normed_model(affine);
      hvd::convert_sync_batchnorm(net);
      torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1)),
          of_one(alone->parameters(), torch::optim::SGDOptions(0.1));
      std::optional<hvd::DistributedOptimizer> optimizer;
      std::optional<hvd::DistributedDataParallel<torch::nn::SequentialImpl>> ddp;
      by_optimizer ? static_cast<void>(optimizer.emplace(sgd, net->named_parameters()))
                   : static_cast<void>(ddp.emplace(net.ptr()));
      for (int step = 0; step < 3; ++step) {
        const auto count = static_cast<double>(rows_of(hvd::rank()));
        by_optimizer ? optimizer->set_weight(count) : ddp->set_weight(count);
        const at::Tensor x = rows(hvd::rank(), 2 * step), y = rows(hvd::rank(), 2 * step + 1);
        torch::mse_loss(by_optimizer ? net->forward(x) : ddp->forward(x), y).backward();
        by_optimizer ? optimizer->step() : sgd.step();
        by_optimizer ? optimizer->zero_grad() : sgd.zero_grad();
        std::vector<at::Tensor> all_x, all_y;
        for (const int rank : everyone()) {
          all_x.push_back(rows(rank, 2 * step));
          all_y.push_back(rows(rank, 2 * step + 1));
        }
        torch::mse_loss(alone->forward(at::cat(all_x)), at::cat(all_y)).backward();
        of_one.step();
        of_one.zero_grad();
        CHECK(difference(flat(net), flat(alone)) < 1e-12);
      }
    }
  }
}

/// What the input of the batch norm is on `rank`: on all but the first it needs no gradient.
at::Tensor normed_input(const torch::nn::Sequential& net, int rank) {
  const at::Tensor made = net->ptr<torch::nn::LinearImpl>(0)->forward(rows(rank, 0));
  return rank == 0 ? made : made.detach();
}
at::Tensor loss_behind(torch::nn::Sequential& net, at::Tensor x, const at::Tensor& target) {
  for (auto layer = std::next(net->begin()); layer != net->end(); ++layer) x = layer->forward(x);
  return (x - target).square().sum();
}

TEST_CASE(
    "what happens if the input of a SyncBatchNorm needs a gradient on one rank only: gradients are "
    "those of one process") {
  for (const bool affine : {true, false}) {
    CAPTURE(affine);
    auto net = normed_model(affine), alone = normed_model(affine);
    hvd::convert_sync_batchnorm(net);
    loss_behind(net, normed_input(net, hvd::rank()), rows(hvd::rank(), 1)).backward();
    std::vector<at::Tensor> inputs, targets;
    for (const int rank : everyone()) {
      inputs.push_back(normed_input(alone, rank));
      targets.push_back(rows(rank, 1));
    }
    loss_behind(alone, at::cat(inputs), at::cat(targets)).backward();
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      const at::Tensor parameter = net->parameters()[i];
      const at::Tensor own =
          parameter.grad().defined() ? parameter.grad() : at::zeros_like(parameter);
      CHECK(difference(hvd::allreduce(own, {.op = hvd::ReduceOp::Sum}),
                       alone->parameters()[i].grad()) < 1e-10);
    }
  }
}

TEST_CASE(
    "what happens if SyncBatchNorm cannot tell what a rank counts: InvalidArgument on all ranks, "
    "and the next step is right") {
  if (hvd::size() == 1) return;
  auto net = normed_model(true), other = normed_model(true);
  hvd::convert_sync_batchnorm(net);
  torch::optim::SGD sgd(net->parameters(), 0.1), of_other(other->parameters(), 0.1);
  hvd::DistributedOptimizer optimizer(sgd, net->named_parameters()),
      second(of_other, other->named_parameters());
  const auto backward = [&] {
    torch::mse_loss(net->forward(data({4, 6}, at::kDouble, hvd::rank())),
                    data({4, 3}, at::kDouble, hvd::rank()))
        .backward();
  };
  optimizer.set_weight(last() ? 0 : 4);
  CHECK(contains(error_of<hvd::InvalidArgument>(backward), "a rank with set_weight(0) has rows"));
  optimizer.step();
  optimizer.zero_grad();
  optimizer.set_weight(4);
  second.set_weight(last() ? 5 : 4);
  CHECK(contains(error_of<hvd::InvalidArgument>(backward), "have different weights"));
  second.leave_out_step();
  optimizer.zero_grad();
  backward();
  optimizer.step();
  for (const auto& parameter : net->parameters()) CHECK(same_on_all_ranks(parameter));
}

}  // namespace
