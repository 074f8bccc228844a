// Checkpoints of large models: what they cost in memory, and tensors that stay in the file until
// they are wanted.
#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/torch_bindings/shared_folder.h"
#include "tests/torch_bindings/support.h"
#include "torch_bindings/files/file.h"

namespace checkpoint_reader {
namespace {

using namespace hvd::test;
using hvd::Checkpoint, hvd::CheckpointError, hvd::DistributedOptimizer;
using torch::nn::Sequential;

constexpr double kMiB = 1 << 20;

double status_in_mib(const std::string& field) {
  std::ifstream in("/proc/self/status");
  for (std::string word; in >> word;)
    if (word == field + ":") {
      double kib = 0;
      in >> kib;
      return kib / 1024;
    }
  FAIL("the kernel does not tell ", field);
  return 0;
}

/// How much more memory this process had while `call` ran than before, at most, in MiB; shared
/// memory that it touched counts.
template <class Call>
double peak_of(const Call& call) {
  hvd::barrier();
  ::malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak is what is there now
  const double before = status_in_mib("VmRSS");
  call();
  const double peak = status_in_mib("VmHWM") - before;
  hvd::barrier();
  return peak;
}

/// Every rank has the same one: 96 MiB of parameters, so that Adam's state is 192 MiB.
Sequential large_model() {
  Sequential net;
  for (int i = 0; i < 6; ++i) net->push_back(torch::nn::Linear(2048, 2048));
  const torch::NoGradGuard no_gradient;
  int variant = 0;
  for (auto& parameter : net->parameters())
    parameter.copy_(data(parameter.sizes(), at::kFloat, 0, variant++) * 0.01);
  return net;
}

void train(Sequential& net, DistributedOptimizer& optimizer, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    optimizer.zero_grad();
    net->forward(data({2, 2048}, at::kFloat, hvd::rank(), step)).square().mean().backward();
    optimizer.step();
  }
  optimizer.zero_grad();
}

TEST_CASE(
    "checkpoints of a sharded optimizer: who writes needs memory for the file, who reads for its "
    "share, and no rank for more") {
  const hvd::DistributedOptimizerOptions options{.shard_optimizer_state = true};
  const SharedFolder folder;
  Sequential net = large_model();
  DistributedOptimizer optimizer(std::make_unique<torch::optim::Adam>(net->parameters(), 0.01),
                                 net->named_parameters(), options);
  train(net, optimizer, 0, 2);
  const double saving = peak_of([&] { Checkpoint(folder.file()).save(net, optimizer, 2); });
  const double file = static_cast<double>(std::filesystem::file_size(folder.file())) / kMiB;
  CHECK(file > 288);
  CHECK(saving < (hvd::rank() == 0 ? 1.3 : 0.1) * file);
  Sequential other = large_model();
  DistributedOptimizer resumed(std::make_unique<torch::optim::Adam>(other->parameters(), 0.01),
                               other->named_parameters(), options);
  const double loading =
      peak_of([&] { CHECK(Checkpoint(folder.file()).load(other, resumed) == 2); });
  const double share = 192.0 / hvd::size();
  CHECK(loading < 1.3 * share);
  MESSAGE("rank ", hvd::rank(), " of ", hvd::size(), ": file ", file, " MiB, save took ", saving,
          ", load ", loading, ", share of the state ", share);
  train(net, optimizer, 2, 3);
  train(other, resumed, 2, 3);
  CHECK(same(flat(other), flat(net)));
}

TEST_CASE("checkpoints: a state comes into parameters of another memory order, sharded or not") {
  const auto convolutions = [](at::MemoryFormat format) {
    torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(5, 7, 3)),
                              torch::nn::Conv2d(torch::nn::Conv2dOptions(7, 4, 3)));
    const torch::NoGradGuard no_gradient;
    int variant = 0;
    for (auto& parameter : net->parameters()) {
      parameter.set_data(data(parameter.sizes(), at::kFloat, 0, variant++) * 0.1);
      if (parameter.dim() == 4) parameter.set_data(parameter.detach().contiguous(format));
    }
    return net;
  };
  const auto step = [](torch::nn::Sequential& net, DistributedOptimizer& optimizer, int number) {
    optimizer.zero_grad();
    net->forward(data({2, 5, 8, 8}, at::kFloat, hvd::rank(), number)).square().mean().backward();
    optimizer.step();
  };
  for (const bool sharded : {false, true}) {
    CAPTURE(sharded);
    const hvd::DistributedOptimizerOptions options{.shard_optimizer_state = sharded};
    const SharedFolder folder;
    auto net = convolutions(at::MemoryFormat::ChannelsLast);
    DistributedOptimizer optimizer(std::make_unique<torch::optim::Adam>(net->parameters(), 0.01),
                                   net->named_parameters(), options);
    step(net, optimizer, 0);
    Checkpoint(folder.file()).save(net, optimizer, 1);
    auto other = convolutions(at::MemoryFormat::Contiguous);
    DistributedOptimizer resumed(std::make_unique<torch::optim::Adam>(other->parameters(), 0.01),
                                 other->named_parameters(), options);
    CHECK(Checkpoint(folder.file()).load(other, resumed) == 1);
    CHECK(same(flat(other), flat(net)));
    for (int number = 1; number < 3; ++number) {
      step(net, optimizer, number);
      step(other, resumed, number);
    }
    // convolutions add up in an order of their own in each format
    CHECK(torch::allclose(flat(other), flat(net), 1e-5, 1e-6));
    CHECK_FALSE(
        torch::allclose(flat(other), flat(convolutions(at::MemoryFormat::Contiguous)), 1e-5, 1e-3));
    // And what was read so is saved again as it is.
    Checkpoint(folder.file()).save(other, resumed, 3);
    auto third = convolutions(at::MemoryFormat::Contiguous);
    torch::optim::Adam alone(third->parameters(), 0.01);
    CHECK(Checkpoint(folder.file()).load(third, alone) == 3);
    step(other, resumed, 3);
    third->forward(data({2, 5, 8, 8}, at::kFloat, hvd::rank(), 3)).square().mean().backward();
    for (auto& parameter : third->parameters()) hvd::allreduce_(parameter.mutable_grad());
    alone.step();
    CHECK(torch::allclose(flat(other), flat(third), 1e-5, 1e-6));
  }
}

