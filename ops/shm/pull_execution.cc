// Tested in tests/ops/shm/peer_memory_test.cc, tests/ops/shm/staging_mpi_test.cc
#include "ops/shm/executions.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <vector>

#include "ops/host_ops.h"
#include "ops/kernels/reduce.h"

namespace hvd {

namespace {

/// The bytes of all ranks' inputs that are brought here at once to be reduced: they stay in the
/// second-level cache.
constexpr std::size_t kScratchBytes = 512 << 10;

}  // namespace

PullExecution::PullExecution(ShmContext& context, Batch batch)
    : context_(context),
      batch_(std::move(batch)),
      state_(context.board().batches().state(batch_.sequence)) {}

Progress PullExecution::advance() {
  const bool pulls_now = !std::exchange(tried_, true);
  if (pulls_now) {
    pulled_ = pull();
    if (pulled_ &&
        state_.finished.fetch_add(1, std::memory_order_acq_rel) + 1 == batch_.ranks.size()) {
      state_.complete.store(true, std::memory_order_release);
      context_.board().bells().ring_waiters();  // ranks that wait with memory of their own in use
    }
  }
  if (!pulled_) return Progress::Idle;
  // The others read from this rank's memory until all have what they want. A staged block can wait
  // for that without its owner.
  const auto in_use = [&](const BatchMember& member) {
    return Staging::is_users(my_location(member));
  };
  if (std::any_of(batch_.members.begin(), batch_.members.end(), in_use)) {
    // of ranks that are not waiting for this batch
    if (pulls_now && !context_.linger(state_)) context_.board().bells().ring_all_workers();
    if (!state_.complete.load(std::memory_order_acquire))
      return pulls_now ? Progress::Advanced : Progress::Idle;
  }
  for (const auto& member : batch_.members)
    context_.staging().release_later(batch_.sequence, my_location(member));
  return Progress::Done;
}

Access PullExecution::access() const {
  const bool is_broadcast = batch_.traits.kind == OpKind::Broadcast;
  const std::size_t source = place_of(is_broadcast ? batch_.traits.root : context_.rank());
  return context_.staging().access(index_of(source), location_of(batch_.members.front(), source));
}

std::uint64_t PullExecution::my_location(const BatchMember& member) const {
  return member.locations[static_cast<std::size_t>(context_.staging().self())];
}

std::uint64_t PullExecution::location_of(const BatchMember& member, std::size_t place) const {
  return member.locations[static_cast<std::size_t>(index_of(place))];
}

bool PullExecution::pull() {
  return std::all_of(batch_.members.begin(), batch_.members.end(), [&](const BatchMember& member) {
    return batch_.traits.kind == OpKind::Reducescatter ? reduce(member) : copy(member);
  });
}

std::size_t PullExecution::place_of(int rank) const {
  return static_cast<std::size_t>(std::lower_bound(batch_.ranks.begin(), batch_.ranks.end(), rank) -
                                  batch_.ranks.begin());
}

bool PullExecution::run(PieceExchange& exchange, const BatchMember& member) {
  const bool all =
      exchange.take_all([&](std::size_t place, std::size_t skipped, std::span<std::byte> to) {
        return context_.staging().read(index_of(place), location_of(member, place), skipped,
                                       to.data(), to.size());
      });
  readers_are_there_ = all && readers_are_there_ && exchange.give_rest();
  return all;
}

/// Gives what this rank exposes to all, or to each one.
void PullExecution::give(PieceExchange& exchange, const BatchMember& member) {
  const std::size_t self = place_of(context_.rank());
  const auto* const input = static_cast<const std::byte*>(member.input);
  if (!readers_are_there_) return;
  const auto relay_for = [&](std::size_t place) {
    return context_.staging()
        .relay_end(index_of(self), my_location(member), reader_number(place, self))
        .relay;
  };
  if (batch_.traits.kind != OpKind::Alltoall) {
    if (Relay* const relay = relay_for(self == 0 ? 1 : 0); relay != nullptr)
      exchange.give(*relay, {input, bytes_of(batch_.traits, member.count)});
    return;
  }
  std::size_t before = 0;
  for (std::size_t place = 0; place < batch_.ranks.size(); ++place) {
    const std::size_t bytes = bytes_of(batch_.traits, member.sends[place]);
    if (Relay* const relay = place == self ? nullptr : relay_for(place);
        relay != nullptr && bytes > 0)
      exchange.give(*relay, {input + before, bytes});
    before += bytes;
  }
}

/// Each rank begins with its own part and goes on with that of the next: not all with the same. Of
/// a broadcast there is the root's alone.
bool PullExecution::copy(const BatchMember& member) {
  const BatchTraits& traits = batch_.traits;
  const bool is_broadcast = traits.kind == OpKind::Broadcast;
  const std::size_t ranks = batch_.ranks.size();
  const std::size_t self = place_of(context_.rank()),
                    first = is_broadcast ? place_of(traits.root) : self;
  const auto all =
      is_broadcast ? member.count
                   : std::accumulate(member.counts.begin(), member.counts.end(), std::int64_t{0});
  const bool past_caches = leaves_caches(bytes_of(traits, all));
  PieceExchange exchange = context_.exchange(past_caches);
  if (first == self) give(exchange, member);
  for (std::size_t turn = 0; turn < (is_broadcast ? 1 : ranks); ++turn) {
    const std::size_t place = (first + turn) % ranks;
    const auto own = member.counts.begin() + static_cast<std::ptrdiff_t>(is_broadcast ? 0 : place);
    const std::size_t bytes = bytes_of(traits, is_broadcast ? member.count : *own);
    const std::size_t before =
        bytes_of(traits, std::accumulate(member.counts.begin(), own, std::int64_t{0}));
    const std::size_t skipped =
        member.offsets.empty() ? 0 : bytes_of(traits, member.offsets[place]);
    if (bytes > 0 && !take(exchange, member, place, skipped,
                           {static_cast<std::byte*>(member.output) + before, bytes}, past_caches))
      return false;
  }
  return run(exchange, member);
}

/// Takes what begins after `skipped` in the input of the rank in this place: now, or, where there
/// is a ring, with all that comes so.
bool PullExecution::take(PieceExchange& exchange, const BatchMember& member, std::size_t place,
                         std::size_t skipped, std::span<std::byte> to, bool past_caches) {
  const std::size_t self = place_of(context_.rank());
  if (place == self && member.output == member.input) return true;
  const std::uint64_t location = location_of(member, place);
  const RelayEnd end = place == self ? RelayEnd()
                                     : context_.staging().relay_end(index_of(place), location,
                                                                    reader_number(self, place));
  if (end.relay == nullptr)
    return context_.staging().read(index_of(place), location, skipped, to.data(), to.size(),
                                   past_caches);
  exchange.take(place, skipped, end, to);
  return true;
}

bool PullExecution::reduce(const BatchMember& member) {
  const auto place = static_cast<std::size_t>(batch_.traits.set->rank);
  const auto own = member.counts.begin() + static_cast<std::ptrdiff_t>(place);
  const std::size_t element = element_bytes(batch_.traits.dtype);
  const std::size_t skipped =
      bytes_of(batch_.traits, std::accumulate(member.counts.begin(), own, std::int64_t{0}));
  const auto count = static_cast<std::size_t>(*own);
  if (count == 0) return true;
  const std::size_t ranks = batch_.ranks.size();
  std::vector<const void*> whole(ranks), inputs(ranks);
  std::size_t elsewhere = 0;
  for (std::size_t other = 0; other < ranks; ++other) {
    whole[other] = context_.staging().address_here(index_of(other), location_of(member, other));
    elsewhere += whole[other] == nullptr ? 1 : 0;
  }
  const std::size_t most =
      elsewhere == 0
          ? count
          : std::max<std::size_t>(kMemberAlignment,
                                  kScratchBytes / elsewhere / kMemberAlignment * kMemberAlignment) /
                element;
  const std::size_t block = (std::min(most, count) * element + kMemberAlignment - 1) /
                            kMemberAlignment * kMemberAlignment;
  std::byte* const scratch = context_.scratch(elsewhere * block);
  const kernels::Reduction reduction = reduction_of(batch_.traits);
  for (std::size_t begin = 0; begin < count; begin += most) {
    const std::size_t some = std::min(most, count - begin);
    const std::size_t from = skipped + begin * element;
    auto* free = scratch;
    for (std::size_t other = 0; other < ranks; ++other) {
      inputs[other] =
          whole[other] == nullptr ? free : static_cast<const std::byte*>(whole[other]) + from;
      if (whole[other] != nullptr) continue;
      if (!context_.staging().read(index_of(other), location_of(member, other), from, free,
                                   some * element))
        return false;
      free += block;
    }
    const std::array<void*, 1> output{static_cast<std::byte*>(member.output) + begin * element};
    kernels::reduce(reduction, inputs, output, some);
  }
  return true;
}

}  // namespace hvd
