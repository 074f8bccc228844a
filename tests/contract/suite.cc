// The suite: its chapters, in their order.

#include <algorithm>
#include <map>

#include "tests/contract/case.h"

namespace hvd::contract {

Domains Setting::domains_of(const std::vector<int>& ranks, const std::vector<int>& absent) const {
  Domains domains;
  std::map<int, std::size_t> known;
  for (std::size_t place = 0; place < ranks.size(); ++place) {
    const int rank = ranks[place];
    if (std::find(absent.begin(), absent.end(), rank) != absent.end()) continue;
    const int number = domain_of_rank.empty() ? 0 : domain_of_rank[static_cast<std::size_t>(rank)];
    const auto [found, is_new] = known.emplace(number, domains.size());
    if (is_new) domains.emplace_back();
    domains[found->second].push_back(place);
  }
  return domains;
}

bool Setting::is_alone(int rank) const {
  return !domain_of_rank.empty() && size > 1 &&
         std::count(domain_of_rank.begin(), domain_of_rank.end(),
                    domain_of_rank[static_cast<std::size_t>(rank)]) == 1;
}

Cases all_cases(const Setting& setting) {
  Cases cases;
  if (setting.fuses) {
    add_allreduce_cases(cases, setting);
    add_grouped_allreduce_cases(cases, setting);
    add_gather_cases(cases, setting);
    add_broadcast_cases(cases, setting);
    add_alltoall_cases(cases, setting);
    add_reducescatter_cases(cases, setting);
    add_into_cases(cases, setting);
    add_set_cases(cases, setting);
    add_join_cases(cases, setting);
    add_mismatch_cases(cases, setting);
    add_local_error_cases(cases, setting);
    add_peer_cases(cases, setting);
  }
  add_fusion_cases(cases, setting);
  return cases;
}

}  // namespace hvd::contract
