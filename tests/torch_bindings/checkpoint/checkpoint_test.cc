// Checkpoint: atomic files that bring everything back, on as many ranks or another number of them.
#include <sys/stat.h>

#include <fstream>
#include <functional>
#include <memory>
#include <sstream>

#include "tests/torch_bindings/shared_folder.h"
#include "tests/torch_bindings/support.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/files/archives.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat;
using hvd::Checkpoint;
using hvd::DistributedOptimizer;

/// Batch norm has buffers, dropout uses random numbers.
torch::nn::Sequential noisy_model() {
  torch::nn::Sequential net(torch::nn::Linear(6, 40), torch::nn::BatchNorm1d(40),
                            torch::nn::Dropout(0.3), torch::nn::Linear(40, 3));
  net->to(kDouble);
  const torch::NoGradGuard no_gradient;
  int variant = 0;
  for (auto& parameter : net->parameters())
    parameter.copy_(data(parameter.sizes(), kDouble, 0, variant++) * 0.2);
  return net;
}

struct InterruptedRun {
  explicit InterruptedRun(const hvd::DistributedOptimizerOptions& options = {}, double rate = 0.01)
      : adam(net->parameters(), torch::optim::AdamOptions(rate)),
        optimizer(adam, net->named_parameters(), options) {}
  void steps(int begin, int end) {
    for (int step = begin; step < end; ++step) {
      optimizer.zero_grad();
      const at::Tensor x = data({8, 6}, kDouble, hvd::rank(), step),
                       y = data({8, 3}, kDouble, hvd::rank(), step + 1);
      torch::mse_loss(net->forward(x), y).backward();
      optimizer.step();
    }
  }
  [[nodiscard]] bool equals(const InterruptedRun& other) const {
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      if (!torch::equal(net->parameters()[i], other.net->parameters()[i])) return false;
    for (std::size_t i = 0; i < net->buffers().size(); ++i)
      if (!torch::equal(net->buffers()[i], other.net->buffers()[i])) return false;
    return true;
  }
  torch::nn::Sequential net = noisy_model();
  torch::optim::Adam adam;
  DistributedOptimizer optimizer;
};

TEST_CASE("checkpoint: a run taken up again goes on with the same bits") {
  const std::vector<std::pair<std::string, hvd::DistributedOptimizerOptions>> ways{
      {"plain", {}},
      {"sharded", {.shard_optimizer_state = true}},
      {"int8", {.compression = hvd::Compression::int8()}},
      {"topk", {.compression = hvd::Compression::topk(0.1)}},
      {"powersgd, sharded",
       {.compression = hvd::Compression::powersgd(2), .shard_optimizer_state = true}}};
  for (const auto& [name, options] : ways) {
    CAPTURE(name);
    const SharedFolder folder;
    torch::manual_seed(7 + hvd::rank());
    InterruptedRun unbroken(options);
    const Checkpoint checkpoint(folder.file(), {.keep_last = 5});
    CHECK(!checkpoint.exists());
    for (int step = 0; step < 5; ++step) {  // one before each step
      checkpoint.save(unbroken.net, unbroken.optimizer, step);
      unbroken.steps(step, step + 1);
    }
    CHECK(checkpoint.exists());
    for (int stop = 0; stop < 5; ++stop) {
      CAPTURE(stop);
      torch::manual_seed(99);
      InterruptedRun resumed(options);
      if (stop % 2 == 0) resumed.steps(20, 22);  // has something to forget
      const Checkpoint file(
          folder.file(stop == 4 ? "run.pt" : "run.pt." + std::to_string(4 - stop)));
      CHECK(file.load(resumed.net, resumed.optimizer) == stop);
      resumed.steps(stop, 5);
      CHECK(unbroken.equals(resumed));  // batch norm's statistics too, which are each rank's own
    }
  }
}

TEST_CASE("checkpoint: buffers of single ranks, and their means for another number of ranks") {
  const SharedFolder folder;
  for (const bool average : {false, true}) {
    CAPTURE(average);
    torch::nn::BatchNorm1d layer(3);
    layer->to(kDouble);
    torch::optim::SGD sgd(layer->parameters(), 0.1);
    layer->running_mean.fill_(hvd::rank() + 1);
    const Checkpoint checkpoint(folder.file(), {.average_buffers = average});
    checkpoint.save(layer, sgd, 1);
    CHECK(layer->running_mean[0].item<double>() == hvd::rank() + 1);  // as it was
    layer->running_mean.fill_(-5);
    layer->running_var.fill_(-5);
    checkpoint.load(layer, sgd);
    CHECK(layer->running_mean[0].item<double>() == hvd::rank() + 1);
    CHECK(layer->running_var[0].item<double>() == 1);
    const auto first = hvd::add_process_set({0});
    if (first.included() && hvd::size() > 1) {
      Checkpoint(folder.file(), {.process_set = first}).load(layer, sgd);
      CHECK(layer->running_mean[0].item<double>() == (average ? (1 + hvd::size()) / 2.0 : 1));
    }
    hvd::remove_process_set(first);
  }
}

