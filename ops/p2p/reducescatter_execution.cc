#include "ops/p2p/reducescatter_execution.h"

#include <utility>

namespace hvd {

ReducescatterExecution::Keeper::Keeper(Requests& requests, const ChunkedRun& run, Elements of_keeper)
    : send(requests, run), elements(std::move(of_keeper)) {}

ReducescatterExecution::Source::Source(Requests& requests, const ChunkedRun& run, std::size_t of_domain)
    : receive(requests, run), domain(of_domain) {}

ReducescatterExecution::ReducescatterExecution(P2pContext& context, Batch batch)
    : ReducingExecution(context, std::move(batch)), own_(part_of_members(&BatchMember::counts, number_of(self()))) {
  const int tag = context_.tag(batch_, 0);
  chunk_elements_ = chunk_elements(batch_.ranks.size(), element_ * (plan_.raw ? plan_.most_ranks : 1));
  from_.resize(who_.domains.size());
  const std::size_t domains = who_.domains.size();
  // Each begins with another one, so that not all send to the same.
  for (std::size_t i = 1; i < domains; ++i) {
    const std::size_t domain = (who_.self_domain + i) % domains;
    const ChunkedRun from{server(domain, who_.self_domain, who_.self_place), tag, own_.flat.size(), arrays(domain) * element_,
                          chunk_elements_};
    sources_.emplace_back(requests_, from, domain);
    for (std::size_t place = 0; place < who_.domains[domain].size(); ++place) {
      if (server(who_.self_domain, domain, place) != self()) continue;
      const int keeper = who_.domains[domain][place];
      Elements elements = part_of_members(&BatchMember::counts, number_of(keeper));
      const ChunkedRun to{keeper, tag, elements.flat.size(), arrays(who_.self_domain) * element_, chunk_elements_};
      keepers_.emplace_back(requests_, to, std::move(elements));
    }
  }
}

int ReducescatterExecution::server(std::size_t domain, std::size_t keeper_domain, std::size_t keeper_place) const {
  const auto& ranks = who_.domains[domain];
  return ranks[(keeper_place + keeper_domain) % ranks.size()];
}

/// Sends what can be sent now.
bool ReducescatterExecution::serve(Keeper& keeper) {
  bool worked = false;
  for (; keeper.send.has_room(); keeper.send.send()) {
    contribute(keeper.elements, keeper.send.next(), keeper.send.buffer());
    worked = true;
  }
  return worked;
}

/// Combines the next of the own elements if all domains' contributions are there.
bool ReducescatterExecution::combine_next() {
  if (combined_ == own_.flat.size()) return false;
  for (const Source& source : sources_)
    if (!source.receive.has_next()) return false;
  const Range range{combined_, std::min(combined_ + chunk_elements_, own_.flat.size())};
  if (!plan_.raw) {
    if (own_contribution_.empty()) own_contribution_ = requests_.buffer(range.size() * element_);  // none is larger than the first
    contribute(own_, range, own_contribution_.data());
    from_[who_.self_domain] = own_contribution_.data();
  }
  for (const Source& source : sources_) from_[source.domain] = source.receive.data();
  combine(own_, range, from_, [&](const BatchMember& member, std::size_t first, std::size_t /*before*/) {
    out_.push_back(static_cast<std::byte*>(member.output) + first * element_);
  });
  for (Source& source : sources_) source.receive.take();
  combined_ = range.end;
  return true;
}

Progress ReducescatterExecution::advance() {
  bool worked = requests_.poll();
  for (Source& source : sources_) worked = source.receive.await() || worked;
  for (Keeper& keeper : keepers_) worked = serve(keeper) || worked;
  while (combine_next()) worked = true;
  const bool served = std::all_of(keepers_.begin(), keepers_.end(), [](const Keeper& keeper) { return keeper.send.over(); });
  if (served && combined_ == own_.flat.size() && !std::exchange(counted_, true)) {
    state_.finished.fetch_add(1, std::memory_order_acq_rel);
    worked = true;
  }
  if (!counted_ || state_.finished.load(std::memory_order_acquire) != ranks_here() || !requests_.idle())
    return worked ? Progress::Advanced : Progress::Idle;
  count_sent_bytes();
  if (!alone())
    for (const auto& member : batch_.members) context_.staging().release(my_location(member));
  return Progress::Done;
}

}  // namespace hvd
