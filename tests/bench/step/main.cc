// This program measures what communication costs a training step: the same step (SGD with momentum,
// or Adam) without communication, with the optimizer wrapped in hvd::DistributedOptimizer, and with
// one MPI_Allreduce per gradient by hand, in turn within one run. All are timed from barrier to
// barrier, so each figure is that of the slowest rank; the table has medians over the rounds.
//   mpirun -np 4 step_bench [rounds [batch]] [--model resnet18|resnet50|bert-base] ...; --help
//   lists the options
// Exit codes: 0 done, 1 failed, or --check found a difference, 2 wrong options.
#include <fmt/format.h>
#include <hvd/torch.h>
#include <mpi.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "examples/train/trainer/profile.h"
#include "examples/train/trainer/setup.h"
#include "tests/bench/step/options.h"
#include "tests/bench/step/report.h"
#include "tests/bench/step/subject.h"

namespace step_bench {
namespace {

int run(const Options& options) {
  const torch::Device device = examples::choose_device(options.device);
  const Batch batch(options, device);
  hvd::barrier();
  const double before = proportional_mebibytes();
  hvd::barrier();
  Subjects subjects;
  for (const auto& name : options.subjects)
    subjects.push_back(std::make_unique<Subject>(name, options, device));
  const auto start = options.check ? subjects.front()->flat() : torch::Tensor();
  examples::Profile profile(options.profile, /*skip=*/options.warmup, options.rounds);
  for (int round = -options.warmup; round < options.rounds; ++round) {
    profile.before_step();
    // Another one goes first every time: what a step leaves in the caches is nobody's advantage.
    for (std::size_t i = 0; i < subjects.size(); ++i)
      subjects[(i + static_cast<std::size_t>(round + options.warmup)) % subjects.size()]->step(
          batch, round >= 0);
  }
  const bool is_profiled = profile.finish();
  for (int update = 0; update < options.updates; ++update)
    for (std::size_t i = 0; i < subjects.size(); ++i)
      if (auto& subject = subjects[(i + static_cast<std::size_t>(update)) % subjects.size()];
          subject->is_hvd())
        subject->update();
  hvd::barrier();
  const double taken = proportional_mebibytes() - before;
  const double on_all =
      hvd::allreduce(torch::tensor(taken), {.name = "step_bench.memory", .op = hvd::ReduceOp::Sum})
          .item<double>();
  bool failed = false;
  if (options.check) {
    const std::string found = mistakes(subjects, start);
    if (!found.empty()) fmt::print(stderr, "step_bench: rank {}: {}\n", hvd::rank(), found);
    failed = hvd::allreduce(torch::tensor(found.empty() ? 0 : 1),
                            {.name = "step_bench.failed", .op = hvd::ReduceOp::Max})
                 .item<int>() != 0;
  }
  if (hvd::rank() == 0) {
    const nlohmann::ordered_json json = report(options, subjects, on_all);
    if (options.check) fmt::print("# checked: {}\n", failed ? "FAILED" : "OK");
    if (is_profiled) fmt::print("# the profile is in {}\n", options.profile);
    if (!options.json.empty()) {
      std::ofstream file(options.json);
      file << json.dump(2) << "\n";
      if (!file.flush()) {
        fmt::print(stderr, "step_bench: --json {}: could not be written\n", options.json);
        failed = true;
      }
    }
  }
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace step_bench

int main(int argc, char** argv) {
  CLI::App app(
      "What communication costs a training step: without it, with hvd, and with MPI_Allreduce by "
      "hand, in turn.",
      "step_bench");
  app.get_formatter()->column_width(40);
  step_bench::Options options;
  step_bench::add_options(app, options);
  const bool speaks = hvd::launcher_hints().rank.value_or(0) == 0;
  try {
    app.parse(argc, argv);
    if (options.subjects.empty()) options.subjects = {"none", "hvd"};
    if (app.count("--subjects") == 0 && options.device == "cpu")
      options.subjects.emplace_back("mpi");
    if (const auto wrong = step_bench::wrong_with(options); !wrong.empty())
      throw CLI::ValidationError(wrong);
  } catch (const CLI::CallForHelp&) {
    if (speaks) std::fputs(app.help().c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    if (speaks) fmt::print(stderr, "step_bench: {}; --help lists the options\n", error.what());
    return 2;
  }
  try {
    int level = MPI_THREAD_SINGLE;
    // before hvd, which then adopts it: also a world of one has MPI
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
    hvd::init();
    const int code = step_bench::run(options);
    hvd::shutdown();
    MPI_Finalize();
    return code;
  } catch (const c10::Error& error) {
    fmt::print(stderr, "step_bench: {}\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    fmt::print(stderr, "step_bench: {}\n", error.what());
    return 1;
  }
}