/// A module with nothing but these.
struct Buffers : torch::nn::Module {
  explicit Buffers(const hvd::NamedTensors& buffers) {
    register_parameter("weight", torch::ones({2}));
    for (const auto& [name, tensor] : buffers) register_buffer(name, tensor);
  }
};

TEST_CASE(
    "checkpoint: buffers that differ between ranks are refused on all of them, before anything "
    "waits for them") {
  const SharedFolder folder;
  const at::Tensor mean = torch::zeros({3}), count = torch::zeros({}, at::kLong);
  const std::vector<std::pair<hvd::NamedTensors, std::string>> others{
      {{}, "no buffer 0 'mean', no buffer 1 'count'"},
      {{{"mean", mean}}, "no buffer 1 'count'"},
      {{{"mean", mean}, {"count", count}, {"more", mean}}, "buffer 2 'more' is Float [3]"},
      {{{"mean", torch::zeros({4})}, {"count", count}}, "buffer 0 'mean' is Float [4]"},
      {{{"mean", mean.to(kDouble)}, {"count", count}}, "buffer 0 'mean' is Double [3]"},
      {{{"mean", mean}, {"sum", count}}, "no buffer 1 'count', buffer 1 'sum' is Long []"},
      {{{"count", count}, {"mean", mean}}, "no buffer 0 'mean', no buffer 1 'count'"},
      {{{"mean", at::Tensor()}, {"count", count}}, "no buffer 0 'mean', no buffer 1 'count'"},
  };
  const Buffers usual({{"mean", mean}, {"count", count}});
  for (const bool average : {false, true}) {
    const Checkpoint checkpoint(folder.file(), {.average_buffers = average});
    for (const auto& [other, said] : others) {
      const Buffers module(
          last() && hvd::size() > 1 ? other : hvd::NamedTensors{{"mean", mean}, {"count", count}});
      torch::optim::SGD sgd(module.parameters(), 0.1);
      if (hvd::size() == 1) {
        checkpoint.save(module, sgd, 1);
        continue;
      }
      const std::string text = error_of<hvd::Mismatch>([&] { checkpoint.save(module, sgd, 1); });
      CAPTURE(text);
      CHECK(contains(text, "run.pt"));
      CHECK(contains(text, "; rank " + std::to_string(hvd::size() - 1) + ": " + said));
    }
    torch::optim::SGD sgd(usual.parameters(), 0.1);
    checkpoint.save(usual, sgd, 2);  // and goes on
    CHECK(checkpoint.exists());
  }
  if (hvd::size() == 1) return;
  const Checkpoint unlike(folder.file(), {.average_buffers = last()});
  torch::optim::SGD sgd(usual.parameters(), 0.1);
  CHECK(contains(error_of<hvd::Mismatch>([&] { unlike.save(usual, sgd, 1); }),
                 grouping("average_buffers is false", "average_buffers is true")));
}

TEST_CASE("checkpoint: what a DistributedDataParallel's compression remembers goes on") {
  const SharedFolder folder;
  struct Run {
    Run() : ddp(net, {.compression = hvd::Compression::topk(0.1)}), sgd(ddp.parameters(), 0.1) {}
    void steps(int begin, int end) {
      for (int step = begin; step < end; ++step) {
        sgd.zero_grad();
        torch::mse_loss(ddp.forward(data({8, 6}, kDouble, hvd::rank(), step)),
                        data({8, 3}, kDouble, hvd::rank(), step + 1))
            .backward();
        sgd.step();
      }
    }
    [[nodiscard]] Checkpoint file(const std::string& path) const {
      return Checkpoint(path, {.of_rank = [this] { return ddp.compression_memory(); }});
    }
    torch::nn::Sequential net = small_model();
    hvd::DistributedDataParallel<torch::nn::SequentialImpl> ddp;
    torch::optim::SGD sgd;
  };
  Run unbroken, resumed;
  unbroken.steps(0, 3);
  unbroken.file(folder.file()).save(unbroken.net, unbroken.sgd, 3);
  unbroken.steps(3, 6);
  resumed.steps(7, 9);
  CHECK(resumed.file(folder.file()).load(resumed.net, resumed.sgd) == 3);
  resumed.steps(3, 6);
  CHECK(same(flat(unbroken.net), flat(resumed.net)));
  if (hvd::size() > 1)
    CHECK(resumed.ddp.compression_memory().front().abs().max().item<double>() > 0);
}

