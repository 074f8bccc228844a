// This program measures what communication costs a training step: the same step (SGD with momentum, or Adam) without communication, with
// the optimizer wrapped in hvd::DistributedOptimizer, and with one MPI_Allreduce per gradient by hand, in turn within one run. All are
// timed from barrier to barrier, so each figure is that of the slowest rank; the table has medians over the rounds.
//   mpirun -np 4 step_bench [rounds [batch]] [--model resnet18|resnet50|bert-base] ...; --help lists the options
// Exit codes: 0 done, 1 failed, or --check found a difference, 2 wrong options.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <hvd/torch.h>
#include <mpi.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "examples/train/models/bert.h"
#include "examples/train/models/models.h"
#include "examples/train/trainer/setup.h"

namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string model = "resnet18";
  std::vector<std::string> subjects;
  std::string device = "cpu";
  std::string amp;
  int rounds = 20;
  int warmup = 3;
  std::int64_t batch = 4;
  std::int64_t side = 32;
  int classes = 100;
  examples::BertOptions bert;
  std::int64_t sequence = 128;
  std::string optimizer = "sgd";
  int updates = 0;
  bool check = false;
  std::string json;
};

void add_options(CLI::App& app, Options& options) {
  const CLI::Range at_least_1(1, std::numeric_limits<int>::max());
  app.add_option("-m,--model", options.model, "resnet18 (default), resnet50 or bert-base")
      ->check(CLI::IsMember({"resnet18", "resnet50", "bert-base"}));
  app.add_option("-s,--subjects", options.subjects,
                 "What is measured, in turn: none (no communication), hvd, hvd-fp16, hvd-bf16, hvd-sharded (optimizer "
                 "state shared out), mpi (default none,hvd,mpi; on a GPU none,hvd). Each has a copy of the model")
      ->delimiter(',')
      ->check(CLI::IsMember({"none", "hvd", "hvd-fp16", "hvd-bf16", "hvd-sharded", "mpi"}));
  app.add_option("--device", options.device, "cpu (default) or cuda: the GPUs of the host, in turn")->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--amp", options.amp, "Forward in mixed precision: bf16, on a GPU also fp16 (default: none)")
      ->check(CLI::IsMember({"bf16", "fp16"}));
  app.add_option("-n,--rounds,rounds", options.rounds, "Measured steps of each (default 20)")->check(at_least_1);
  app.add_option("-w,--warmup", options.warmup, "Steps before them that do not count (default 3)")->check(CLI::Range(0, 1'000'000));
  app.add_option("-b,--batch-size,batch", options.batch, "Images or sequences per rank (default 4)")->check(at_least_1);
  app.add_option("--image-size", options.side, "ResNets: pixels per side (default 32)")->check(at_least_1);
  app.add_option("--classes", options.classes, "Of the classifier (default 100)")->check(at_least_1);
  app.add_option("--sequence", options.sequence, "bert-base: tokens (default 128)")->check(CLI::Range(1, 512));
  app.add_option("--layers", options.bert.layers, "bert-base: fewer than its 12 for small machines")->check(at_least_1);
  app.add_option("--width", options.bert.width, "bert-base: less than its 768, a multiple of --heads")->check(at_least_1);
  app.add_option("--heads", options.bert.heads, "bert-base: fewer than its 12")->check(at_least_1);
  app.add_option("--vocabulary", options.bert.vocabulary, "bert-base: words, fewer than its 30522")->check(at_least_1);
  app.add_option("--optimizer", options.optimizer, "sgd (with momentum, default) or adam")->check(CLI::IsMember({"sgd", "adam"}));
  app.add_option("--updates", options.updates,
                 "Then measure step() alone, of gradients already reduced, so many times for each hvd subject, in turn (default 0)")
      ->check(CLI::Range(0, 1'000'000));
  app.add_flag("-c,--check", options.check,
               "Compare the parameters at the end: those of hvd are the same on all ranks, and moved as those of mpi did");
  app.add_option("--json", options.json, "Write the results to this file too");
}

/// What one rank trains on. Random, other for every rank, the same for every subject.
struct Batch {
  Batch(const Options& options, torch::Device device) {
    torch::manual_seed(1 + hvd::rank());
    inputs = options.model == "bert-base" ? torch::randint(0, options.bert.vocabulary, {options.batch, options.sequence}, torch::kInt64)
                                          : torch::randn({options.batch, 3, options.side, options.side});
    labels = torch::randint(0, options.classes, {options.batch}, torch::kInt64);
    inputs = inputs.to(device);
    labels = labels.to(device);
  }
  torch::Tensor inputs, labels;
};

