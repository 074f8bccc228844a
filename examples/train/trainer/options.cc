#include "examples/train/trainer/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <sstream>
#include <system_error>

#include "examples/train/data/dataset.h"
#include "examples/train/models/models.h"

namespace examples {
namespace {

/// A finite number, `least` or above it (or, where `open`, only above it).
CLI::Validator number(const std::string& words, double least, bool open) {
  return CLI::Validator(
      [=](const std::string& text) {
        char* end = nullptr;
        const double value = std::strtod(text.c_str(), &end);
        const bool good = end != text.c_str() && *end == '\0' && std::isfinite(value) &&
                          (open ? value > least : value >= least);
        return good ? std::string() : "'" + text + "' is not " + words;
      },
      words);
}

/// A number with zeros before it, as of an array of jobs, is none of base 8.
void drop_zeros(std::string& number) {
  number.erase(0, std::min(number.find_first_not_of('0'), number.size() - 1));
}

/// To be used as a transform.
CLI::Validator whole(std::int64_t least) {
  const auto words = "a whole number from " + std::to_string(least) + " to 1000000000";
  return CLI::Validator(
      [=](std::string& text) {
        if (!text.empty()) drop_zeros(text);
        const bool digits = !text.empty() && text.size() <= 10 &&
                            text.find_first_not_of("0123456789") == std::string::npos;
        const std::int64_t value = digits ? std::stoll(text) : -1;
        return digits && value >= least && value <= 1'000'000'000
                   ? std::string()
                   : "'" + text + "' is not " + words;
      },
      words);
}

CLI::Validator seed_number() {
  const std::string words =
      "a whole number from 0 to " + std::to_string(std::numeric_limits<std::uint64_t>::max());
  return CLI::Validator(
      [=](std::string& text) {
        if (!text.empty()) drop_zeros(text);
        std::uint64_t value = 0;
        const char* const end = text.data() + text.size();
        const auto [stop, error] = std::from_chars(text.data(), end, value);
        return stop == end && error == std::errc() ? std::string()
                                                   : "'" + text + "' is not " + words;
      },
      words);
}

/// A file or folder: "" is a variable of a shell that was meant to have one.
CLI::Validator path() {
  return CLI::Validator(
      [](const std::string& text) {
        return text.empty() ? std::string("'' is no name of a file or folder") : std::string();
      },
      "");
}

CLI::Validator one_of(const std::vector<std::string>& names) {
  std::string words;
  for (const auto& name : names) words += (words.empty() ? "" : "|") + name;
  return CLI::Validator(
      [=](const std::string& text) {
        const bool good = std::find(names.begin(), names.end(), text) != names.end();
        return good ? std::string() : "'" + text + "' is not one of " + words;
      },
      words);
}

CLI::Validator model_name() {
  const CLI::Validator names = one_of(model_names());
  return CLI::Validator(
      [=](std::string& text) {
        if (is_script(text)) return std::string();
        const std::string wrong = names(text);
        return wrong.empty() ? wrong : wrong + " or script:FILE";
      },
      names.get_description() + "|script:FILE");
}

CLI::Validator share() {
  const auto number_from_0 = number("a number from 0, below 1", 0, false);
  return CLI::Validator(
      [=](std::string& text) {
        const std::string wrong = number_from_0(text);
        return wrong.empty() && std::strtod(text.c_str(), nullptr) >= 1
                   ? "'" + text + "' is not a number from 0, below 1"
                   : wrong;
      },
      "a number from 0, below 1");
}

void add_image_options(CLI::App& app, Options& options) {
  app.add_option("--image-size", options.image_size,
                 "Of --dataset folder: pixels of a side, cut out of the images")
      ->transform(whole(1));
  app.add_option(
         "--resize", options.resize,
         "Of --dataset folder: pixels of the shorter side, of which the middle is evaluated")
      ->transform(whole(1))
      ->default_str("image size * 256 / 224");
  app.add_flag("--jpeg-scaling,!--no-jpeg-scaling", options.jpeg_scaling,
               "Of --dataset folder: JPEG files of at least twice the pixels are decoded to a "
               "half, quarter or eighth (default): faster, "
               "and not bit for bit the same");
  app.add_option("--bad-images", options.bad_images,
                 "Of --dataset folder, files that cannot be used; skip: others stand in for them; "
                 "refuse: training ends")
      ->check(one_of({"skip", "refuse"}));
  app.add_option("--classes", options.classes, "Scores of the network")
      ->transform(whole(1))
      ->default_str("classes of the dataset");
}

void add_rate_options(CLI::App& app, Options& options) {
  app.add_option("--lr-schedule", options.schedule, "How the learning rate falls")
      ->check(one_of({"none", "step", "cosine"}));
  app.add_option_function<std::string>(
         "--lr-steps",
         [&options](const std::string& text) {
           try {
             options.lr_steps = parse_steps(text);
           } catch (const std::invalid_argument& error) {
             throw CLI::ValidationError("--lr-steps", error.what());
           }
         },
         "Of --lr-schedule step: after these epochs it is multiplied by --lr-gamma")
      ->default_str("30,60,80");
  app.add_option("--lr-gamma", options.lr_gamma, "Of --lr-schedule step")
      ->check(number("a number above 0", 0, true));
  app.add_option("--warmup-epochs", options.warmup_epochs,
                 "Epochs in which the learning rate grows to its value")
      ->check(number("a number from 0", 0, false));
  app.add_flag("--scale-lr", options.scale_lr,
               "Multiply the learning rate by the number of ranks and --accumulate");
  app.add_option("--label-smoothing", options.label_smoothing,
                 "Share of each label that is spread over all classes")
      ->check(share());
  app.add_flag("--decay-norm-bias,!--no-decay-norm-bias", options.decay_all,
               "Weight decay of norms and biases too (default), or of weights of two and more "
               "dimensions alone");
  app.add_option("--clip-norm", options.clip_norm, "Largest norm of all gradients together")
      ->check(number("a number above 0", 0, true))
      ->default_str("none");
  app.add_option("--ema", options.ema,
                 "Evaluate an average of the parameters over steps, with this decay")
      ->check(share())
      ->default_str("none");
}

void add_report_options(CLI::App& app, Options& options) {
  app.add_flag("--evaluate", options.evaluate,
               "No training: evaluate --weights, or the checkpoint of --checkpoint");
  app.add_option("--print-frequency", options.print_frequency, "Steps between lines")
      ->transform(whole(1))
      ->default_str("every 5 s");
  app.add_option("--json", options.json, "File for a record per epoch")->check(path());
  app.add_option("--csv", options.csv, "The same as comma-separated values")->check(path());
  app.add_option("--tensorboard", options.tensorboard, "Folder for TensorBoard's event files")
      ->check(path());
  app.add_option("--profile", options.profile,
                 "File for a profile of some steps, of LibTorch and of hvd, for Perfetto")
      ->check(path());
  app.add_option("--profile-steps", options.profile_steps,
                 "Steps of --profile, after two that are not in it")
      ->transform(whole(1));
}

void add_options(CLI::App& app, Options& options) {
  app.add_option("--model", options.model,
                 "Network; script:FILE is a TorchScript module saved by Python")
      ->check(model_name());
  app.add_option("--weights", options.weights,
                 "File of weights to begin with: torch.save(dict(model.state_dict()), FILE)")
      ->check(path());
  app.add_option("--stem", options.stem,
                 "First layers of a ResNet; cifar: for small images, slower and more accurate")
      ->check(one_of(stem_names()));
  app.add_option("--dataset", options.dataset, "Images; synthetic ones need no files")
      ->check(one_of(dataset_names()));
  app.add_option("--data", options.data, "Folder of the dataset's files");
  app.add_option("--workers", options.workers, "Threads per rank that make batches ahead; 0: none")
      ->transform(whole(0));
  app.add_flag("--pin-memory,!--no-pin-memory", options.pin_memory,
               "Batches for a GPU are read ahead into page-locked memory and copied while the "
               "device computes (default); nothing on the CPU");
  app.add_option("--epochs", options.epochs, "Passes over the training images")
      ->transform(whole(1));
  app.add_option("--batch-size", options.batch_size, "Images per rank and backward pass")
      ->transform(whole(1));
  app.add_option("--optimizer", options.optimizer, "Optimizer")
      ->check(one_of({"sgd", "adam", "adamw"}));
  app.add_option("--lr", options.learning_rate, "Learning rate")
      ->check(number("a number above 0", 0, true))
      ->default_str("sgd 0.01, with mlp 0.05; adam, adamw 0.0005");
  app.add_option("--momentum", options.momentum, "Momentum of sgd")
      ->check(number("a number from 0", 0, false));
  app.add_option("--weight-decay", options.weight_decay, "Weight decay")
      ->check(number("a number from 0", 0, false));
  app.add_option(
         "--strategy", options.strategy,
         "Ways to train in parallel; hvd: DistributedOptimizer, ddp: DistributedDataParallel, both "
         "on all ranks; data-parallel: replicas in one process; single: none")
      ->check(one_of({"hvd", "ddp", "data-parallel", "single"}));
  app.add_option("--replicas", options.replicas, "Of --strategy data-parallel")
      ->transform(whole(1))
      ->default_str("GPUs, or cores");
  app.add_option("--opt-level", options.opt_level,
                 "What is in 16 bits; O0: nothing; O1: products (autocast); O2: weights, with fp32 "
                 "masters and batch norm in fp32; O3: all")
      ->check(one_of({"O0", "O1", "O2", "O3"}))
      ->default_str("O0, with --amp O1");
  app.add_option("--amp", options.amp, "The 16-bit type")
      ->check(one_of({"none", "bf16", "fp16"}))
      ->default_str("none, with --opt-level bf16");
  app.add_flag("--sync-bn", options.sync_bn, "Batch norm over the batches of all ranks");
  app.add_flag("--shard-optimizer", options.shard_optimizer,
               "Each rank keeps its share of the optimizer's state (ZeRO stage 1)");
  app.add_flag("--shard-gradients", options.shard_gradients, "And of the gradients (ZeRO stage 2)");
  app.add_flag("--share-parameters", options.share_parameters,
               "The ranks of a host have one copy of the parameters and the optimizer's state");
  app.add_option("--compression", options.compression, "How gradients travel")
      ->check(one_of({"none", "fp16", "bf16", "int8", "topk", "powersgd"}));
  app.add_option("--powersgd-rank", options.powersgd_rank, "Rank of --compression powersgd")
      ->transform(whole(1));
  app.add_option("--topk-ratio", options.topk_ratio,
                 "Share of the gradients that --compression topk sends")
      ->check(number("a number above 0, at most 1", 0, true));
  app.add_option("--accumulate", options.accumulate, "Backward passes per step")
      ->transform(whole(1));
  app.add_option("--checkpoint", options.checkpoint, "Folder in which a checkpoint is kept")
      ->check(path());
  app.add_option("--checkpoint-steps", options.checkpoint_steps,
                 "Also write it every so many steps")
      ->transform(whole(1))
      ->default_str("never");
  app.add_flag("--resume", options.resume, "Go on from the checkpoint");
  app.add_option("--max-steps", options.max_steps, "End after so many steps in all")
      ->transform(whole(1))
      ->default_str("no limit");
  app.add_option("--seed", options.seed, "Seed of weights, order and synthetic images")
      ->transform(seed_number());
  app.add_option("--device", options.device, "Where to compute")
      ->check(one_of({"auto", "cpu", "cuda"}));
  app.add_option("--nproc", options.processes, "Start so many ranks without a launcher")
      ->transform(whole(1))
      ->default_str("none");
  app.add_option("--threads", options.threads, "Threads of LibTorch per rank")
      ->transform(whole(1))
      ->default_str("cores / ranks");
  app.add_option("--untimed-steps", options.untimed_steps,
                 "First steps that seconds and images/s leave out")
      ->transform(whole(0));
}

void check_images(const CLI::App& app, const Options& options) {
  const bool folder = options.dataset == "folder";
  for (const char* name : {"--image-size", "--resize", "--jpeg-scaling", "--bad-images"}) {
    if (app.count(name) > 0 && !folder)
      throw UsageError(std::string(name) + " is of use to --dataset folder alone");
  }
  if (options.resize > 0 && options.resize < options.image_size) {
    throw UsageError("--resize " + std::to_string(options.resize) +
                     " is smaller than --image-size " + std::to_string(options.image_size));
  }
  if (options.image_size > 10'000)
    throw UsageError("--image-size " + std::to_string(options.image_size) + " is more than 10000");
}

void check_training(const CLI::App& app, const Options& options) {
  const auto given = [&](const char* name) { return app.count(name) > 0; };
  if ((given("--lr-steps") || given("--lr-gamma")) && options.schedule != "step") {
    throw UsageError(std::string(given("--lr-steps") ? "--lr-steps" : "--lr-gamma") +
                     " goes with --lr-schedule step");
  }
  if (options.ema > 0 && options.share_parameters) {
    throw UsageError(
        "--ema does not go with --share-parameters: the ranks of a host would exchange the one "
        "copy of the parameters");
  }
  if (given("--profile-steps") && options.profile.empty())
    throw UsageError("--profile-steps needs --profile and a file");
  if (options.evaluate && options.weights.empty() && options.checkpoint.empty()) {
    throw UsageError("--evaluate needs --weights, or --checkpoint and the folder of a run");
  }
}

void check_combinations(const CLI::App& app, const Options& options) {
  const auto given = [&](const char* name) { return app.count(name) > 0; };
  if (options.dataset != "synthetic" && options.data.empty()) {
    throw UsageError("--dataset " + options.dataset + " needs --data and the folder of its files");
  }
  if (options.dataset == "synthetic" && given("--data")) {
    throw UsageError(
        "--data is of no use to --dataset synthetic; name the dataset that is to be read (cifar10, "
        "cifar100, folder or mnist)");
  }
  if (options.checkpoint.empty() && (options.resume || given("--checkpoint-steps"))) {
    throw UsageError(std::string(options.resume ? "--resume" : "--checkpoint-steps") +
                     " needs --checkpoint and a folder");
  }
}

void check_strategy(const CLI::App& app, const Options& options) {
  const auto given = [&](const char* name) { return app.count(name) > 0; };
  const auto only = [&](const char* name, bool used, bool allowed, const char* strategies) {
    if (used && !allowed)
      throw UsageError(std::string(name) + " is of no use to --strategy " + options.strategy +
                       "; it goes with " + strategies);
  };
  const bool ranks = options.strategy == "hvd" || options.strategy == "ddp";
  only("--replicas", given("--replicas"), options.strategy == "data-parallel", "data-parallel");
  only("--sync-bn", options.sync_bn, ranks, "hvd and ddp");
  only("--compression", options.compression != "none", ranks, "hvd and ddp");
  only("--shard-optimizer", options.shard_optimizer, options.strategy == "hvd", "hvd");
  only("--shard-gradients", options.shard_gradients, options.strategy == "hvd", "hvd");
  only("--share-parameters", options.share_parameters, options.strategy == "hvd", "hvd");
  if (options.topk_ratio > 1)
    throw UsageError("--topk-ratio is " + std::to_string(options.topk_ratio) +
                     "; it is a share, at most 1");
}

/// --opt-level and --amp, each of which says something of the other.
void settle_precision(const CLI::App& app, Options& options) {
  const bool type_given = app.count("--amp") > 0 && options.amp != "none";
  if (options.opt_level.empty()) options.opt_level = type_given ? "O1" : "O0";
  if (options.opt_level == "O0" && type_given) {
    throw UsageError("--opt-level O0 computes in fp32; leave out --amp " + options.amp +
                     ", or take O1, O2 or O3");
  }
  if (options.opt_level == "O0") return;
  if (app.count("--amp") > 0 && !type_given)
    throw UsageError("--opt-level " + options.opt_level + " needs --amp bf16 or fp16");
  if (!type_given) options.amp = "bf16";
  if (options.opt_level == "O3" && options.amp == "fp16" && options.optimizer != "sgd") {
    throw UsageError("--opt-level O3 with --amp fp16 does not go with --optimizer " +
                     options.optimizer +
                     ", whose epsilon of 1e-8 is 0 in fp16; take O2, or --amp bf16");
  }
}

double default_rate(const Options& options) {
  if (options.optimizer != "sgd") return 0.0005;
  return options.model == "mlp" ? 0.05 : 0.01;
}

}  // namespace

std::vector<std::int64_t> parse_steps(const std::string& text) {
  std::vector<std::int64_t> steps;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) {
    const bool digits = !word.empty() && word.size() < 10 &&
                        word.find_first_not_of("0123456789") == std::string::npos;
    const std::int64_t step = digits ? std::stoll(word) : 0;
    if (step <= (steps.empty() ? 0 : steps.back())) {
      throw std::invalid_argument("'" + text +
                                  "' is no list of epochs that rise, such as 30,60,80");
    }
    steps.push_back(step);
  }
  return steps;
}

CommandLine parse_command_line(int argc, char** argv) {
  CommandLine line;
  CLI::App app(
      "Trains an image classifier on all ranks: mpirun -np 4 train [options]. Without options: "
      "ResNet-18 on synthetic images.",
      "train");
  app.option_defaults()->always_capture_default()->multi_option_policy(
      CLI::MultiOptionPolicy::TakeLast);
  add_options(app, line.options);
  add_image_options(app, line.options);
  add_rate_options(app, line.options);
  add_report_options(app, line.options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    line.help = app.help();
    return line;
  } catch (const CLI::ParseError& error) {
    throw UsageError(std::string(error.what()) + "; 'train --help' lists the options");
  }
  check_combinations(app, line.options);
  check_strategy(app, line.options);
  check_images(app, line.options);
  check_training(app, line.options);
  settle_precision(app, line.options);
  if (line.options.resize == 0) line.options.resize = (line.options.image_size * 256 + 112) / 224;
  if (line.options.evaluate && !line.options.checkpoint.empty()) line.options.resume = true;
  if (line.options.learning_rate == 0) line.options.learning_rate = default_rate(line.options);
  return line;
}

}  // namespace examples
