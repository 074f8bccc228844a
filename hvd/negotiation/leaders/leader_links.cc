#include "hvd/negotiation/leaders/leader_links.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace hvd {

namespace {

int parent_of(int domain) { return domain == 0 ? -1 : domain & (domain - 1); }

/// Ascending.
std::vector<int> children_of(int domain, int domains) {
  std::vector<int> children;
  for (int bit = 1; (domain == 0 || bit < (domain & -domain)) && (domain | bit) < domains;
       bit <<= 1)
    children.push_back(domain | bit);
  return children;
}

}  // namespace

LeaderLinks::LeaderLinks(Transport& transport)
    : transport_(transport), self_(transport.domain()), parent_(parent_of(self_)) {
  const int domains = transport.domains();
  for (const int child : children_of(self_, domains))
    children_.push_back({child, std::min(child + (child - self_), domains)});
}

std::vector<int> LeaderLinks::neighbours_of(int domain, int domains) {
  std::vector<int> neighbours = children_of(domain, domains);
  if (domain != 0) neighbours.insert(neighbours.begin(), parent_of(domain));
  return neighbours;
}

int LeaderLinks::subtree_of(int domain) const {
  if (domain == self_) return domain;
  const auto child = std::find_if(children_.begin(), children_.end(), [&](const Child& c) {
    return domain >= c.domain && domain < c.end;
  });
  return child == children_.end() ? -1 : child->domain;
}

void LeaderLinks::Gathered::add(const Introduction& introduction) {
  const auto [place, fresh] = last.try_emplace(introduction.key, list.size());
  if (!fresh) {
    Introduction& before = list[place->second];
    if (before.signature == introduction.signature ||
        *before.signature == *introduction.signature) {
      for (const Run run : introduction.ranks) hvd::add(before.ranks, run);
      return;
    }
    place->second = list.size();
  }
  list.push_back(introduction);
}

void LeaderLinks::write_up() {
  for (const auto& introduction : std::exchange(up_, {}).list)
    outgoing_[parent_].put_bytes(LeaderItems::introduce_up(introduction));
}

void LeaderLinks::write_down() {
  for (const auto& introduction : std::exchange(down_, {}).list) {
    const Bytes item = LeaderItems::introduce_down(introduction);
    for (const auto& child : children_) outgoing_[child.domain].put_bytes(item);
  }
}

void LeaderLinks::send_up(const Bytes& item) {
  write_up();
  outgoing_[parent_].put_bytes(item);
}

void LeaderLinks::send_down(const Bytes& item, int except) {
  write_down();
  for (const auto& child : children_)
    if (child.domain != except) outgoing_[child.domain].put_bytes(item);
}

void LeaderLinks::send_to_all(const Bytes& item) {
  for (int domain = 0; domain < transport_.domains(); ++domain)
    if (domain != self_) outgoing_[domain].put_bytes(item);
}

void LeaderLinks::pass_on(const Bytes& message) {
  flush();
  if (children_.empty()) return;
  const SharedBytes shared = share(message);
  for (auto child = children_.rbegin(); child != children_.rend(); ++child)
    transport_.send(child->domain, shared);
}

bool LeaderLinks::flush() {
  write_up();
  write_down();
  const bool any = !outgoing_.empty();
  // The highest child first: its subtree is the largest and has the longest way still to go. Taken
  // out before: where the wire says no, what is for the others goes with the next flush.
  while (!outgoing_.empty()) {
    auto last = outgoing_.extract(std::prev(outgoing_.end()));
    transport_.send(last.key(), share(last.mapped().take()));
  }
  return any;
}

}  // namespace hvd
