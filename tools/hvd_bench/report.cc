#include "tools/hvd_bench/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "hvd/topology.h"

namespace bench {

namespace {

constexpr const char* kColumns =
    "{}{:>11} {:>12} {:>10} {:>7} {:>10} {:>7} {:>7} {:>6} {:>8} {:>5} {:>9} {:>9} {:>9} {:>9}";

double bus_factor(Collective collective, int ranks) {
  const double n = ranks;
  switch (collective) {
    case Collective::Allreduce: return 2 * (n - 1) / n;
    case Collective::Allgather:
    case Collective::Alltoall:
    case Collective::Reducescatter: return (n - 1) / n;
    default: return 1;
  }
}

double gigabytes_per_second(std::size_t bytes, double microseconds) {
  return static_cast<double>(bytes) / microseconds / 1e3;
}

/// Whether the table says how the values travel.
bool compresses(const Options& options) {
  return options.wires != std::vector{hvd::Compression::none()};
}

nlohmann::ordered_json to_json(const Timing& time) {
  return {{"time_us", time.median},
          {"p50_us", time.p50},
          {"p90_us", time.p90},
          {"p99_us", time.p99},
          {"max_us", time.max}};
}

/// A copy of a few bytes takes hundredths of a microsecond, a large reduction many thousands.
std::string microseconds(double value) {
  return fmt::format("{:.{}f}", value, value < 1 ? 3 : value < 10 ? 2 : 1);
}

}  // namespace

void say(const std::string& line) {
  if (hvd::rank() != 0) return;
  std::fputs((line + "\n").c_str(), stdout);
  std::fflush(stdout);
}

std::string text_of_bytes(std::size_t bytes) {
  for (const auto& [unit, name] : {std::pair{std::size_t{1} << 30, "GiB"},
                                   {std::size_t{1} << 20, "MiB"},
                                   {std::size_t{1} << 10, "KiB"}})
    if (bytes >= unit && bytes % unit == 0) return fmt::format("{} {}", bytes / unit, name);
  return fmt::format("{} B", bytes);
}

JsonFile::JsonFile(const std::string& path) : path_(path) {
  if (!path_.empty() && hvd::rank() == 0) file_.open(path_);
  agree();
}

void JsonFile::write(const nlohmann::ordered_json& json) {
  if (file_.is_open()) {
    file_ << json.dump(2) << "\n";
    file_.close();
  }
  agree();
}

void JsonFile::agree() const {
  const int error = static_cast<int>(largest(file_ ? 0 : errno != 0 ? errno : EIO));
  if (error != 0)
    throw std::runtime_error(fmt::format("--json {}: {}", path_, std::strerror(error)));
}

Report::Report(const Options& options) : options_(options), file_(options.json) {
  const std::string op =
      reduces(options_.collective) ? std::string(hvd::name_of(options_.op)) : "none";
  json_ = {{"program", "hvd_bench"},
           {"ranks", hvd::size()},
           {"cores", hvd::detail::usable_cores()},
           {"description", hvd::backend_description()},
           {"collective", name_of(options_.collective)},
           {"backend", name_of(options_.backend)},
           {"device", options_.on_gpu ? "cuda" : "cpu"},
           {"dtype", hvd::name_of(options_.dtype)},
           {"op", op},
           {"model", options_.model},
           {"async", options_.async},
           {"grouped", options_.grouped},
           {"rounds", options_.rounds},
           {"rows", nlohmann::ordered_json::array()}};
  say(fmt::format("# hvd_bench: {}, {}", name_of(options_.collective), hvd::backend_description()));
  if (options_.idle_seconds > 0) return;
  say(fmt::format(
      "# {} rounds, all subjects in turn; time: median over the rounds, slowest rank; p50 to max: "
      "of single operations{}",
      options_.rounds, has_rivals(options_) ? "; x: how many times as long as hvd" : ""));
  std::string names = fmt::format(kColumns, "#", "size", "count", "type", "redop", "time", "algbw",
                                  "busbw", "#wrong", "memory", "place", "p50", "p90", "p99", "max");
  std::string units = fmt::format(kColumns, "#", "(B)", "(elements)", "", "", "(us)", "(GB/s)",
                                  "(GB/s)", "", "", "", "(us)", "(us)", "(us)", "(us)");
  if (compresses(options_)) {
    names += fmt::format(" {:>4}", "wire");
    units += fmt::format(" {:>4}", "");
  }
  const auto versus = [&](const char* name) {
    names += fmt::format(" {:>10} {:>6}", name, "x");
    units += fmt::format(" {:>10} {:>6}", "(us)", "");
  };
  if (options_.versus_mpi) versus("MPI");
  if (options_.versus_packed) versus("packed");
  if (options_.versus_memcpy) versus("memcpy");
  if (options_.versus_line) versus("line");
  if (!options_.model.empty()) names += fmt::format(" {:>8}", "batches");
  say(names);
  say(units);
}

void Report::add(const Row& row) {
  const double algbw = gigabytes_per_second(row.bytes, row.time.median);
  const double busbw = algbw * bus_factor(options_.collective, hvd::size());
  const std::string op =
      reduces(options_.collective) ? std::string(hvd::name_of(options_.op)) : "none";
  const auto fixed = [](double value, int places) { return fmt::format("{:.{}f}", value, places); };
  std::string line =
      fmt::format(kColumns, " ", row.bytes, row.elements, hvd::name_of(options_.dtype), op,
                  microseconds(row.time.median), fixed(algbw, 2), fixed(busbw, 2),
                  row.wrong ? std::to_string(*row.wrong) : "N/A", row.memory, row.place,
                  microseconds(row.time.p50), microseconds(row.time.p90),
                  microseconds(row.time.p99), microseconds(row.time.max));
  if (compresses(options_)) line += fmt::format(" {:>4}", row.wire);
  nlohmann::ordered_json record = {
      {"bytes", row.bytes},   {"elements", row.elements},      {"tensors", row.tensors},
      {"memory", row.memory}, {"in_place", row.place == "in"}, {"persistent", row.place == "again"},
      {"wire", row.wire}};
  record.update(to_json(row.time));
  record.update({{"algbw_gbps", algbw}, {"busbw_gbps", busbw}, {"wrong", json_of(row.wrong)}});
  const auto versus = [&](const std::optional<Timing>& other, const char* name) {
    if (!other) return;
    line += fmt::format(" {:>10} {:>6.2f}", microseconds(other->median),
                        other->median / row.time.median);
    record[name] = to_json(*other);
    record[name]["ratio"] = other->median / row.time.median;
  };
  versus(row.mpi, "mpi");
  versus(row.packed, "packed");
  versus(row.memcpy, "memcpy");
  versus(row.line, "line");
  if (row.batches) {
    line += fmt::format(" {:>8.1f}", *row.batches);
    record["batches"] = *row.batches;
  }
  say(line);
  json_["rows"].push_back(record);
  bus_bandwidths_ += busbw;
  ++rows_;
  wrong_ += row.wrong.value_or(0);
}

void Report::add_idle(double seconds, const std::vector<double>& percent) {
  std::string line = fmt::format("idle for {:.1f} s, processor time in % of a core:", seconds);
  for (std::size_t rank = 0; rank < percent.size(); ++rank)
    line += fmt::format(" rank {} {:.3f}", rank, percent[rank]);
  say(line);
  json_["idle"] = {{"seconds", seconds},
                   {"percent_of_a_core", percent},
                   {"largest", *std::max_element(percent.begin(), percent.end())}};
}

void Report::end() {
  if (rows_ > 0) {
    if (options_.check)
      say(fmt::format("# Out of bounds values : {} {}", wrong_, wrong_ == 0 ? "OK" : "FAILED"));
    say(fmt::format("# Avg bus bandwidth    : {:.3f}",
                    bus_bandwidths_ / static_cast<double>(rows_)));
  }
  file_.write(json_);
}

}  // namespace bench