/// A part that keeps a tensor, and changes what it has read in place.
struct Doubling {
  at::Tensor kept;
  void save(torch::serialize::OutputArchive& archive) const { archive.write("kept", kept); }
  void load(torch::serialize::InputArchive& archive) {
    archive.read("kept", kept);
    kept.mul_(2);
  }
};

TEST_CASE(
    "checkpoints: what shares memory with the model in the file is there, too, and a part may "
    "change what it has read") {
  const SharedFolder folder;
  Sequential net = small_model();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  const at::Tensor weight = net->parameters()[0];
  Doubling part{weight.detach().clone()};
  Checkpoint(folder.file())
      .save(net, sgd, 3, {.tensors = {{"head", weight.detach()}, {"row", weight.detach()[1]}}},
            {part});
  Sequential other = small_model();
  {
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : other->parameters()) parameter.zero_();
  }
  torch::optim::SGD of_other(other->parameters(), 0.1);
  Doubling read{torch::zeros({}, at::kDouble)};
  Checkpoint::Extra extra;
  CHECK(Checkpoint(folder.file()).load(other, of_other, extra, {read}) == 3);
  CHECK(same(flat(other), flat(net)));
  CHECK(same(extra.tensors.at("head"), weight.detach()));
  CHECK(same(extra.tensors.at("row"), weight.detach()[1]));
  CHECK(same(read.kept, weight.detach() * 2));
}

TEST_CASE(
    "checkpoints: parameters of an optimizer in another order than in the file are refused on all "
    "ranks, by name") {
  const SharedFolder folder;
  Sequential net = small_model();
  const auto parameters = net->parameters();
  const auto named = net->named_parameters();
  const auto made = [&](std::vector<at::Tensor> order) {
    return DistributedOptimizer(std::make_unique<torch::optim::Adam>(std::move(order), 0.01), named,
                                {.shard_optimizer_state = true});
  };
  auto optimizer = made(parameters);
  small_loss(net, hvd::rank(), 0).backward();
  optimizer.step();
  Checkpoint(folder.file()).save(net, optimizer, 1);
  auto turned = made({parameters.rbegin(), parameters.rend()});
  const at::Tensor before = flat(net);
  const std::string text =
      error_of<CheckpointError>([&] { Checkpoint(folder.file()).load(net, turned); });
  CHECK_MESSAGE(contains(text, "parameter 0 of its optimizer is '0.weight'"), text);
  CHECK(same(flat(net), before));
}

