#include "tests/bench/step/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace step_bench {

void add_options(CLI::App& app, Options& options) {
  const CLI::Range at_least_1(1, std::numeric_limits<int>::max());
  app.add_option("-m,--model", options.model, "resnet18 (default), resnet50 or bert-base")
      ->check(CLI::IsMember({"resnet18", "resnet50", "bert-base"}));
  app.add_option("-s,--subjects", options.subjects,
                 "What is measured, in turn: none (no communication), hvd, hvd-fp16, hvd-bf16, "
                 "hvd-sharded (optimizer state shared out: ZeRO stage 1), hvd-zero2 (gradients "
                 "too), hvd-shared (one copy of the parameters per host), mpi (default "
                 "none,hvd,mpi; on a GPU none,hvd). Each has a copy of the model")
      ->delimiter(',')
      ->check(CLI::IsMember({"none", "hvd", "hvd-fp16", "hvd-bf16", "hvd-sharded", "hvd-zero2",
                             "hvd-shared", "mpi"}));
  app.add_option("--device", options.device, "cpu (default) or cuda: the GPUs of the host, in turn")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--amp", options.amp,
                 "Forward in mixed precision: bf16, on a GPU also fp16 (default: none)")
      ->check(CLI::IsMember({"bf16", "fp16"}));
  app.add_option("-n,--rounds,rounds", options.rounds, "Measured steps of each (default 20)")
      ->check(at_least_1);
  app.add_option("-w,--warmup", options.warmup, "Steps before them that do not count (default 3)")
      ->check(CLI::Range(0, 1'000'000));
  app.add_option("-b,--batch-size,batch", options.batch, "Images or sequences per rank (default 4)")
      ->check(at_least_1);
  app.add_option("--image-size", options.side, "ResNets: pixels per side (default 32)")
      ->check(at_least_1);
  app.add_option("--classes", options.classes, "Of the classifier (default 100)")
      ->check(at_least_1);
  app.add_option("--sequence", options.sequence, "bert-base: tokens (default 128)")
      ->check(CLI::Range(1, 512));
  app.add_option("--layers", options.bert.layers, "bert-base: fewer than its 12 for small machines")
      ->check(at_least_1);
  app.add_option("--width", options.bert.width,
                 "bert-base: less than its 768, a multiple of --heads")
      ->check(at_least_1);
  app.add_option("--heads", options.bert.heads, "bert-base: fewer than its 12")->check(at_least_1);
  app.add_option("--vocabulary", options.bert.vocabulary, "bert-base: words, fewer than its 30522")
      ->check(at_least_1);
  app.add_option("--optimizer", options.optimizer, "sgd (with momentum, default) or adam")
      ->check(CLI::IsMember({"sgd", "adam"}));
  app.add_option("--updates", options.updates,
                 "Then measure step() alone, of gradients already reduced, so many times for each "
                 "hvd subject, in turn (default 0)")
      ->check(CLI::Range(0, 1'000'000));
  app.add_flag("-c,--check", options.check,
               "Compare the parameters at the end: those of hvd are the same on all ranks, and "
               "moved as those of mpi did");
  app.add_option("--json", options.json, "Write the results to this file too");
  app.add_option("--profile", options.profile,
                 "File for a profile of the measured steps, of LibTorch and of hvd, for Perfetto "
                 "and overlap.py; it makes them a little slower");
}

std::string wrong_with(const Options& options) {
  if (options.bert.width % options.bert.heads != 0)
    return fmt::format("--width {} is not a multiple of --heads {}", options.bert.width,
                       options.bert.heads);
  if (options.model != "bert-base" && options.batch == 1 && options.side <= 32)
    return fmt::format(
        "--batch-size 1 with --image-size {}: the last batch norm needs more than one value; take "
        "2, or larger images",
        options.side);
  if (options.device == "cuda" &&
      std::count(options.subjects.begin(), options.subjects.end(), "mpi") > 0)
    return "--subjects mpi: MPI_Allreduce by hand is for gradients on the host";
  if (options.device == "cpu" && options.amp == "fp16") return "--amp fp16: on a GPU only";
  if (options.updates > 0 &&
      std::count(options.subjects.begin(), options.subjects.end(), "hvd-zero2") > 0)
    return "--updates steps again and again with the same gradients, which hvd-zero2 gives up at "
           "each step";
  if (options.check && options.updates > 0)
    return "--check compares what the same steps came to; not with --updates";
  if (options.check && options.optimizer != "sgd") return "--check goes with --optimizer sgd";
  for (const auto& subject : options.subjects)
    if (std::count(options.subjects.begin(), options.subjects.end(), subject) > 1)
      return "--subjects: " + subject + " is there twice";
  return {};
}

}  // namespace step_bench
