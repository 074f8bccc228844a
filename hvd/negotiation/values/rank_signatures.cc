#include "hvd/negotiation/values/rank_signatures.h"

#include <algorithm>
#include <utility>

namespace hvd {

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
    if (!next.empty() && next.back().signature == of_run && next.back().places.first + next.back().places.count == run.first) {
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
  const auto ends_before = [](const Said& said, int wanted) { return said.places.first + said.places.count <= wanted; };
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
         found->places.first + found->places.count >= places.first + places.count;  // equal neighbours are one
}

bool RankSignatures::all_equal(Run places, const Signature& signature) const {
  const auto found = find(places.first);
  return found != said_.end() && *found->signature == signature && found->places.first + found->places.count >= places.first + places.count;
}

}  // namespace hvd