TEST_CASE(
    "checkpoints: what is left of a file that was cut short, at any place, is refused on all ranks "
    "and changes nothing") {
  const SharedFolder folder;
  Sequential net = small_model();
  DistributedOptimizer optimizer(std::make_unique<torch::optim::Adam>(net->parameters(), 0.01),
                                 net->named_parameters());
  small_loss(net, hvd::rank(), 0).backward();
  optimizer.step();
  const Checkpoint checkpoint(folder.file());
  checkpoint.save(net, optimizer, 1);
  small_loss(net, hvd::rank(), 1).backward();
  optimizer.step();
  const at::Tensor before = flat(net);
  const auto whole = std::filesystem::file_size(folder.file());
  for (int part = 0; part < 8; ++part) {
    hvd::barrier();
    if (hvd::rank() == 0)
      std::filesystem::resize_file(folder.file(), whole * (7 - static_cast<unsigned>(part)) / 8);
    hvd::barrier();
    const std::string text = error_of<CheckpointError>([&] { checkpoint.load(net, optimizer); });
    CHECK_MESSAGE(contains(text, "rank 0: "), text);
    CHECK(same(flat(net), before));
  }
}

/// While it lives no file of this process may grow beyond so many bytes.
class FileLimit {
 public:
  explicit FileLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before_) == 0);
    const rlimit less{bytes, before_.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &less) == 0);
  }
  ~FileLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileLimit(const FileLimit&) = delete;
  FileLimit& operator=(const FileLimit&) = delete;

 private:
  void (*handler_)(int);
  rlimit before_{};
};

std::size_t files_in(const std::string& folder) {
  const std::filesystem::directory_iterator all(folder);
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

TEST_CASE("checkpoints: a disk that is full is told on all ranks, and the old file stays") {
  const SharedFolder folder;
  Sequential net = small_model();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  const Checkpoint checkpoint(folder.file());
  checkpoint.save(net, sgd, 1);
  std::string text;
  {
    std::optional<FileLimit> limit;
    if (hvd::rank() == 0) limit.emplace(100);
    text = error_of<CheckpointError>([&] { checkpoint.save(net, sgd, 2); });
  }
  CHECK_MESSAGE(contains(text, "rank 0: cannot write"), text);
  CHECK(checkpoint.load(net, sgd) == 1);
  CHECK(files_in(folder.file("")) == 1);
}

TEST_CASE("checkpoints: a save takes over what a killed one has left, and nothing of living ones") {
  const SharedFolder folder;
  Sequential net = small_model();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  const Checkpoint checkpoint(folder.file());
  std::string left;
  if (hvd::rank() == 0) {
    const hvd::detail::FreshFile first(folder.file());
    left = std::filesystem::directory_iterator(folder.file(""))->path().string();
  }
  for (int step = 1; step < 4; ++step) {
    if (hvd::rank() == 0) std::ofstream(left) << std::string(100'000, 'x');  // more than is written
    hvd::barrier();
    checkpoint.save(net, sgd, step);
    CHECK(files_in(folder.file("")) == 1);
    CHECK(checkpoint.load(net, sgd) == step);
  }
  std::optional<hvd::detail::FreshFile> living;
  if (hvd::rank() == 0) {
    living.emplace(folder.file());  // of another job
    living->write("all of it", 9);
  }
  hvd::barrier();
  checkpoint.save(net, sgd, 4);
  CHECK(checkpoint.load(net, sgd) == 4);
  hvd::barrier();
  if (hvd::rank() != 0) return;
  CHECK(files_in(folder.file("")) == 2);
  living->replace(1);
  CHECK(std::filesystem::file_size(folder.file()) == 9);
  CHECK(files_in(folder.file("")) == 1);
}

}  // namespace
}  // namespace checkpoint_reader
