#include "ops/rendezvous/callback_meeting.h"

#include <algorithm>
#include <exception>
#include <thread>

#include "hvd/base/text.h"
#include "hvd/negotiation/values/signature.h"
#include "hvd/negotiation/values/status_wire.h"

namespace hvd {

using namespace std::chrono_literals;

namespace {

constexpr auto kMoment = 100ms;
constexpr const char* kFirstIsHere = "first";

Rendezvous checked(Rendezvous given) {
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument(formatted("World '{}': {}", given.name, why));
  };
  if (given.name.empty()) refuse("a world needs a name, which is the same on all members");
  if (given.size < 1) refuse(formatted("a size of {}", given.size));
  if (given.rank < 0 || given.rank >= given.size)
    refuse(formatted("rank {} of {} members", given.rank, given.size));
  if (!given.set || !given.get || !given.add) refuse("its rendezvous lacks set, get or add");
  return given;
}

}  // namespace

CallbackMeeting::CallbackMeeting(Rendezvous rendezvous, std::chrono::milliseconds patience)
    : store_(checked(std::move(rendezvous))), patience_(patience) {
  announce();
  agree_on_size();
  peers_.watch(allgather(Peers::introduce()), rank());
}

// --------------------------------------------------------------------------------------- the store

void CallbackMeeting::set(const std::string& what, const Bytes& bytes) {
  const auto* const first = reinterpret_cast<const std::uint8_t*>(bytes.data());
  try {
    store_.set(key(what), {first, first + bytes.size()});
  } catch (...) {
    fail({Status::Code::BackendError,
          formatted("world '{}': the store refuses a key of rank {}: {}", store_.name, rank(),
                    status_of_current_exception().text())});
  }
}

std::optional<Bytes> CallbackMeeting::try_get(const std::string& what,
                                              std::chrono::milliseconds time) {
  try {
    const auto begin = Clock::now();
    const auto value = store_.get(key(what), time);
    if (value) {
      const auto* const first = reinterpret_cast<const std::byte*>(value->data());
      return Bytes(first, first + value->size());
    }
    // a store that does not wait
    if (Clock::now() - begin < 1ms) std::this_thread::sleep_for(std::min(time, 1ms));
    return std::nullopt;
  } catch (...) {
    fail({Status::Code::BackendError,
          formatted("world '{}': the store does not answer rank {}: {}", store_.name, rank(),
                    status_of_current_exception().text())});
  }
}

std::optional<Bytes> CallbackMeeting::await(const std::string& what, int from,
                                            Clock::time_point deadline) {
  for (bool was_dead = false;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    if (auto value = try_get(what, std::clamp(left, std::chrono::milliseconds(0),
                                              std::chrono::milliseconds(kMoment))))
      return value;
    if (was_dead) fail({Status::Code::RankFailed, words_of_dead(from)});
    was_dead = peers_.is_dead(from);  // what it has set before is still to be had
    if (Clock::now() >= deadline) return std::nullopt;
  }
}

// ----------------------------------------------------------------------------------- the beginning

/// Another number than 1: a rank of this name and number was here: another world, or an old store.
void CallbackMeeting::announce() {
  std::int64_t times = 0;
  try {
    times = store_.add(key(formatted("rank {}", rank())), 1);
  } catch (...) {
    fail({Status::Code::BackendError,
          formatted("world '{}': the store does not answer rank {}: {}", store_.name, rank(),
                    status_of_current_exception().text())});
  }
  if (times == 1) return;
  const std::string text = formatted(
      "World '{}': its rank {} has come {} times to this store: two worlds have one name, or the "
      "store holds keys of another job; give each world a name of its own",
      store_.name, rank(), times);
  broken_ = text;
  throw InvalidArgument(text);
}

void CallbackMeeting::agree_on_size() {
  std::vector<int> ranks;
  std::vector<std::string> sizes;
  for (const Bytes& said : allgather(Writer().put(size()).take())) {
    ranks.push_back(static_cast<int>(ranks.size()));
    sizes.push_back(formatted("{}", Reader(said).get<int>()));
  }
  ranks.push_back(rank());
  sizes.push_back(formatted("{}", size()));
  if (std::all_of(sizes.begin(), sizes.end(),
                  [&](const auto& said) { return said == sizes.front(); }))
    return;
  fail({Status::Code::Mismatch, formatted("World '{}': its size must be equal on all members: {}",
                                          store_.name, grouped_by_rank(ranks, sizes))});
}

// -------------------------------------------------------------------------------------- the rounds

/// The part of rank 0: it sets for all how the round has ended, and on success every rank's bytes.
std::vector<Bytes> CallbackMeeting::gather(const std::string& round, const Bytes& mine,
                                           Clock::time_point deadline) {
  std::vector<Bytes> all{mine};
  std::vector<int> missing;
  Status failed;
  for (int from = 1; from < size() && failed.ok(); ++from) {
    try {
      auto said =
          await(formatted("{}/{}", round, from), from, missing.empty() ? deadline : Clock::now());
      if (!said) missing.push_back(from);
      all.push_back(said ? std::move(*said) : Bytes());
    } catch (const Error&) {
      failed = status_of_current_exception();
    }
  }
  if (failed.ok() && !missing.empty())
    failed = {Status::Code::BackendError,
              formatted("World '{}': after {:.1f} s {} {} {} not come", store_.name, seconds(),
                        missing.size() == 1 ? "rank" : "ranks", rank_list(missing),
                        missing.size() == 1 ? "has" : "have")};
  Writer said;
  encode(said, failed);
  said.put(size());
  if (failed.ok())
    for (const Bytes& part : all) said.put_bytes(part);
  broken_.clear();
  set(round + "/all", said.bytes());
  if (!failed.ok()) fail(failed);
  return all;
}

std::vector<Bytes> CallbackMeeting::allgather(const Bytes& mine) {
  const std::lock_guard lock(one_at_a_time_);
  if (!broken_.empty()) throw BackendError(broken_);
  const std::string round = formatted("{}", rounds_);
  auto deadline = Clock::now() + patience_;
  std::vector<Bytes> all;
  if (rank() == 0) {
    if (rounds_ == 0) set(kFirstIsHere, mine);
    all = gather(round, mine, deadline);
  } else {
    set(formatted("{}/{}", round, rank()), mine);
    if (rounds_ == 0) {  // rank 0, which says who is missing, may be late itself
      if (!await(kFirstIsHere, 0, deadline))
        fail({Status::Code::BackendError,
              formatted("World '{}': after {:.1f} s rank 0 has not come", store_.name, seconds())});
      deadline = Clock::now() + patience_;
    }
    const auto said = await(round + "/all", 0, deadline + 2 * kMoment);
    if (!said)
      fail({Status::Code::BackendError,
            formatted("World '{}': after {:.1f} s rank 0 has not said who is there", store_.name,
                      seconds())});
    try {
      Reader reader(*said);
      if (const Status why = decode_status(reader); !why.ok()) fail(why);
      for (int left = reader.get<int>(); left > 0; --left) all.push_back(reader.get_bytes());
    } catch (const WireError& error) {
      fail({Status::Code::BackendError,
            formatted("World '{}': the store holds what cannot be read: {}", store_.name,
                      error.what())});
    }
  }
  ++rounds_;
  return all;
}

std::optional<Bytes> CallbackMeeting::try_take(const std::string& key) {
  return try_get(key, 10ms);
}

}  // namespace hvd
