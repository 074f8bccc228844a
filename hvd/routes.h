#pragma once
/// The chooser: which way an operation takes. Pure functions over one table of limits, each with
/// its reason and the measurement that it comes from: no other file compares a size or a number of
/// ranks with a constant to choose a way. What `init()` measures is an argument. The places that
/// decide ask the functions of `routes`; `choose` puts them together, for `hvd_bench --routes`,
/// docs/routes.md and the tests. Any thread; nothing fails.

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "hvd/types.h"

#pragma GCC visibility push(default)
namespace hvd {

/// A Route is a way that an operation takes: within a host, then between hosts, then on GPUs.
enum class Route : std::uint8_t {
  AtSlot,       ///< the last rank to arrive does it for all, in blocks that stay
  EachItsPart,  ///< each takes its part of the others' inputs; an Access says how
  Claimed,      ///< chunks, each reduced by whichever rank claims it
  Adasum,       ///< the same with whole tensors; between hosts the sums of the hosts, in pairs
  Direct,       ///< the leaders of the hosts send each other what their hosts contribute
  Slices,       ///< each rank combines a part of what the hosts contribute; between hosts
  Streams,  ///< chunks go to whoever needs them, by way of leaders where several do; between hosts
  Nccl,     ///< a GPU for each rank
  SharedGpu,  ///< all ranks have one GPU
  Staged,     ///< a GPU's tensors go through host memory, there by one of the ways above
};
/// The number of routes.
inline constexpr std::size_t kRoutes = static_cast<std::size_t>(Route::Staged) + 1;

/// An Access is how ranks of a host get at each other's inputs where each takes its part.
enum class Access : std::uint8_t {
  None,    ///< it takes no part
  Lent,    ///< repeated: each owner copies its input into a block that is leased for the round
  Copied,  ///< each owner copies its input into shared memory
  Read,    ///< where it lies, by the system unless it is shared memory
  Ring,    ///< the same, and owners copy ahead of their readers into rings
};
/// The number of accesses.
inline constexpr std::size_t kAccesses = static_cast<std::size_t>(Access::Ring) + 1;

/// A RouteChoice is a way in all its details.
struct RouteChoice {
  Route route;                   ///< who does what
  Access access = Access::None;  ///< how it gets at the others' memory, where each takes its part
  auto operator<=>(const RouteChoice& other) const = default;  ///< by number
};

/// A Limit is a number at which one way ends and another begins.
enum class Limit : std::uint8_t {
  SlotBytes,                 ///< of the block of a repeated operation that one rank does for all
  GroupTensors,              ///< tensors of a group, likewise
  LentBytes,                 ///< of an input that is leased for a round
  LentRanks,                 ///< ranks of such a round
  DirectHosts,               ///< hosts whose leaders send to each other directly
  DirectBytes,               ///< that such a leader sends
  DirectAlltoallBytes,       ///< that it sends for an alltoall
  DirectBurstBytes,          ///< that it sends of one in a burst
  AtOnceBytes,               ///< of a batch that is run at once, and of an input that is copied in
  CopiedForManyRanks,        ///< ranks of a broadcast whose large input is copied in
  CopiedForManyBytes,        ///< of that input
  CopiedTogetherBytes,       ///< of such copies at a time
  CopiedOfSlowBytes,         ///< of an input that is copied in where reading is slow
  CopiedToReduceBytes,       ///< of a reducescatter's, likewise
  HelpedBytes,               ///< from which on the root of a broadcast helps its reader
  RelayPieceBytes,           ///< of a piece in a ring
  RelayedTogetherBytes,      ///< of rings at a time
  StreamedBytes,             ///< from which on copies are stored past the caches
  SlowTimes,                 ///< how much longer reading takes where it is slow
  OneStepBytes,              ///< that a host sends for an allreduce in one step
  BroadcastPieces,           ///< pieces of a broadcast between hosts
  LeastBroadcastPieceBytes,  ///< of such a piece, at least
  MostBroadcastPieceBytes,   ///< of such a piece, at most
  EagerBytes,                ///< of a message that is sent before anybody receives it
  EagerTogetherBytes,        ///< of such messages at a time
  FedBytes,                  ///< of a message that goes through a ring although it could be read
};
/// The number of limits.
inline constexpr std::size_t kLimitCount = static_cast<std::size_t>(Limit::FedBytes) + 1;

/// A LimitRow is what the table has of a limit.
struct LimitRow {
  Limit limit;                ///< which it is
  std::size_t value;          ///< the number
  std::string_view what;      ///< is limited
  std::string_view why;       ///< there is a limit, and what is beyond it
  std::string_view measured;  ///< where it comes from
};

/// The table.
inline constexpr std::array<LimitRow, kLimitCount> kLimits{{
    {Limit::SlotBytes, std::size_t{16} << 10,
     "bytes of the block that any rank needs for a repeated operation, of a group together",
     "one rank that does it all saves the record and the batch; beyond it ranks that share the "
     "work are faster",
     "4 ranks on 2 cores, 4 B: 8 us, through the log 22; chunks of 256 KiB back to back: 16 KiB 20 "
     "us"},
    {Limit::GroupTensors, 32, "tensors of a group that is done at the slot",
     "they are listed on the caller's stack",
     "4 tensors of 4 to 1,024 B: 2.7 to 3.9 times MPI's speed with 2 ranks, 4.8 to 7.5 with 4; "
     "larger groups: no record"},
    {Limit::LentBytes, std::size_t{512} << 10, "bytes of an input that is leased for a round",
     "no record and no batch, and every core at work; beyond it the copy into the block counts",
     "2 ranks, 512 KiB: allgather 36 us, leased 17; alltoall 33, 22; broadcast 44, 17 (MPI 24, 25, "
     "13); beyond: no record"},
    {Limit::LentRanks, 11, "ranks of a round with leased blocks",
     "the inline data on the board has room for the places of so many blocks",
     "no measurement: 88 bytes, 8 for each block"},
    {Limit::DirectHosts, 8, "hosts whose leaders send each other what they contribute",
     "each sends to each: with more hosts the tree has fewer messages on each line",
     "2 hosts, 4 B: 42 us by way of the tree, 19 directly; more hosts: no record"},
    {Limit::DirectBytes, std::size_t{64} << 10,
     "bytes that a leader sends for such an operation, to all others together, and of a rank's "
     "block for it",
     "the leader alone sends it; a batch uses all ranks",
     "2 hosts of 1 and 2 ranks, allreduce of 32 KiB: as a batch 57 and 154 us, directly 32 and 53; "
     "64 KiB 85 and 284, 92 and 125"},
    {Limit::DirectAlltoallBytes, std::size_t{16} << 10,
     "bytes that a leader sends for an alltoall, to all others together",
     "each host gets the whole inputs, of which it needs a part",
     "2 hosts of 2 ranks, 1 Gbit/s: 1 KiB 230 to 290 us as a batch, 47 to 71 directly; 16 KiB 192 "
     "to 199, 273"},
    {Limit::DirectBurstBytes, std::size_t{32} << 10,
     "bytes of an input, once for each other host, of an operation that travels with others nobody "
     "waits for yet",
     "a larger one does not fit into what the wire sends at once, of which many are under way",
     "2 hosts of 1 and 2 ranks, 100 of 32 KiB: 2.7 and 3.7 ms, negotiated 2.7 and 5.1; of 64 KiB "
     "10.2 and 13.8, 4.7 and 9.2; 4 domains, of 16 KiB 6.2, 4.3"},
    {Limit::AtOnceBytes, std::size_t{64} << 10,
     "bytes of a batch that whoever completes the agreement runs at once, and of an input that is "
     "copied in",
     "waking helpers would take longer; and the owner of a copy need not wait for its readers",
     "from 64 KiB on reading where it lies is one copy instead of two: 2 ranks, alltoall of 64 MiB "
     "153 ms, read 13"},
    {Limit::CopiedForManyRanks, 3,
     "ranks of a broadcast whose input is copied in also when it is large",
     "with several readers each read is cheaper by more than the copy costs",
     "4 ranks, 256 KiB: 33 us instead of 56"},
    {Limit::CopiedForManyBytes, std::size_t{16} << 20, "bytes of the input of such a broadcast",
     "beyond it the copy has left the caches",
     "4 ranks, 4 MiB: 0.8 ms instead of 1.3; 64 MiB: 28 instead of 22"},
    {Limit::CopiedTogetherBytes, std::size_t{64} << 20, "bytes of such copies at a time",
     "a whole model is broadcast as one group: memory", "no measurement: a bound on memory"},
    {Limit::CopiedOfSlowBytes, std::size_t{256} << 10,
     "bytes of an input that is copied in where reading other processes is slow",
     "two plain copies are faster than one by the system; beyond it rings are",
     "128 KiB: 9.5 us by the system, 1.1 by itself"},
    {Limit::CopiedToReduceBytes, std::size_t{1} << 20, "bytes of a reducescatter's input, likewise",
     "it has no rings: what is read is reduced as it comes",
     "no record; where reading is not slow, 256 KiB copied in 52 to 62 us, read 20"},
    {Limit::HelpedBytes, std::size_t{2} << 20,
     "bytes from which on the root of a broadcast helps its reader with a ring",
     "below it the owner of memory is no help to who reads it",
     "2 ranks: 4 MiB 464 us, with a ring 337; 64 MiB 13.8 ms, 8.0; below 1 MiB nothing"},
    {Limit::RelayPieceBytes, std::size_t{64} << 10,
     "bytes of a piece in a ring; an alltoall has rings from a piece for each rank on",
     "a ring of 8 pieces stays in the second-level cache",
     "pieces of 16 and 32 KiB up to 10 % slower; 4 places instead of 8 level"},
    {Limit::RelayedTogetherBytes, std::size_t{64} << 20, "bytes of rings at a time",
     "beyond it there are none: memory", "no measurement: a bound on memory"},
    {Limit::StreamedBytes, std::size_t{8} << 20,
     "bytes that all ranks get together from which on copies are stored past the caches",
     "what is written has left the caches before it is read: lines need not be fetched first",
     "in times of MPI's speed, 2 ranks, 4 MiB: allgather 0.93, past the caches 1.02; alltoall "
     "0.90, 1.13; broadcast 0.87, 1.22"},
    {Limit::SlowTimes, 4,
     "times as long as a plain copy that reading another process takes where it is called slow "
     "(measured at init())",
     "two copies take that where the lines travel between cores meanwhile",
     "128 KiB in virtual machines: 9.5 us and 1.1; elsewhere 1.8 times"},
    {Limit::OneStepBytes, std::size_t{32} << 10,
     "bytes of contributions that a host sends for an allreduce in one step",
     "one step is better than two; beyond it slices send less", "no record of the measurement"},
    {Limit::BroadcastPieces, 64, "pieces of a broadcast between hosts, if they are not too small",
     "each host of a chain adds the time of a piece",
     "3 hosts, 16 MiB, in times of the line: 1/16 and four under way 1.10, 1/64 and eight 1.05 to "
     "1.07"},
    {Limit::LeastBroadcastPieceBytes, std::size_t{64} << 10, "bytes of such a piece at least",
     "smaller ones cost as much each", "no record"},
    {Limit::MostBroadcastPieceBytes, std::size_t{512} << 10, "bytes of such a piece at most",
     "so many are under way at a time: memory",
     "3 hosts, 16 MiB, 1 Gbit/s: down a tree 285 ms, along a chain 162"},
    {Limit::EagerBytes, std::size_t{8} << 10,
     "bytes of a message of send that goes before its receiver asks for it",
     "its sender need not wait; what is larger is copied once, from memory to memory",
     "2 ranks beside other programs: 1 KiB 1.9 us (MPI 3.8); 16 KiB, offered, 7.1 (9.6)"},
    {Limit::EagerTogetherBytes, std::size_t{1} << 20,
     "bytes of such messages that a rank has not received yet, of one sender",
     "beyond it messages stay with their sender until they are received: memory",
     "no measurement: a bound on memory"},
    {Limit::FedBytes, std::size_t{2} << 20,
     "bytes of a message whose sender waits from which on it goes through a ring",
     "two ranks copy at once, and nothing is in the caches any more",
     "2 ranks, in times of MPI's: 1 MiB read 0.69, through a ring 0.87; 4 MiB 1.14, 0.94; 64 MiB "
     "1.85, 1.09"},
}};

/// Returns the value of a limit.
constexpr std::size_t limit(Limit which) { return kLimits[static_cast<std::size_t>(which)].value; }

/// RouteMachine is what `init()` has found out.
struct RouteMachine {
  bool reads_others =
      true;  ///< the system lets ranks of a host read each other's memory (HVD_DIRECT_COPIES)
  bool is_slow = false;  ///< but that takes so much longer than a plain copy that it is avoided
  bool has_core = true;  ///< each rank of the host has one
  std::optional<Route>
      gpu;  ///< by which a GPU's tensors travel (ops/gpu/api/placement.h); none: no GPU
};

/// The parts of the choice, each asked where it is due.
namespace routes {

/// Returns whether the ranks take what they need, instead of combining all of it.
constexpr bool takes(OpKind kind) { return kind != OpKind::Allreduce && kind != OpKind::Barrier; }

// ---- repeated operations whose caller waits
/// Returns whether it may be one of them, by the bytes of its input: the caller's side of the
/// choice.
constexpr bool may_repeat(OpKind kind, std::int64_t bytes) {
  return bytes <=
         static_cast<std::int64_t>(limit(takes(kind) ? Limit::LentBytes : Limit::DirectBytes));
}
/// Returns whether one rank of each host does it for all. `block_bytes`: what any rank's block has
/// to hold, input and result.
constexpr bool is_at_slot(std::size_t block_bytes, std::size_t hosts) {
  return block_bytes <= limit(hosts > 1 ? Limit::DirectBytes : Limit::SlotBytes);
}
/// Returns whether each rank takes its part out of leased blocks, where `is_at_slot` is not true,
/// and the ranks are of one host.
constexpr bool is_lent(OpKind kind, std::size_t bytes, std::size_t ranks) {
  return takes(kind) && ranks > 1 && ranks <= limit(Limit::LentRanks) &&
         bytes <= limit(Limit::LentBytes);
}
/// Returns whether leaders may do it among themselves.
constexpr bool may_be_direct(std::size_t hosts) { return hosts <= limit(Limit::DirectHosts); }
/// Returns whether they do: a host contributes so many bytes at most.
constexpr bool is_direct(OpKind kind, std::size_t contribution_bytes, std::size_t hosts) {
  return contribution_bytes * (hosts - 1) <=
         limit(kind == OpKind::Alltoall ? Limit::DirectAlltoallBytes : Limit::DirectBytes);
}

// ---- all others: batches
/// Returns whether whoever completes the agreement runs the batch at once, and an input of so many
/// bytes is copied in.
constexpr bool is_at_once(std::size_t bytes) { return bytes <= limit(Limit::AtOnceBytes); }
/// Returns whether a larger input is copied into shared memory for those that take from it.
/// `copied`: bytes that are there already.
constexpr bool is_copied(OpKind kind, std::size_t bytes, std::size_t ranks, bool is_slow,
                         std::size_t copied) {
  const bool for_many = kind == OpKind::Broadcast && ranks >= limit(Limit::CopiedForManyRanks) &&
                        bytes <= limit(Limit::CopiedForManyBytes);
  if (for_many && copied + bytes <= limit(Limit::CopiedTogetherBytes)) return true;
  return is_slow && bytes <= limit(kind == OpKind::Reducescatter ? Limit::CopiedToReduceBytes
                                                                 : Limit::CopiedOfSlowBytes);
}
/// Returns through how many rings an owner helps its readers: one for all, or one for each.
constexpr std::size_t relays(OpKind kind, std::size_t bytes, std::size_t ranks,
                             const RouteMachine& machine) {
  const std::size_t readers = ranks - 1;
  if (readers == 0) return 0;
  switch (kind) {
    case OpKind::Broadcast:
      return bytes >= limit(Limit::HelpedBytes) &&
                     (machine.is_slow || (readers == 1 && machine.has_core))
                 ? 1
                 : 0;
    case OpKind::Allgather: return machine.is_slow ? 1 : 0;
    case OpKind::Alltoall:
      return machine.is_slow && bytes >= limit(Limit::RelayPieceBytes) * ranks ? readers : 0;
    default: return 0;
  }
}
/// Returns whether copies are stored past the caches. `bytes`: that all ranks get together.
constexpr bool is_past_caches(std::size_t bytes) { return bytes >= limit(Limit::StreamedBytes); }
/// Returns whether a receiver reads a message that is not eager where it lies, on the same host.
constexpr bool is_exposed(const RouteMachine& machine) {
  return machine.reads_others && !machine.is_slow;
}
/// Returns whether a message of a host goes through a ring although its receiver could read it.
/// `waits`: its sender, and so has time.
constexpr bool is_fed(std::size_t bytes, bool waits, bool has_core) {
  return waits && has_core && bytes >= limit(Limit::FedBytes);
}
/// Returns whether a message goes before its receiver asks for it. `together`: bytes of those that
/// have gone and are not received, with it; `most`: that the way takes at once.
constexpr bool is_eager(std::size_t bytes, std::size_t together, std::size_t most) {
  return bytes <= most && bytes <= limit(Limit::EagerBytes) &&
         together <= limit(Limit::EagerTogetherBytes);
}
/// Returns whether the ranks of a host read an input where it lies, in an operation between hosts.
constexpr bool is_read_between_hosts(OpKind kind, std::size_t bytes) {
  return kind != OpKind::Reducescatter && !is_at_once(bytes);
}
/// Returns whether every host sends all that it contributes to every other. `contribution_bytes`:
/// of a host.
constexpr bool is_one_step(std::size_t contribution_bytes, std::size_t hosts) {
  return hosts > 1 && contribution_bytes * (hosts - 1) <= limit(Limit::OneStepBytes);
}
/// Returns the bytes of a piece of a broadcast between hosts.
constexpr std::size_t broadcast_piece(std::size_t bytes) {
  const std::size_t wanted = bytes / limit(Limit::BroadcastPieces);
  const std::size_t least = limit(Limit::LeastBroadcastPieceBytes),
                    most = limit(Limit::MostBroadcastPieceBytes);
  return wanted < least ? least : wanted > most ? most : wanted;
}
/// Returns whether pieces go along a chain, not down a tree whose root has so many children. A
/// chain sends each piece once over each line, and takes a piece's time longer for each host; the
/// root of a tree sends it to each child.
constexpr bool is_chain(std::size_t pieces, std::size_t hosts, std::size_t children) {
  return pieces + hosts < pieces * children + 2;
}
/// Returns whether reading another process's memory is slow.
template <class Duration>
constexpr bool is_slow(Duration by_system, Duration by_itself) {
  return by_system > static_cast<int>(limit(Limit::SlowTimes)) * by_itself;
}

}  // namespace routes

/// A RouteQuestion is an operation, as far as its way depends on it. All ranks take part, with the
/// same signature; hosts have the same number of ranks, as far as that goes. A host is a domain:
/// where ranks share no memory, each is one.
struct RouteQuestion {
  OpKind kind = OpKind::Allreduce;     ///< what it is
  ReduceOp op = ReduceOp::Sum;         ///< how it combines values, if it does
  DataType dtype = DataType::Float32;  ///< of its elements
  std::size_t bytes = 0;  ///< of one rank's input, of a batch's tensors together; Broadcast: the
                          ///< root's; Alltoall: in even parts
  std::size_t ranks = 1;  ///< that take part
  std::size_t hosts = 1;  ///< that they are on
  bool repeats = false;   ///< for the third time and more under its name, and its caller waits; the
                          ///< timeline is off
  /// Memory says where the tensor is.
  enum class Memory : std::uint8_t {
    Ordinary,  ///< anywhere on the host
    Shared,    ///< on the host, seen by all its ranks (`allocate_shared`)
    Gpu,       ///< on a GPU
  };
  Memory memory = Memory::Ordinary;  ///< where it is
  RouteMachine machine;              ///< where it runs
};

/// A RouteRow is what is known of a route.
struct RouteRow {
  Route route;                                   ///< which it is
  std::string_view name;                         ///< "at the slot", ...
  std::string_view who;                          ///< does the work
  std::string_view why;                          ///< it is taken
  bool (*takes)(const RouteQuestion& question);  ///< returns true of one row at most
};

/// Returns what is known of all routes, in the order of their numbers.
std::span<const RouteRow, kRoutes> all_routes();
/// Returns the way that the operation takes; none of one whose agreement is all there is to it: a
/// barrier that is negotiated.
std::optional<RouteChoice> choose(const RouteQuestion& question);
/// Returns "at the slot", ...
std::string_view name_of(Route route);
/// Returns "each its part: copied in", ...
std::string name_of(RouteChoice way);

}  // namespace hvd
#pragma GCC visibility pop
