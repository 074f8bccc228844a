// What happens if I ... : batch norm of all ranks.
#include <filesystem>
#include <memory>

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

}  // namespace
