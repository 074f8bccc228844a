#include "examples/train/trainer/profile.h"

#include <hvd/torch.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/cuda.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "examples/train/trainer/atomic_file.h"
#include "examples/train/trainer/collectively.h"

namespace examples {
namespace {

namespace kineto = torch::autograd::profiler;
using Json = nlohmann::json;

constexpr const char* kMark = "train.profile";
constexpr int kProcessesOfARank = 100;  // of LibTorch's events: the host's, and the GPUs'

const std::set<torch::profiler::impl::ActivityType>& activities() {
  using torch::profiler::impl::ActivityType;
  static const std::set<ActivityType> host = {ActivityType::CPU},
                                      all = {ActivityType::CPU, ActivityType::CUDA};
  return torch::cuda::is_available() ? all : host;
}

torch::profiler::impl::ProfilerConfig config() {
  return torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::KINETO);
}

std::int64_t nanoseconds_since_1970() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

Json read_json(const std::string& file) {
  std::ifstream in(file);
  auto read = Json::parse(in, nullptr, /*allow_exceptions=*/false);
  std::error_code error;
  std::filesystem::remove(file, error);
  return read;
}

/// LibTorch's events of this rank, in microseconds since 1970, as processes of their own beside
/// hvd's.
Json events_of_libtorch(const std::string& file, int rank) {
  const auto trace = read_json(file);
  Json events = Json::array();
  if (!trace.is_object() || !trace.contains("traceEvents")) return events;
  const double base =
      static_cast<double>(trace.value("baseTimeNanoseconds", std::int64_t{0})) / 1000;
  std::map<std::string, int> processes;
  for (auto event : trace["traceEvents"]) {
    const std::string kind = event.value("ph", "");
    // arrows' numbers would meet those of other ranks
    if (kind != "X" && kind != "M" && kind != "i") continue;
    const int number =
        processes.emplace(event.value("pid", Json()).dump(), static_cast<int>(processes.size()))
            .first->second;
    event["pid"] = 1'000'000 + rank * kProcessesOfARank + number;
    if (event.contains("ts") && kind != "M") event["ts"] = event["ts"].get<double>() + base;
    if (kind == "M") event.erase("ts");
    if (event.value("name", "") == "process_name") {
      event["args"]["name"] =
          "rank " + std::to_string(rank) + ": LibTorch, " + event["args"].value("name", "");
    }
    events.push_back(std::move(event));
  }
  return events;
}

/// hvd's events; `marks` says for each rank when the common allreduce was over, in nanoseconds
/// since 1970.
Json events_of_hvd(const std::string& file, const std::vector<std::int64_t>& marks) {
  auto trace = read_json(file);
  Json events = trace.is_object() ? std::move(trace["traceEvents"]) : std::move(trace);
  std::map<std::pair<int, int>, int> lanes;
  std::map<int, double> offsets;
  for (const auto& event : events) {
    const std::pair lane{event.value("pid", 0), event.value("tid", 0)};
    if (event.value("name", "") == "thread_name" && event["args"].value("name", "") == kMark)
      lanes[lane] = 1;
    if (lanes.contains(lane) && event.value("ph", "") == "E") {
      const auto rank = static_cast<std::size_t>(lane.first);
      if (rank < marks.size())
        offsets[lane.first] = static_cast<double>(marks[rank]) / 1000 - event["ts"].get<double>();
    }
  }
  for (auto& event : events) {
    const auto offset = offsets.find(event.value("pid", 0));
    if (event.contains("ts") && event.value("ph", "") != "M")
      event["ts"] = event["ts"].get<double>() +
                    (offset == offsets.end() ? (offsets.empty() ? 0 : offsets.begin()->second)
                                             : offset->second);
  }
  return events;
}

}  // namespace

Profile::Profile(std::string path, std::int64_t skip, std::int64_t steps)
    : path_(std::move(path)), skip_(skip), steps_(steps) {}

void Profile::before_step() {
  if (path_.empty() || written_) return;
  if (done_ == skip_) begin();
  if (running_ && done_ == skip_ + steps_) end();
  ++done_;
}

bool Profile::finish() {
  if (running_) end();
  return written_;
}

void Profile::begin() {
  hvd::start_timeline(path_ + ".hvd");
  kineto::prepareProfiler(config(), activities());
  kineto::enableProfiler(config(), activities());
  running_ = true;
  const auto one = torch::ones({1});
  hvd::allreduce(one, {.name = kMark});
  marked_ = nanoseconds_since_1970();
}

void Profile::end() {
  running_ = false;
  written_ = true;
  const std::string mine = path_ + ".rank" + std::to_string(hvd::rank());
  std::string words;
  collectively([&] {
    kineto::disableProfiler()->save(mine);
    hvd::stop_timeline();
    words =
        events_of_libtorch(mine, hvd::rank()).dump(-1, ' ', false, Json::error_handler_t::replace);
  });
  const auto all = hvd::allgather_object(words);
  const auto marks = hvd::allgather_object(marked_);
  on_rank_zero([&] {
    Json events = events_of_hvd(path_ + ".hvd", marks);
    for (const auto& events_of_rank : all) {
      for (auto& event : Json::parse(events_of_rank)) events.push_back(std::move(event));
    }
    double first = 0;
    for (const auto& event : events) {
      if (event.contains("ts") && (first == 0 || event["ts"].get<double>() < first))
        first = event["ts"].get<double>();
    }
    for (auto& event : events) {
      if (event.contains("ts")) event["ts"] = event["ts"].get<double>() - first;
    }
    replace_file(path_, "--profile", [&](std::ostream& out) {
      out << Json{{"traceEvents", std::move(events)}}.dump(-1, ' ', false,
                                                           Json::error_handler_t::replace)
          << '\n';
    });
  });
}

}  // namespace examples
