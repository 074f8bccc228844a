#include "torch_bindings/gradients/bucket_layout.h"

#include <algorithm>
#include <numeric>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

using Bucket = BucketLayout::Bucket;
using Members = std::vector<BucketLayout::Member>;

/// Adds what of `places` is in a bucket at all, one bucket for each kind.
void add(const Members& members, Bucket places, std::vector<Bucket>& buckets) {
  std::erase_if(places, [&](std::size_t place) { return members[place].alone; });
  while (!places.empty()) {
    const int kind = members[places.front()].kind;
    const auto others = std::stable_partition(places.begin(), places.end(), [&](std::size_t place) {
      return members[place].kind == kind;
    });
    Bucket rest(others, places.end());
    places.erase(others, places.end());
    buckets.push_back(std::exchange(places, std::move(rest)));
  }
}

void add_lists(const Members& members, const std::vector<Bucket>& lists, std::vector<bool>& dealt,
               std::vector<Bucket>& buckets) {
  for (const auto& list : lists) {
    Bucket group;
    for (const auto place : list) {
      // tied: the module lists it twice
      if (std::find(group.begin(), group.end(), place) != group.end()) continue;
      if (dealt[place])
        throw InvalidArgument(
            formatted("groups: parameter '{}' is in two groups", members[place].name));
      dealt[place] = true;
      group.push_back(place);
    }
    add(members, std::move(group), buckets);
  }
}

void add_groups(const Members& members, int groups, std::vector<bool>& dealt,
                std::vector<Bucket>& buckets) {
  if (groups < 1) throw InvalidArgument(formatted("groups: {} is not a number of groups", groups));
  const std::size_t per_group =
      (members.size() + static_cast<std::size_t>(groups) - 1) / static_cast<std::size_t>(groups);
  for (std::size_t begin = 0; begin < members.size(); begin += per_group) {
    Bucket group(std::min(per_group, members.size() - begin));
    std::iota(group.begin(), group.end(), begin);
    add(members, std::move(group), buckets);
  }
  dealt.assign(members.size(), true);
}

}  // namespace

std::vector<Bucket> BucketLayout::deal(const Members& members, const Terms& terms) {
  std::vector<Bucket> buckets;
  std::vector<bool> dealt(members.size(), false);
  add_lists(members, terms.lists, dealt, buckets);
  if (terms.groups) add_groups(members, *terms.groups, dealt, buckets);
  Bucket order = terms.order;
  if (order.empty()) {
    order.resize(members.size());
    std::iota(order.rbegin(), order.rend(), std::size_t{0});
  }
  Bucket bucket;
  std::size_t bytes = 0;
  for (const auto place : order) {
    const Member& member = members[place];
    if (dealt[place] || member.alone) continue;
    const std::size_t most = buckets.empty() ? terms.first_bytes : terms.most_bytes;
    if (!bucket.empty() &&
        (bytes + member.bytes > most || members[bucket.back()].kind != member.kind)) {
      add(members, std::exchange(bucket, {}), buckets);
      bytes = 0;
    }
    bucket.push_back(place);
    bytes += member.bytes;
  }
  add(members, std::move(bucket), buckets);
  return buckets;
}

}  // namespace hvd
