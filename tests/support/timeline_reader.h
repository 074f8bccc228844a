#pragma once
/// Reads a timeline back and says what is wrong with it: that it is no JSON, does not end as it
/// should, or has slices of a lane that do not nest. Values; throws std::runtime_error with the
/// reason.

#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace hvd::test {

struct TimelineSlice {
  int pid = 0, tid = 0;
  std::string name, lane, parent;
  double from = 0, to = 0;
  nlohmann::json args, end_args;
};

struct ReadTimeline {
  std::vector<nlohmann::json> events;
  std::vector<TimelineSlice> slices;  ///< that have begun and ended
  std::size_t open = 0;               ///< slices without an end

  [[nodiscard]] std::vector<TimelineSlice> named(const std::string& name,
                                                 const std::string& lane = {}, int pid = -1) const {
    std::vector<TimelineSlice> found;
    for (const auto& slice : slices)
      if (slice.name == name && (lane.empty() || slice.lane == lane) &&
          (pid < 0 || slice.pid == pid))
        found.push_back(slice);
    return found;
  }
  [[nodiscard]] std::size_t count(const std::string& name) const {
    std::size_t found = 0;
    for (const auto& event : events) found += event.value("name", "") == name ? 1 : 0;
    return found;
  }
  [[nodiscard]] std::set<int> pids() const {
    std::set<int> found;
    for (const auto& event : events) found.insert(event.at("pid").get<int>());
    return found;
  }
};

inline std::string read_whole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("there is no file " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline ReadTimeline read_timeline_text(const std::string& text) {
  if (text.size() < 3 || text.substr(text.size() - 3) != "\n]\n")
    throw std::runtime_error("it does not end in a line with ]");
  ReadTimeline read;
  read.events = nlohmann::json::parse(text).get<std::vector<nlohmann::json>>();
  struct LaneState {
    std::string name;
    double last = 0;
    std::vector<TimelineSlice> stack;
  };
  std::map<std::pair<int, int>, LaneState> lanes;
  for (const auto& event : read.events) {
    const std::string phase = event.at("ph");
    const int pid = event.at("pid");
    const int tid = event.at("tid");
    LaneState& lane = lanes[{pid, tid}];
    if (phase == "M") {
      if (event.at("name") == "thread_name") lane.name = event.at("args").at("name");
      continue;
    }
    const double at = event.at("ts");
    if (tid == 0) continue;
    if (at < lane.last)
      throw std::runtime_error("an event of lane '" + lane.name +
                               "' is earlier than the one before");
    lane.last = at;
    if (phase == "B") {
      const std::string parent = lane.stack.empty() ? "" : lane.stack.back().name;
      lane.stack.push_back({pid,
                            tid,
                            event.at("name"),
                            lane.name,
                            parent,
                            at,
                            0,
                            event.value("args", nlohmann::json()),
                            {}});
    } else if (phase == "E") {
      if (lane.stack.empty())
        throw std::runtime_error("an end without a beginning in lane '" + lane.name + "'");
      TimelineSlice slice = std::move(lane.stack.back());
      lane.stack.pop_back();
      slice.to = at;
      slice.end_args = event.value("args", nlohmann::json());
      read.slices.push_back(std::move(slice));
    } else if (phase != "i") {
      throw std::runtime_error("an event of kind " + phase + " in lane '" + lane.name + "'");
    }
  }
  for (const auto& [place, lane] : lanes) read.open += lane.stack.size();
  return read;
}

inline ReadTimeline read_timeline(const std::string& path) {
  return read_timeline_text(read_whole(path));
}

}  // namespace hvd::test