std::shared_ptr<examples::Classifier> make_model(const Options& options, torch::Device device) {
  torch::manual_seed(0);  // all ranks and subjects start alike
  examples::BertOptions bert = options.bert;
  bert.classes = options.classes;
  auto model = options.model == "bert-base"
                   ? examples::bert(bert)
                   : examples::make_model({.name = options.model, .image = {3, options.side, options.side}, .classes = options.classes});
  model->to(device);
  return model;
}

/// What a GPU still does is a part of what is timed.
void finish_on(torch::Device device) {
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
}

/// The average over all ranks, as a program without a library would make it.
void average_by_hand(const std::vector<torch::Tensor>& parameters) {
  for (auto parameter = parameters.rbegin(); parameter != parameters.rend(); ++parameter) {
    const auto& gradient = parameter->grad();
    if (!gradient.defined()) continue;
    if (!gradient.is_contiguous()) throw std::runtime_error("a gradient is not contiguous: MPI_Allreduce by hand cannot take it");
    MPI_Allreduce(MPI_IN_PLACE, gradient.data_ptr<float>(), static_cast<int>(gradient.numel()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    gradient.div_(hvd::size());
  }
}

/// One way of training, with a model of its own.
class Subject {
 public:
  Subject(std::string name, const Options& options, torch::Device device)
      : name_(std::move(name)), device_(device), model_(make_model(options, device)), plain_(make_optimizer(options)) {
    if (!options.amp.empty()) amp_ = options.amp == "bf16" ? torch::kBFloat16 : torch::kHalf;
    if (!is_hvd()) return;
    hvd::DistributedOptimizerOptions how;
    if (name_ == "hvd-fp16") how.compression = hvd::Compression::fp16();
    if (name_ == "hvd-bf16") how.compression = hvd::Compression::bf16();
    how.shard_optimizer_state = name_ == "hvd-sharded";
    wrapped_.emplace(*plain_, model_->named_parameters(), how);
  }

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] bool is_hvd() const { return name_.starts_with("hvd"); }
  [[nodiscard]] bool is_compressed() const { return name_ == "hvd-fp16" || name_ == "hvd-bf16"; }
  [[nodiscard]] std::vector<torch::Tensor> parameters() const { return model_->parameters(); }
  /// All parameters in one row.
  [[nodiscard]] torch::Tensor flat() const {
    std::vector<torch::Tensor> rows;
    for (const auto& parameter : model_->parameters()) rows.push_back(parameter.detach().flatten());
    return torch::cat(rows);
  }
  [[nodiscard]] const std::vector<double>& update_milliseconds() const { return update_milliseconds_; }
  [[nodiscard]] const std::vector<double>& milliseconds() const { return milliseconds_; }
  [[nodiscard]] double batches_per_step() const { return static_cast<double>(batches_) / static_cast<double>(milliseconds_.size()); }

  void step(const Batch& batch, bool counts) {
    finish_on(device_);
    hvd::barrier();
    const auto before = hvd::stats().batches_run;
    const auto start = std::chrono::steady_clock::now();
    train(batch);
    finish_on(device_);
    const auto after = hvd::stats().batches_run;
    hvd::barrier();
    const double took = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    if (!counts) return;
    milliseconds_.push_back(took);
    batches_ += after - before;
  }

  /// The optimizer's step alone, with the gradients of the last step.
  void update() {
    wrapped_->synchronize();
    finish_on(device_);
    hvd::barrier();
    const auto start = std::chrono::steady_clock::now();
    wrapped_->step();
    finish_on(device_);
    hvd::barrier();
    update_milliseconds_.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }

 private:
  [[nodiscard]] std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& options) const {
    if (options.optimizer == "adam") return std::make_unique<torch::optim::Adam>(model_->parameters(), torch::optim::AdamOptions(1e-3));
    return std::make_unique<torch::optim::SGD>(model_->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9).weight_decay(5e-4));
  }

  void train(const Batch& batch) {
    const auto backward = [&] { loss(batch).backward(); };
    if (wrapped_) {
      wrapped_->zero_grad();
      backward();
      wrapped_->step();
      return;
    }
    plain_->zero_grad();
    backward();
    if (name_ == "mpi") average_by_hand(model_->parameters());
    plain_->step();
  }

  [[nodiscard]] torch::Tensor loss(const Batch& batch) const {
    const hvd::AutocastGuard guard(device_.type(), amp_.value_or(torch::kBFloat16), amp_.has_value());
    return torch::nn::functional::cross_entropy(model_->forward(batch.inputs), batch.labels);
  }

  std::string name_;
  torch::Device device_;
  std::optional<torch::ScalarType> amp_;
  std::shared_ptr<examples::Classifier> model_;
  std::unique_ptr<torch::optim::Optimizer> plain_;
  std::optional<hvd::DistributedOptimizer> wrapped_;
  std::vector<double> milliseconds_, update_milliseconds_;
  std::uint64_t batches_ = 0;
};

