#include "hvd/negotiation/values/rank_runs.h"

#include <algorithm>
#include <utility>

namespace hvd {

void add(Runs& runs, Run run) {
  // The first that `run` touches, and the first beyond it.
  auto from = std::lower_bound(runs.begin(), runs.end(), run.first, [](const Run& r, int first) { return r.first + r.count < first; });
  auto to = from;
  int first = run.first;
  int end = run.first + run.count;
  for (; to != runs.end() && to->first <= end; ++to) {
    first = std::min(first, to->first);
    end = std::max(end, to->first + to->count);
  }
  if (from == to) {
    runs.insert(from, run);
    return;
  }
  *from = {first, end - first};
  runs.erase(from + 1, to);
}

void remove(Runs& runs, Run run) {
  const int end = run.first + run.count;
  const auto touches = [&](const Run& r) { return r.first < end && r.first + r.count > run.first; };
  if (std::none_of(runs.begin(), runs.end(), touches)) return;
  Runs rest;
  for (const Run& r : runs) {
    if (r.first < run.first) rest.push_back({r.first, std::min(r.first + r.count, run.first) - r.first});
    if (r.first + r.count > end) rest.push_back({std::max(r.first, end), r.first + r.count - std::max(r.first, end)});
  }
  runs = std::move(rest);
}

std::optional<Run> find_run(std::span<const int> ascending, Run run) {
  // The list ascends, so that the run is in it if its ends are as far apart there.
  const auto first = std::lower_bound(ascending.begin(), ascending.end(), run.first);
  const bool fits = run.count > 0 && run.count <= ascending.end() - first && *first == run.first;
  if (!fits || first[run.count - 1] - run.first != run.count - 1) return std::nullopt;
  return Run{static_cast<int>(first - ascending.begin()), run.count};
}

}  // namespace hvd
