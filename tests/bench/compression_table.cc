// This program measures what the lossy compressions cost and save: it trains a small convolutional
// network on synthetic images once with each, from the same start on the same batches. It prints a
// Markdown table: loss and accuracy at a third, two thirds and the end, and the bytes that each
// rank sends per step, if each collective sends as few as it can.
//   mpirun -np 4 compression_table [--steps N] [--batch-size N] [--lr R] [--seed N]
// Exit codes: 0 done, 1 failed, 2 wrong options.
#include <fmt/format.h>
#include <hvd/torch.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "examples/train/data/batches.h"

namespace {

struct Options {
  int steps = 180;
  int batch = 16;
  double rate = 0.05;
  std::uint64_t seed = 1;
};

struct Way {
  std::string name;
  hvd::Compression compression;
};

torch::nn::Sequential make_model(const Options& options) {
  torch::manual_seed(options.seed);
  using namespace torch::nn;
  const auto convolution = [](int in, int out) {
    return Conv2d(Conv2dOptions(in, out, 3).stride(2).padding(1).bias(false));
  };
  return Sequential(convolution(3, 32), BatchNorm2d(32), ReLU(), convolution(32, 64),
                    BatchNorm2d(64), ReLU(), convolution(64, 128), BatchNorm2d(128), ReLU(),
                    Flatten(), Linear(128 * 4 * 4, 128), ReLU(), Linear(128, 10));
}

hvd::Evaluation evaluate(torch::nn::Sequential& model, const examples::Dataset& data) {
  const torch::NoGradGuard no_gradient;
  model->eval();
  // Batch norm's statistics are of each rank's images; all ranks test the first rank's model.
  for (auto& buffer : model->buffers()) hvd::broadcast_(buffer, {.root_rank = 0});
  const auto batch = examples::make_batch(
      data, data.test, hvd::evaluation_share(static_cast<std::size_t>(data.test.size())));
  hvd::EvaluationTally tally;
  tally.add(model->forward(batch.data), batch.target);
  model->train();
  return tally.average();
}

std::string run(const Way& way, const Options& options, const examples::Dataset& data) {
  auto model = make_model(options);
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(options.rate).momentum(0.9));
  hvd::DistributedOptimizer optimizer(sgd, model->named_parameters(),
                                      {.compression = way.compression});
  hvd::ElasticSampler sampler(static_cast<std::size_t>(data.train.size()), true, options.seed);
  std::string row = fmt::format("| {} |", way.name);
  for (int step = 0; step < options.steps; ++step) {
    auto indices = sampler.next(static_cast<std::size_t>(options.batch));
    if (!indices || indices->size() < static_cast<std::size_t>(options.batch)) {
      sampler.set_epoch(sampler.epoch() + 1);
      indices = sampler.next(static_cast<std::size_t>(options.batch));
    }
    const auto batch = examples::make_batch(data, data.train, *indices);
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(model->forward(batch.data), batch.target).backward();
    optimizer.step();
    if ((step + 1) * 3 / options.steps == step * 3 / options.steps) continue;
    const auto result = evaluate(model, data);
    row += fmt::format(" {:.3f}, {:.1f} % |", result.loss, 100 * result.top1);
  }
  return row + fmt::format(" {:.0f} KiB |",
                           static_cast<double>(optimizer.bytes_sent()) / options.steps / 1024);
}

int compare(const Options& options) {
  const auto data = examples::make_synthetic({.train_images = 4000, .test_images = 1000});
  const std::vector<Way> ways{{"none", hvd::Compression::none()},
                              {"fp16", hvd::Compression::fp16()},
                              {"bf16", hvd::Compression::bf16()},
                              {"int8", hvd::Compression::int8()},
                              {"topk(0.01)", hvd::Compression::topk(0.01)},
                              {"topk(0.001)", hvd::Compression::topk(0.001)},
                              {"powersgd(4)", hvd::Compression::powersgd(4)},
                              {"powersgd(1)", hvd::Compression::powersgd(1)}};
  if (hvd::rank() == 0)
    fmt::print(
        "{} ranks, batch {} each, SGD with momentum 0.9, learning rate {}: test loss, accuracy "
        "after so many steps\n\n"
        "| compression | {} | {} | {} | sent per step and rank |\n|---|---|---|---|---|\n",
        hvd::size(), options.batch, options.rate, options.steps / 3, options.steps * 2 / 3,
        options.steps);
  for (const auto& way : ways) {
    const std::string row = run(way, options, data);
    if (hvd::rank() == 0) fmt::print("{}\n", row);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a small network once with each compression, and prints a table.",
               "compression_table");
  Options options;
  app.add_option("--steps", options.steps, "Steps of each (default 180)")
      ->check(CLI::Range(3, 1'000'000));
  app.add_option("--batch-size", options.batch, "Images per rank (default 16)")
      ->check(CLI::Range(2, 1000));
  app.add_option("--lr", options.rate, "Learning rate (default 0.05)")->check(CLI::PositiveNumber);
  app.add_option("--seed", options.seed, "Of weights and order (default 1)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return hvd::launcher_hints().rank.value_or(0) == 0 ? (app.exit(error) == 0 ? 0 : 2)
                                                       : (error.get_exit_code() == 0 ? 0 : 2);
  }
  try {
    hvd::init();
    const int code = compare(options);
    hvd::shutdown();
    return code;
  } catch (const std::exception& error) {
    fmt::print(stderr, "compression_table: {}\n", error.what());
    return 1;
  }
}