using Subjects = std::vector<std::unique_ptr<Subject>>;

const Subject* find(const Subjects& subjects, const std::string& name) {
  for (const auto& subject : subjects)
    if (subject->name() == name) return subject.get();
  return nullptr;
}

double quantile(std::vector<double> values, double share) {
  const auto place = static_cast<std::ptrdiff_t>(share * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + place, values.end());
  return values[static_cast<std::size_t>(place)];
}

/// The median over the rounds of what the subject took, in times of what the floor took in the same round.
double ratio(const Subject& subject, const Subject& floor) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < subject.milliseconds().size(); ++i) ratios.push_back(subject.milliseconds()[i] / floor.milliseconds()[i]);
  return quantile(ratios, 0.5);
}

/// What --check finds wrong on this rank; empty: nothing.
std::string mistakes(const Subjects& subjects, const torch::Tensor& start) {
  std::string found;
  const Subject* by_hand = find(subjects, "mpi");
  for (const auto& subject : subjects) {
    if (!subject->is_hvd()) continue;
    const auto mine = subject->flat();
    if (!torch::equal(mine, hvd::broadcast(mine, {.name = "step_bench.check"})))
      found += fmt::format("{}: rank {} has other parameters than rank 0. ", subject->name(), hvd::rank());
    if (!mine.isfinite().all().item<bool>()) found += fmt::format("{}: parameters are not finite. ", subject->name());
    if (by_hand == nullptr) continue;
    const auto theirs = by_hand->flat();
    const double away = (mine - theirs).norm().item<double>() / (theirs - start).norm().item<double>();
    if (!(away <= (subject->is_compressed() ? 0.1 : 0.01)))
      found += fmt::format("{}: went {:.2g} of the way elsewhere than by hand. ", subject->name(), away);
  }
  return found;
}

Json report(const Options& options, const Subjects& subjects) {
  const auto parameters = subjects.front()->parameters();
  std::int64_t elements = 0;
  for (const auto& parameter : parameters) elements += parameter.numel();
  const bool is_bert = options.model == "bert-base";
  const std::string input = is_bert
                                ? fmt::format("{} layers of width {}, {} tokens", options.bert.layers, options.bert.width, options.sequence)
                                : fmt::format("{0}x{0} pixels", options.side);
  fmt::print("# step_bench: {}, {} gradients, {:.1f} MiB; batch {} per rank, {}; {} ranks, {} rounds, all subjects in turn\n",
             options.model, parameters.size(), static_cast<double>(elements) * 4 / (1 << 20), options.batch, input, hvd::size(),
             options.rounds);
  if (options.device != "cpu" || !options.amp.empty())
    fmt::print("# on {}{}\n", options.device, options.amp.empty() ? "" : ", forward in mixed precision: " + options.amp);
  fmt::print("#{:>11} {:>10} {:>10} {:>10} {:>8} {:>8}\n", "subject", "ms", "p90", "min", "x none", "batches");
  Json json{{"program", "step_bench"}, {"model", options.model},   {"tensors", parameters.size()},
            {"bytes", elements * 4},   {"ranks", hvd::size()},     {"batch", options.batch},
            {"input", input},          {"rounds", options.rounds}, {"device", options.device},
            {"amp", options.amp},      {"rows", Json::array()}};
  const Subject* floor = find(subjects, "none");
  for (const auto& subject : subjects) {
    const auto& times = subject->milliseconds();
    Json row{{"subject", subject->name()},
             {"median_ms", quantile(times, 0.5)},
             {"p90_ms", quantile(times, 0.9)},
             {"min_ms", quantile(times, 0)}};
    if (floor != nullptr) row["ratio"] = ratio(*subject, *floor);
    if (subject->is_hvd()) row["batches_per_step"] = subject->batches_per_step();
    fmt::print(" {:>11} {:>10.2f} {:>10.2f} {:>10.2f} {:>8} {:>8}\n", subject->name(), quantile(times, 0.5), quantile(times, 0.9),
               quantile(times, 0), floor != nullptr ? fmt::format("{:.3f}", ratio(*subject, *floor)) : "-",
               subject->is_hvd() ? fmt::format("{:.1f}", subject->batches_per_step()) : "-");
    json["rows"].push_back(row);
  }
  if (options.updates > 0) {
    fmt::print("# step() of {} alone, gradients already reduced: {} updates, all in turn\n", options.optimizer, options.updates);
    fmt::print("#{:>11} {:>10} {:>10} {:>10}\n", "subject", "ms", "p90", "min");
    for (const auto& subject : subjects) {
      const auto& times = subject->update_milliseconds();
      if (times.empty()) continue;
      fmt::print(" {:>11} {:>10.2f} {:>10.2f} {:>10.2f}\n", subject->name(), quantile(times, 0.5), quantile(times, 0.9),
                 quantile(times, 0));
      json["updates"].push_back({{"subject", subject->name()}, {"median_ms", quantile(times, 0.5)}, {"min_ms", quantile(times, 0)}});
    }
  }
  std::fflush(stdout);
  return json;
}