TEST_CASE("checkpoint: a run that goes on with fewer ranks ends where one process ends") {
  constexpr int kRows = 12;  // of each step's batch, cut among the ranks there are
  const auto steps = [](torch::nn::Sequential& net, auto& optimizer, int rank, int ranks, int begin,
                        int end) {
    const int share = kRows / ranks;
    for (int step = begin; step < end; ++step) {
      const auto own = [&](std::int64_t width, int variant) {
        return data({kRows, width}, kDouble, 0, variant).slice(0, rank * share, (rank + 1) * share);
      };
      optimizer.zero_grad();
      torch::mse_loss(net->forward(own(6, step)), own(3, step + 1)).backward();
      optimizer.step();
    }
  };
  const SharedFolder folder;
  std::vector<int> others;
  for (int rank = std::min(1, hvd::size() - 1); rank < hvd::size(); ++rank) others.push_back(rank);
  const auto fewer = hvd::add_process_set(others);
  for (const bool shard : {false, true}) {
    CAPTURE(shard);
    torch::nn::Sequential net = small_model();
    torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.01));
    {
      DistributedOptimizer optimizer(adam, net->named_parameters(),
                                     {.shard_optimizer_state = shard});
      steps(net, optimizer, hvd::rank(), hvd::size(), 0, 4);
      Checkpoint(folder.file()).save(net, optimizer, 4);
    }
    if (fewer.included()) {
      torch::nn::Sequential resumed = small_model();
      torch::optim::Adam again(resumed->parameters(), torch::optim::AdamOptions(0.01));
      DistributedOptimizer optimizer(again, resumed->named_parameters(),
                                     {.process_set = fewer, .shard_optimizer_state = shard});
      CHECK(Checkpoint(folder.file(), {.process_set = fewer}).load(resumed, optimizer) == 4);
      steps(resumed, optimizer, fewer.rank(), fewer.size(), 4, 9);
      torch::nn::Sequential unbroken = small_model();
      torch::optim::Adam reference(unbroken->parameters(), torch::optim::AdamOptions(0.01));
      steps(unbroken, reference, 0, 1, 0, 9);
      CHECK(difference(flat(resumed), flat(unbroken)) < 1e-12);
      CHECK(difference(flat(net), flat(unbroken)) > 1e-3);
    }
    hvd::barrier();
  }
  hvd::remove_process_set(fewer);
}

TEST_CASE("checkpoint: read by another number of ranks, sharded or not") {
  const SharedFolder folder;
  InterruptedRun all({.shard_optimizer_state = true});
  all.net->eval();  // no dropout, and the same statistics everywhere
  all.steps(0, 3);
  Checkpoint(folder.file()).save(all.net, all.optimizer, 3);
  std::vector<int> others;
  for (int rank = 1; rank < hvd::size(); ++rank) others.push_back(rank);
  if (others.empty()) others.push_back(0);
  const auto fewer = hvd::add_process_set(others);
  if (fewer.included()) {
    const Checkpoint checkpoint(folder.file(), {.process_set = fewer});
    InterruptedRun sharded({.process_set = fewer, .shard_optimizer_state = true}),
        plain({.process_set = fewer});
    for (auto* run : {&sharded, &plain}) {
      run->net->eval();
      CHECK(checkpoint.load(run->net, run->optimizer) == 3);
      CHECK(run->equals(all));
      run->steps(3, 6);
    }
    CHECK(sharded.equals(plain));
    CHECK(!sharded.equals(all));
  }
  hvd::remove_process_set(fewer);
}

