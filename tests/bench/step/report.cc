#include "tests/bench/step/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <vector>

namespace step_bench {

namespace {

using Json = nlohmann::ordered_json;

const Subject* find(const Subjects& subjects, const std::string& name) {
  for (const auto& subject : subjects)
    if (subject->name() == name) return subject.get();
  return nullptr;
}

double quantile(std::vector<double> values, double share) {
  const auto place =
      static_cast<std::ptrdiff_t>(share * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + place, values.end());
  return values[static_cast<std::size_t>(place)];
}

/// The median over the rounds of what the subject took, in times of what the floor took in the same
/// round.
double ratio(const Subject& subject, const Subject& floor) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < subject.milliseconds().size(); ++i)
    ratios.push_back(subject.milliseconds()[i] / floor.milliseconds()[i]);
  return quantile(ratios, 0.5);
}

/// Prints how long the steps of each subject took, and adds it to the report.
void add_rows(const Subjects& subjects, Json& json) {
  const Subject* floor = find(subjects, "none");
  for (const auto& subject : subjects) {
    const auto& times = subject->milliseconds();
    Json row{{"subject", subject->name()},
             {"median_ms", quantile(times, 0.5)},
             {"p90_ms", quantile(times, 0.9)},
             {"min_ms", quantile(times, 0)}};
    if (floor != nullptr) row["ratio"] = ratio(*subject, *floor);
    if (subject->is_hvd()) row["batches_per_step"] = subject->batches_per_step();
    if (subject->is_hvd()) row["exposed_ms"] = quantile(subject->exposed_milliseconds(), 0.5);
    fmt::print(" {:>11} {:>10.2f} {:>10.2f} {:>10.2f} {:>8} {:>8} {:>8}\n", subject->name(),
               quantile(times, 0.5), quantile(times, 0.9), quantile(times, 0),
               floor != nullptr ? fmt::format("{:.3f}", ratio(*subject, *floor)) : "-",
               subject->is_hvd() ? fmt::format("{:.1f}", subject->batches_per_step()) : "-",
               subject->is_hvd()
                   ? fmt::format("{:.2f}", quantile(subject->exposed_milliseconds(), 0.5))
                   : "-");
    json["rows"].push_back(row);
  }
}

/// The same of the optimizer's step alone.
void add_updates(const Options& options, const Subjects& subjects, Json& json) {
  fmt::print("# step() of {} alone, gradients already reduced: {} updates, all in turn\n",
             options.optimizer, options.updates);
  fmt::print("#{:>11} {:>10} {:>10} {:>10}\n", "subject", "ms", "p90", "min");
  for (const auto& subject : subjects) {
    const auto& times = subject->update_milliseconds();
    if (times.empty()) continue;
    fmt::print(" {:>11} {:>10.2f} {:>10.2f} {:>10.2f}\n", subject->name(), quantile(times, 0.5),
               quantile(times, 0.9), quantile(times, 0));
    json["updates"].push_back({{"subject", subject->name()},
                               {"median_ms", quantile(times, 0.5)},
                               {"min_ms", quantile(times, 0)}});
  }
}

}  // namespace

std::string mistakes(const Subjects& subjects, const torch::Tensor& start) {
  std::string found;
  const Subject* by_hand = find(subjects, "mpi");
  for (const auto& subject : subjects) {
    if (!subject->is_hvd()) continue;
    const auto mine = subject->flat();
    if (!torch::equal(mine, hvd::broadcast(mine, {.name = "step_bench.check"})))
      found += fmt::format("{}: rank {} has other parameters than rank 0. ", subject->name(),
                           hvd::rank());
    if (!mine.isfinite().all().item<bool>())
      found += fmt::format("{}: parameters are not finite. ", subject->name());
    if (by_hand == nullptr) continue;
    const auto theirs = by_hand->flat();
    const double away =
        (mine - theirs).norm().item<double>() / (theirs - start).norm().item<double>();
    if (!(away <= (subject->is_compressed() ? 0.1 : 0.01)))
      found +=
          fmt::format("{}: went {:.2g} of the way elsewhere than by hand. ", subject->name(), away);
  }
  return found;
}

double proportional_mebibytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string word; file >> word;) {
    double kibibytes = 0;
    if (word == "Pss:" && file >> kibibytes) return kibibytes / 1024;
  }
  return 0;
}

Json report(const Options& options, const Subjects& subjects, double mebibytes) {
  const auto parameters = subjects.front()->parameters();
  std::int64_t elements = 0;
  for (const auto& parameter : parameters) elements += parameter.numel();
  const bool is_bert = options.model == "bert-base";
  const std::string input =
      is_bert ? fmt::format("{} layers of width {}, {} tokens", options.bert.layers,
                            options.bert.width, options.sequence)
              : fmt::format("{0}x{0} pixels", options.side);
  fmt::print(
      "# step_bench: {}, {} gradients, {:.1f} MiB; batch {} per rank, {}; {} ranks, {} rounds, all "
      "subjects in turn\n",
      options.model, parameters.size(), static_cast<double>(elements) * 4 / (1 << 20),
      options.batch, input, hvd::size(), options.rounds);
  if (options.device != "cpu" || !options.amp.empty())
    fmt::print("# on {}{}\n", options.device,
               options.amp.empty() ? "" : ", forward in mixed precision: " + options.amp);
  fmt::print("#{:>11} {:>10} {:>10} {:>10} {:>8} {:>8} {:>8}\n", "subject", "ms", "p90", "min",
             "x none", "batches", "exposed");
  Json json{{"program", "step_bench"}, {"model", options.model},   {"tensors", parameters.size()},
            {"bytes", elements * 4},   {"ranks", hvd::size()},     {"batch", options.batch},
            {"input", input},          {"rounds", options.rounds}, {"device", options.device},
            {"amp", options.amp},      {"rows", Json::array()}};
  add_rows(subjects, json);
  if (options.updates > 0) add_updates(options, subjects, json);
  fmt::print(
      "# memory that the models took, all ranks and subjects together (PSS): {:.0f} MiB, {:.2f} of "
      "one model's parameters\n",
      mebibytes, mebibytes * (1 << 20) / (static_cast<double>(elements) * 4));
  json["memory_mib"] = mebibytes;
  std::fflush(stdout);
  return json;
}

}  // namespace step_bench
