#include "hvd/negotiation/table/deadlock.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "hvd/negotiation/values/records.h"
#include "hvd/negotiation/values/unit_names.h"

namespace hvd {

namespace {

constexpr std::size_t kMostGroups = 8;  // of ranks that a message names
constexpr std::size_t kMostWaits = 3;   // of what each of them waits for
constexpr std::size_t kMostName = 80;   // characters of a name

std::string text_of(const UnitKey& key) {
  const std::string_view name = display_name(key.name);
  std::string text = formatted("{} '{}{}'", name_of(key.kind), name.substr(0, kMostName),
                               name.size() > kMostName ? "..." : "");
  if (key.process_set != 0) text += formatted(" of process set {}", key.process_set);
  return text;
}

std::string text_of(const std::vector<UnitKey>& waits) {
  std::string text;
  for (std::size_t i = 0; i < std::min(waits.size(), kMostWaits); ++i)
    text += (i == 0 ? "" : " and ") + text_of(waits[i]);
  return waits.size() > kMostWaits ? text + formatted(" and {} more", waits.size() - kMostWaits)
                                   : text;
}

std::string text_of(const std::vector<BlockedRank>& ranks) {
  std::map<std::vector<UnitKey>, std::vector<int>> alike;
  for (const auto& rank : ranks) alike[rank.waits].push_back(rank.rank);
  std::vector<std::pair<std::vector<int>, std::string>> groups;
  for (auto& [waits, who] : alike) groups.emplace_back(std::move(who), text_of(waits));
  std::sort(groups.begin(), groups.end());
  std::string text;
  for (std::size_t i = 0; i < std::min(groups.size(), kMostGroups); ++i) {
    const auto& [who, waits] = groups[i];
    const bool one = who.size() == 1;
    text += formatted("{}rank{} {} wait{} for {}", i == 0 ? "" : "; ", one ? "" : "s",
                      rank_list(who), one ? "s" : "", waits);
  }
  return groups.size() > kMostGroups ? text + "; and others for more" : text;
}

}  // namespace

std::vector<Deadlocked> find_deadlock(std::vector<BlockedRank> blocked, const RanksOf& ranks_of) {
  // Of all blocked ranks, those go that one of their operations may still release, until none goes.
  const auto missing_in = [&](const UnitKey& key) {
    const auto* const ranks = ranks_of(key.process_set);
    if (ranks == nullptr) return -1;  // its operations end with it
    const auto lacks = [&](const BlockedRank& other) {
      const bool joined =
          key.kind != OpKind::Join &&
          other.submitted.contains({key.process_set, OpKind::Join, std::string(kJoin)});
      return !joined && std::binary_search(ranks->begin(), ranks->end(), other.rank) &&
             !other.submitted.contains(key);
    };
    const auto found = std::find_if(blocked.begin(), blocked.end(), lacks);
    return found == blocked.end() ? -1 : found->rank;
  };
  const auto may_go_on = [&](const BlockedRank& rank) {
    return rank.waits.empty() ||
           std::any_of(rank.waits.begin(), rank.waits.end(),
                       [&](const UnitKey& key) { return missing_in(key) < 0; });
  };
  while (true) {
    const auto released = std::find_if(blocked.begin(), blocked.end(), may_go_on);
    if (released == blocked.end()) break;
    blocked.erase(released);
  }
  std::sort(blocked.begin(), blocked.end(),
            [](const auto& a, const auto& b) { return a.rank < b.rank; });
  std::set<UnitKey> waited, left;
  for (const auto& rank : blocked) {
    waited.insert(rank.waits.begin(), rank.waits.end());
    std::copy_if(rank.submitted.begin(), rank.submitted.end(), std::inserter(left, left.end()),
                 [&](const UnitKey& key) { return missing_in(key) >= 0; });
  }
  std::vector<Deadlocked> found;
  const std::string text = formatted(
      "it can never end, as the ranks wait for one another: {}. All ranks must submit the same: "
      "has one of them left out a batch after an error (hvd::any() lets all ranks agree on that), "
      "or made one wrapper more?",
      text_of(blocked));
  for (const auto* const keys : {&waited, &left})  // there may not be room for all at once
    for (const auto& key : *keys)
      // who has joined waits for what the others then do
      if (key.kind != OpKind::Join && (keys == &waited || !waited.contains(key)))
        found.push_back({key, missing_in(key), text});
  return found;
}

void encode(Writer& writer, const BlockedReport& report) {
  writer.put(report.domain).put(static_cast<std::uint32_t>(report.ranks.size()));
  for (const auto& rank : report.ranks) {
    writer.put(rank.rank).put(static_cast<std::uint32_t>(rank.waits.size()));
    for (const auto& key : rank.waits) encode(writer, key);
    writer.put(static_cast<std::uint32_t>(rank.submitted.size()));
    for (const auto& key : rank.submitted) encode(writer, key);
  }
  writer.put(static_cast<std::uint32_t>(report.last_decisions.size()));
  for (const auto& [key, decision] : report.last_decisions) {
    encode(writer, key);
    writer.put(decision);
  }
}

BlockedReport decode_blocked_report(Reader& reader) {
  BlockedReport report;
  report.domain = reader.get<int>();
  for (auto left = reader.get<std::uint32_t>(); left > 0; --left) {
    BlockedRank& rank = report.ranks.emplace_back();
    rank.rank = reader.get<int>();
    for (auto keys = reader.get<std::uint32_t>(); keys > 0; --keys)
      rank.waits.push_back(decode_key(reader));
    for (auto keys = reader.get<std::uint32_t>(); keys > 0; --keys)
      rank.submitted.insert(decode_key(reader));
  }
  for (auto left = reader.get<std::uint32_t>(); left > 0; --left) {
    UnitKey key = decode_key(reader);
    report.last_decisions[std::move(key)] = reader.get<std::uint64_t>();
  }
  return report;
}

bool BlockedDomains::note_said(const BlockedReport& report) {
  if (report == said_ || (report.ranks.empty() && said_.ranks.empty())) return false;
  said_ = report;
  return true;
}

void BlockedDomains::add(BlockedReport report) {
  if (report.ranks.empty()) {
    reports_.erase(report.domain);
  } else {
    reports_[report.domain] = std::move(report);
  }
}

std::vector<Deadlocked> BlockedDomains::find(
    const RanksOf& ranks_of,
    const std::function<std::uint64_t(const UnitKey&)>& last_decision) const {
  std::vector<BlockedRank> blocked;
  for (const auto& of_domain : reports_)
    for (const auto& rank : of_domain.second.ranks) {
      const auto& last_known = of_domain.second.last_decisions;
      const auto holds = [&](const UnitKey& key) {
        const auto known = last_known.find(key);
        return known != last_known.end() && known->second == last_decision(key);
      };
      if (std::all_of(rank.waits.begin(), rank.waits.end(), holds)) blocked.push_back(rank);
    }
  if (blocked.size() < 2) return {};
  auto found = find_deadlock(std::move(blocked), ranks_of);
  // Of what nobody waits for, a domain may have said what has been decided since.
  std::erase_if(found, [&](const Deadlocked& operation) {
    return std::any_of(reports_.begin(), reports_.end(), [&](const auto& of_domain) {
      const auto known = of_domain.second.last_decisions.find(operation.key);
      return known != of_domain.second.last_decisions.end() &&
             known->second != last_decision(operation.key);
    });
  });
  return found;
}

}  // namespace hvd
