#include "hvd/negotiation/values/rank_runs.h"

#include <algorithm>
#include <utility>

namespace hvd {

void add(Runs& runs, Run run) {
  // The first that `run` touches, and the first beyond it.
  auto from = std::lower_bound(runs.begin(), runs.end(), run.first,
                               [](const Run& r, int first) { return r.first + r.count < first; });
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
    if (r.first < run.first)
      rest.push_back({r.first, std::min(r.first + r.count, run.first) - r.first});
    if (r.first + r.count > end)
      rest.push_back({std::max(r.first, end), r.first + r.count - std::max(r.first, end)});
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

void RankSignatures::set(Run places, SharedSignature signature) {
  for (const auto& other : said_) {
    if (other.signature != signature && !(*other.signature == *signature)) continue;
    signature = other.signature;
    break;
  }
  const int end = places.first + places.count;
  std::vector<Said> next;
  next.reserve(said_.size() + 2);
  const auto append = [&](Run run, const SharedSignature& of_run) {
    if (run.count <= 0) return;
    if (!next.empty() && next.back().signature == of_run &&
        next.back().places.first + next.back().places.count == run.first) {
      next.back().places.count += run.count;
    } else {
      next.push_back({run, of_run});
    }
  };
  bool placed = false;
  for (const auto& [run, of_run] : said_) {
    const int run_end = run.first + run.count;
    append({run.first, std::min(run_end, places.first) - run.first}, of_run);
    if (!placed && run_end > places.first) {
      append(places, signature);
      placed = true;
    }
    const int rest = std::max(run.first, end);
    append({rest, run_end - rest}, of_run);
  }
  if (!placed) append(places, signature);
  said_ = std::move(next);
}

std::vector<RankSignatures::Said>::const_iterator RankSignatures::find(int place) const {
  const auto ends_before = [](const Said& said, int wanted) {
    return said.places.first + said.places.count <= wanted;
  };
  const auto found = std::lower_bound(said_.begin(), said_.end(), place, ends_before);
  return found != said_.end() && found->places.first <= place ? found : said_.end();
}

const SharedSignature& RankSignatures::of(std::size_t place) const {
  static const SharedSignature kNothing;
  const auto found = find(static_cast<int>(place));
  return found == said_.end() ? kNothing : found->signature;
}

std::size_t RankSignatures::count() const {
  std::size_t count = 0;
  for (const auto& said : said_) count += static_cast<std::size_t>(said.places.count);
  return count;
}

bool RankSignatures::all_say(Run places, const SharedSignature& signature) const {
  const auto found = find(places.first);
  return found != said_.end() && found->signature == signature &&
         // equal neighbours are one
         found->places.first + found->places.count >= places.first + places.count;
}

bool RankSignatures::all_equal(Run places, const Signature& signature) const {
  const auto found = find(places.first);
  return found != said_.end() && *found->signature == signature &&
         found->places.first + found->places.count >= places.first + places.count;
}

}  // namespace hvd