TEST_CASE("checkpoint: extra state, options, files that stay, a plain optimizer") {
  const SharedFolder folder;
  const Checkpoint checkpoint(folder.file("deep/er/run.pt"));
  torch::nn::Linear layer(3, 2);
  hvd::broadcast_parameters(layer, 0);
  torch::optim::SGD sgd(layer->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
  layer->forward(torch::ones({1, 3})).sum().backward();
  sgd.step();
  const std::string bytes("a\0b\n", 4);
  const auto random = [] { return at::globalContext().defaultGenerator(at::kCPU).get_state(); };
  const at::Tensor saved = random();
  checkpoint.save(layer, sgd, 1,
                  {.strings = {{"sampler", bytes}, {"nothing", ""}},
                   .tensors = {{"mean", torch::arange(5) + hvd::rank()}}});
  for (const bool load_options : {true, false}) {
    torch::optim::SGD other(layer->parameters(), torch::optim::SGDOptions(0.25));
    Checkpoint::Extra extra;
    torch::rand({2});
    const at::Tensor now = random();
    const Checkpoint partly(checkpoint.path(),
                            {.load_options = load_options, .random_state = load_options});
    CHECK(partly.load(layer, other, extra) == 1);
    CHECK(torch::equal(random(), load_options ? saved : now));
    CHECK(extra.strings == std::map<std::string, std::string>{{"sampler", bytes}, {"nothing", ""}});
    CHECK(torch::equal(extra.tensors.at("mean"), torch::arange(5)));
    CHECK(other.param_groups()[0].options().get_lr() == (load_options ? 0.5 : 0.25));
    CHECK(other.state().size() == 2);
  }
  CHECK(checkpoint.read_extra().strings.at("sampler") == bytes);

  const Checkpoint three(folder.file(), {.keep_last = 3});
  const auto found = [&](const std::string& name) {
    return Checkpoint(folder.file(name)).load(layer, sgd);
  };
  for (int step = 1; step <= 5; ++step) {
    three.save(layer, sgd, step);
    CHECK(found("run.pt") == step);
    if (step >= 2) CHECK(found("run.pt.1") == step - 1);
    if (step >= 3) CHECK(found("run.pt.2") == step - 2);
    CHECK(!Checkpoint(folder.file("run.pt.3")).exists());
  }
}

/// Writes a file as the first versions did: what is of single ranks had the places of its buffers,
/// and before that none of them.
void write_as_before(const std::string& path, torch::nn::Sequential& net, torch::optim::Adam& adam,
                     bool with_places) {
  torch::serialize::OutputArchive archive, of_model(archive.compilation_unit()),
      of_optimizer(archive.compilation_unit());
  net->save(of_model);
  adam.save(of_optimizer);
  std::vector<at::Tensor> ranks;
  for (int rank = 0; rank < hvd::size(); ++rank) {
    torch::serialize::OutputArchive of_rank;
    of_rank.write("random", c10::IValue(std::vector<at::Tensor>()));
    of_rank.write("memory", c10::IValue(std::vector<at::Tensor>()));
    if (with_places) {
      of_rank.write("places", c10::IValue(std::vector<std::int64_t>{1}));
      of_rank.write("buffers",
                    c10::IValue(std::vector<at::Tensor>{torch::full({40}, rank + 2.0, kDouble)}));
    }
    ranks.push_back(hvd::detail::bytes_of_text(hvd::detail::text_of(of_rank)));
  }
  archive.write("format", c10::IValue("hvd checkpoint 1"));
  archive.write("step", c10::IValue(std::int64_t{3}));
  archive.write("model", of_model);
  archive.write("optimizer", of_optimizer);
  archive.write("ranks", c10::IValue(ranks));
  for (const char* const extra : {"extra_strings", "extra_tensors"})
    archive.write(extra, c10::IValue(c10::Dict<std::string, at::Tensor>()));
  archive.save_to(path);
}

TEST_CASE("checkpoint: files of the first versions, without names of buffers or parts, are read") {
  for (const bool with_places : {false, true}) {
    CAPTURE(with_places);
    const SharedFolder folder;
    torch::nn::Sequential net = noisy_model(), other = noisy_model();
    torch::optim::Adam adam(net->parameters(), 0.01), resumed(other->parameters(), 0.5);
    net->forward(data({8, 6}, kDouble, hvd::rank(), 0)).square().sum().backward();
    adam.step();
    if (hvd::rank() == 0) write_as_before(folder.file(), net, adam, with_places);
    hvd::broadcast_parameters(*net, 0);
    CHECK(Checkpoint(folder.file()).load(other, resumed) == 3);
    CHECK(same(flat(other), flat(net)));
    CHECK(resumed.state().size() == net->parameters().size());
    CHECK(resumed.param_groups()[0].options().get_lr() == 0.01);
    const auto mean = [](const torch::nn::Sequential& of) { return of->buffers()[0]; };
    const auto variance = [](const torch::nn::Sequential& of) { return of->buffers()[1]; };
    CHECK(torch::equal(mean(other), mean(net)));
    CHECK(torch::equal(variance(other), with_places ? torch::full({40}, hvd::rank() + 2.0, kDouble)
                                                    : variance(net)));
  }
}

TEST_CASE("checkpoint: of a module that a std::shared_ptr holds") {
  const SharedFolder folder;
  const Checkpoint checkpoint(folder.file());
  const auto net = std::make_shared<torch::nn::LinearImpl>(3, 2);
  hvd::broadcast_parameters(net, 0);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.5));
  hvd::StepSchedule schedule(sgd, 2, 0.5);
  const at::Tensor before = net->weight.detach().clone();
  const auto load_into = [&](const std::function<std::int64_t()>& load) {
    const torch::NoGradGuard no_gradient;
    net->weight.zero_();
    CHECK(load() == 7);
    CHECK(torch::equal(net->weight, before));
  };
  Checkpoint::Extra extra;
  checkpoint.save(net, sgd, 7);
  load_into([&] { return checkpoint.load(net, sgd); });
  checkpoint.save(net, sgd, 7, {.strings = {{"a", "b"}}});
  load_into([&] { return checkpoint.load(net, sgd, extra); });
  CHECK(extra.strings.at("a") == "b");
  checkpoint.save(net, sgd, 7, {schedule});
  load_into([&] { return checkpoint.load(net, sgd, {schedule}); });
  checkpoint.save(net, sgd, 7, {.strings = {{"c", "d"}}}, {schedule});
  load_into([&] {
    return checkpoint.load(std::shared_ptr<torch::nn::Module>(net), sgd, extra, {schedule});
  });
  CHECK(extra.strings.at("c") == "d");
  const std::shared_ptr<torch::nn::Module> none;
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { checkpoint.save(none, sgd, 1); }),
                 "Checkpoint: a null pointer"));
}