int run(const Options& options) {
  const torch::Device device = examples::choose_device(options.device);
  const Batch batch(options, device);
  Subjects subjects;
  for (const auto& name : options.subjects) subjects.push_back(std::make_unique<Subject>(name, options, device));
  const auto start = options.check ? subjects.front()->flat() : torch::Tensor();
  for (int round = -options.warmup; round < options.rounds; ++round) {
    // Another one goes first every time: what a step leaves in the caches is nobody's advantage.
    for (std::size_t i = 0; i < subjects.size(); ++i)
      subjects[(i + static_cast<std::size_t>(round + options.warmup)) % subjects.size()]->step(batch, round >= 0);
  }
  for (int update = 0; update < options.updates; ++update)
    for (std::size_t i = 0; i < subjects.size(); ++i)
      if (auto& subject = subjects[(i + static_cast<std::size_t>(update)) % subjects.size()]; subject->is_hvd()) subject->update();
  bool failed = false;
  if (options.check) {
    const std::string found = mistakes(subjects, start);
    if (!found.empty()) fmt::print(stderr, "step_bench: rank {}: {}\n", hvd::rank(), found);
    failed = hvd::allreduce(torch::tensor(found.empty() ? 0 : 1), {.name = "step_bench.failed", .op = hvd::ReduceOp::Max}).item<int>() != 0;
  }
  if (hvd::rank() == 0) {
    Json json = report(options, subjects);
    if (options.check) fmt::print("# checked: {}\n", failed ? "FAILED" : "OK");
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

/// Empty: the options are right.
std::string wrong_with(const Options& options) {
  if (options.bert.width % options.bert.heads != 0)
    return fmt::format("--width {} is not a multiple of --heads {}", options.bert.width, options.bert.heads);
  if (options.model != "bert-base" && options.batch == 1 && options.side <= 32)
    return fmt::format("--batch-size 1 with --image-size {}: the last batch norm needs more than one value; take 2, or larger images",
                       options.side);
  if (options.device == "cuda" && std::count(options.subjects.begin(), options.subjects.end(), "mpi") > 0)
    return "--subjects mpi: MPI_Allreduce by hand is for gradients on the host";
  if (options.device == "cpu" && options.amp == "fp16") return "--amp fp16: on a GPU only";
  if (options.check && options.updates > 0) return "--check compares what the same steps came to; not with --updates";
  if (options.check && options.optimizer != "sgd") return "--check goes with --optimizer sgd";
  for (const auto& subject : options.subjects)
    if (std::count(options.subjects.begin(), options.subjects.end(), subject) > 1) return "--subjects: " + subject + " is there twice";
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What communication costs a training step: without it, with hvd, and with MPI_Allreduce by hand, in turn.", "step_bench");
  app.get_formatter()->column_width(40);
  Options options;
  add_options(app, options);
  const bool speaks = hvd::launcher_hints().rank.value_or(0) == 0;
  try {
    app.parse(argc, argv);
    if (options.subjects.empty()) options.subjects = {"none", "hvd"};
    if (app.count("--subjects") == 0 && options.device == "cpu") options.subjects.emplace_back("mpi");
    if (const auto wrong = wrong_with(options); !wrong.empty()) throw CLI::ValidationError(wrong);
  } catch (const CLI::CallForHelp&) {
    if (speaks) std::fputs(app.help().c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    if (speaks) fmt::print(stderr, "step_bench: {}; --help lists the options\n", error.what());
    return 2;
  }
  try {
    int level = MPI_THREAD_SINGLE;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);  // before hvd, which then adopts it: also a world of one has MPI
    hvd::init();
    const int code = run(options);
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
