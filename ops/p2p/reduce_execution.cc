#include "ops/p2p/reduce_execution.h"

#include <cstring>
#include <utility>

#include "hvd/routes.h"

namespace hvd {

namespace {

// Of messages: buffers, no choice of a way.
constexpr std::size_t kLeastChunkBytes = 64 << 10;
constexpr std::size_t kMostChunkBytes = 256 << 10;
constexpr std::size_t kRoundBytes = 8 << 20;
constexpr unsigned kContribution = 0;
constexpr unsigned kResult = 1;

std::size_t fewest_ranks(const Arrangement& who) {
  const auto by_size = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  return std::min_element(who.domains.begin(), who.domains.end(), by_size)->size();
}

/// Elements of a chunk of an allreduce, in which one rank of each domain sends to each, where a
/// contribution has up to so many arrays.
std::size_t chunk_of(std::size_t domains, std::size_t arrays, std::size_t element) {
  return std::clamp(kRoundBytes / (domains * arrays), kLeastChunkBytes, kMostChunkBytes) / element;
}

}  // namespace

ReduceExecution::Keeper::Keeper(Requests& requests, const ChunkedRun& run, int rank, SendMode mode,
                                Part of_keeper)
    : send(requests, run, {rank}, mode), part(std::move(of_keeper)) {}

ReduceExecution::Source::Source(Requests& requests, const ChunkedRun& run, int rank,
                                std::size_t of_domain)
    : receive(requests, run, rank), domain(of_domain) {}

ReduceExecution::Result::Result(Requests& requests, const ChunkedRun& run, int rank, Part of_keeper)
    : receive(requests, run, rank), part(std::move(of_keeper)) {}

ReduceExecution::ReduceExecution(P2pContext& context, Batch batch)
    : ReducingExecution(context, std::move(batch)),
      all_(std::make_shared<const Elements>(all_elements(batch_))),
      parts_(batch_, &BatchMember::counts),
      small_(!scatters() &&
             routes::is_one_step(all_->flat.size() * element_ * (plan_.raw ? plan_.most_ranks : 1),
                                 who_.domains.size())),
      slices_(small_ ? 1 : fewest_ranks(who_)),
      chunk_elements_(
          scatters()
              ? chunk_elements(batch_.ranks.size(), element_ * (plan_.raw ? plan_.most_ranks : 1))
              : chunk_of(who_.domains.size(), plan_.raw ? plan_.most_ranks : 1, element_)) {
  from_.resize(who_.domains.size());
  if (who_.self_place < keepers(who_.self_domain))
    own_ = part_of(who_.self_domain, who_.self_place);
  // Each begins with another one, so that not all send to the same.
  for (std::size_t i = 1; i < who_.domains.size(); ++i)
    add_domain((who_.self_domain + i) % who_.domains.size());
  if (scatters() || small_ || results_.empty()) return;
  std::vector<int> others;
  for (std::size_t i = 1; i < who_.domains.size(); ++i)
    others.push_back(who_.domains[(who_.self_domain + i) % who_.domains.size()][who_.self_place]);
  own_results_.emplace(
      requests_,
      ChunkedRun{context_.tag(batch_, kResult), own_.range.size(), element_, chunk_elements_},
      std::move(others));
}

ReduceExecution::Part ReduceExecution::part_of(std::size_t domain, std::size_t place) const {
  const Range whole{0, all_->flat.size()};
  if (small_) return {all_, whole};
  if (!scatters()) return {all_, share(share(whole, slices_, place), who_.domains.size(), domain)};
  const auto number = number_of(who_.domains[domain][place]);
  auto elements = std::make_shared<const Elements>(parts_.of(number));
  const std::size_t size = elements->flat.size();
  return {std::move(elements), {0, size}};
}

int ReduceExecution::server(std::size_t domain, std::size_t keeper_domain,
                            std::size_t keeper_place) const {
  const auto& ranks = who_.domains[domain];
  return ranks[scatters() ? (keeper_place + keeper_domain) % ranks.size() : keeper_place];
}

/// Adds this rank's exchange with the ranks of another domain.
void ReduceExecution::add_domain(std::size_t domain) {
  const int tag = context_.tag(batch_, kContribution);
  // The results that are returned tell that a contribution has arrived. Where none come, a leader
  // need not wait for the other side either: it looks for messages every 10 ms at least, so what
  // waits in this process leaves it.
  const bool is_told = !scatters() && (!small_ || context_.leads());
  const auto mode = is_told ? SendMode::Ordinary : SendMode::Synchronous;
  if (own_.elements)
    sources_.emplace_back(
        requests_, ChunkedRun{tag, own_.range.size(), arrays(domain) * element_, chunk_elements_},
        server(domain, who_.self_domain, who_.self_place), domain);
  for (std::size_t place = 0; place < keepers(domain); ++place) {
    if (server(who_.self_domain, domain, place) != self()) continue;
    const int keeper = who_.domains[domain][place];
    const Part part = part_of(domain, place);
    const ChunkedRun run{tag, part.range.size(), arrays(who_.self_domain) * element_,
                         chunk_elements_};
    keepers_.emplace_back(requests_, run, keeper, mode, part);
    if (!scatters() && !small_)
      results_.emplace_back(
          requests_,
          ChunkedRun{context_.tag(batch_, kResult), part.range.size(), element_, chunk_elements_},
          keeper, part);
  }
}

/// Sends what can be sent now.
bool ReduceExecution::serve(Keeper& keeper) {
  bool worked = false;
  for (; keeper.send.has_room(); keeper.send.send()) {
    contribute(*keeper.part.elements, keeper.part.at(keeper.send.next()), keeper.send.buffer());
    worked = true;
  }
  return worked;
}

/// Combines the next of the own elements if all domains' contributions are there.
bool ReduceExecution::combine_next() {
  if (combined_ == own_.range.size() || (own_results_ && !own_results_->has_room())) return false;
  for (const Source& source : sources_)
    if (!source.receive.has_next()) return false;
  const Range run{combined_, std::min(combined_ + chunk_elements_, own_.range.size())};
  if (!plan_.raw) {
    // none is larger than the first
    if (own_contribution_.empty()) own_contribution_ = requests_.buffer(run.size() * element_);
    contribute(*own_.elements, own_.at(run), own_contribution_.data());
    from_[who_.self_domain] = own_contribution_.data();
  }
  for (const Source& source : sources_) from_[source.domain] = source.receive.data();
  combine(*own_.elements, own_.at(run), from_,
          [&](const BatchMember& member, std::size_t first, std::size_t before) {
            if (scatters())
              return out_.push_back(static_cast<std::byte*>(member.output) + first * element_);
            for (std::size_t place = 0; place < ranks_here(); ++place)
              out_.push_back(output(member, place) + first * element_);
            if (own_results_) out_.push_back(own_results_->buffer() + before * element_);
          });
  if (own_results_) own_results_->send();
  for (Source& source : sources_) source.receive.take();
  combined_ = run.end;
  return true;
}

/// Writes the results that have come into the memory of all ranks of this domain.
bool ReduceExecution::place(Result& result) {
  bool worked = result.receive.await();
  for (; result.receive.has_next(); result.receive.take()) {
    const std::byte* const from = result.receive.data();
    result.part.elements->flat.each(
        result.part.at(result.receive.next()),
        [&](std::size_t index, std::size_t first, std::size_t count, std::size_t before) {
          for (std::size_t place = 0; place < ranks_here(); ++place)
            std::memcpy(output(batch_.members[index], place) + first * element_,
                        from + before * element_, count * element_);
        });
    worked = true;
  }
  return worked;
}

bool ReduceExecution::has_done_all() const {
  return combined_ == own_.range.size() &&
         std::ranges::all_of(keepers_, [](const Keeper& keeper) { return keeper.send.over(); }) &&
         std::ranges::all_of(results_, [](const Result& result) { return result.receive.over(); });
}

Progress ReduceExecution::advance() {
  bool worked = requests_.poll();
  for (Source& source : sources_) worked = source.receive.await() || worked;
  for (Result& result : results_) worked = place(result) || worked;
  // Before results overwrite what is to be contributed: where every domain keeps everything, that
  // is one chunk.
  for (Keeper& keeper : keepers_) worked = serve(keeper) || worked;
  while (combine_next()) worked = true;
  const std::size_t all = keepers(who_.self_domain);
  if (!counted_ && who_.self_place < all && has_done_all()) {
    counted_ = worked = true;
    state_.finished.fetch_add(1, std::memory_order_acq_rel);
  }
  if (state_.finished.load(std::memory_order_acquire) != all || !requests_.idle())
    return worked ? Progress::Advanced : Progress::Idle;
  count_sent_bytes();
  if (alone()) return Progress::Done;
  for (const auto& member : batch_.members) {
    if (scatters()) {
      context_.staging().release(my_location(member));
    } else {
      context_.staging().take_out(my_location(member), member.output, bytes_of(member.count));
    }
  }
  return Progress::Done;
}

}  // namespace hvd