TEST_CASE(
    "checkpoint: what cannot be read or written is an error on all ranks, and changes nothing") {
  const SharedFolder folder;
  const Checkpoint checkpoint(folder.file());
  torch::nn::Linear layer(3, 2);
  hvd::broadcast_parameters(layer, 0);
  torch::optim::SGD sgd(layer->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
  const at::Tensor before = layer->weight.detach().clone();
  const auto refused = [&] {
    return error_of<hvd::CheckpointError>([&] { checkpoint.load(layer, sgd); });
  };
  CHECK(contains(refused(), "run.pt"));
  CHECK(contains(refused(), "No such file"));
  checkpoint.save(layer, sgd, 1);
  std::string whole;
  if (hvd::rank() == 0) {
    std::ifstream in(folder.file(), std::ios::binary);
    whole.assign(std::istreambuf_iterator<char>(in), {});
  }
  const auto put = [&](const std::string& text) {
    hvd::barrier();
    if (hvd::rank() == 0) std::ofstream(folder.file(), std::ios::binary) << text;
    hvd::barrier();
  };
  const std::size_t bytes = hvd::broadcast_object(whole.size(), 0);
  for (const std::size_t length : {std::size_t{0}, std::size_t{10}, bytes / 2, bytes - 1}) {
    CAPTURE(length);
    put(whole.substr(0, std::min(length, whole.size())));
    CHECK(contains(refused(), length == 0 ? "it is empty" : "damaged"));
  }
  put(std::string(1000, 'x'));
  CHECK(contains(refused(), "damaged"));
  std::ostringstream other;  // an archive of something else
  torch::save(torch::ones({3}), other);
  put(other.str());
  CHECK(contains(refused(), "no checkpoint"));
  put(whole);
  torch::nn::Linear wide(4, 2);
  torch::optim::SGD of_wide(wide->parameters(), torch::optim::SGDOptions(0.5));
  CHECK(contains(error_of<hvd::CheckpointError>([&] { checkpoint.load(wide, of_wide); }),
                 "'weight' has shape [2, 3], the model's has [2, 4]"));
  torch::nn::Sequential nested(torch::nn::Linear(3, 2));
  CHECK(contains(error_of<hvd::CheckpointError>([&] { checkpoint.load(nested, sgd); }),
                 "no module '0'"));
  torch::optim::SGD turned({layer->bias, layer->weight},
                           torch::optim::SGDOptions(0.5).momentum(0.9));
  CHECK(contains(error_of<hvd::CheckpointError>([&] { checkpoint.load(layer, turned); }),
                 "parameter 0 of its optimizer is 'weight', of the one here 'bias'"));
  const Checkpoint nowhere(folder.file() + "/below/run.pt");
  CHECK(contains(error_of<hvd::CheckpointError>([&] { nowhere.save(layer, sgd, 1); }), "rank 0"));
  CHECK(contains(error_of<hvd::InvalidArgument>([] { Checkpoint(""); }), "path"));
  CHECK(contains(error_of<hvd::InvalidArgument>([] { Checkpoint("x", {.keep_last = 0}); }),
                 "keep_last"));
  CHECK(torch::equal(layer->weight, before));
  CHECK(checkpoint.load(layer, sgd) == 1);
}

}  // namespace
