#include "torch_bindings/parameters/shared_parameters.h"

#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <unordered_map>

#include "hvd/api/host_memory.h"
#include "hvd/base/digest.h"
#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd {

namespace {

std::atomic<std::uint64_t> times_written_alike{0};

struct Listeners {
  std::mutex mutex;
  std::vector<std::weak_ptr<const std::function<void()>>> all;
};
Listeners& listeners() {
  static auto* const made = new Listeners;
  return *made;
}

/// The parameters that lie in shared memory at present, and how many optimizers say so.
struct Residents {
  std::mutex mutex;
  std::unordered_map<const void*, int> counts;
};
Residents& residents() {
  static auto* const all = new Residents;
  return *all;
}
void count_resident(const at::Tensor& parameter, int change) {
  Residents& all = residents();
  const std::lock_guard lock(all.mutex);
  int& count = all.counts[parameter.unsafeGetTensorImpl()];
  count += change;
  if (count == 0) all.counts.erase(parameter.unsafeGetTensorImpl());
}

/// Returns why a tensor cannot lie in shared memory; null if it can.
const char* misfit(const at::Tensor& parameter) {
  if (!parameter.is_cpu()) return "is not in the host's memory";
  if (!parameter.is_non_overlapping_and_dense())
    return "has elements that share memory, or gaps between them";
  if (parameter.storage().nbytes() != parameter.nbytes()) return "is a view of a larger tensor";
  return nullptr;
}

bool is_like(const at::Tensor& parameter, const at::Tensor& home) {
  return parameter.scalar_type() == home.scalar_type() && parameter.sizes() == home.sizes() &&
         parameter.strides() == home.strides();
}

/// Returns a digest of the values: equal where they are, and at least 0.
std::int64_t digest(std::string_view name, const at::Tensor& parameter) {
  const std::string_view values(static_cast<const char*>(parameter.const_data_ptr()),
                                parameter.nbytes());
  return static_cast<std::int64_t>(
      (std::hash<std::string_view>{}(name)*31 + std::hash<std::string_view>{}(values)) >> 2);
}

}  // namespace

SharedParameters::SharedParameters(const ProcessSet& process_set, std::string name,
                                   std::function<std::string()> equalize)
    : process_set_(process_set), name_(std::move(name)), equalize_(std::move(equalize)) {
  const auto running = engine();
  const Topology& topology = running->topology();
  const std::vector<int> ranks = process_set_.ranks();
  std::map<int, std::vector<int>> by_host;
  for (const int rank : ranks) by_host[topology.host_of(rank)].push_back(rank);
  owners_ = by_host.at(topology.host_of(ranks.front()));
  for (const auto& [host, members] : by_host) {
    if (members.size() != owners_.size())
      throw InvalidArgument(
          formatted("share_parameters: host {} has {} ranks of the optimizer's process set, host "
                    "{} has {}; all need as many",
                    topology.host_of(ranks.front()), owners_.size(), host, members.size()));
    const auto domain = [&](int rank) {
      return topology.domain_of_rank[static_cast<std::size_t>(rank)];
    };
    if (std::any_of(members.begin(), members.end(),
                    [&](int rank) { return domain(rank) != domain(members.front()); }))
      throw InvalidArgument(
          "share_parameters: ranks of one host do not share memory (HVD_SHARED_MEMORY, or "
          "containers of their own), so there cannot be one copy of the parameters; use "
          "shard_optimizer_state");
  }
  const auto& here = by_host.at(topology.host_of(topology.rank));
  maker_ = here.front();
  self_ =
      static_cast<std::size_t>(std::find(here.begin(), here.end(), topology.rank) - here.begin());
  for (const auto& [host, members] : by_host)
    if (owners_[self_] == topology.rank && members[self_] != topology.rank)
      twins_.push_back(members[self_]);
  forgiven_ = times_written_alike.load();
}

SharedParameters::~SharedParameters() {
  const at::NoGradGuard no_gradient;
  for (auto& slot : slots_) {
    if (slot.home.defined()) count_resident(slot.parameter, -1);
    if (slot.is_at_home()) slot.parameter.set_data(slot.home.clone());
  }
}

void SharedParameters::add(std::span<const Named> parameters) {
  std::vector<Slot> all = slots_;
  for (const auto& [name, parameter] : parameters) {
    if (const char* const why = misfit(parameter))
      throw InvalidArgument(
          formatted("share_parameters: parameter '{}' {}, so that the ranks of a host cannot have "
                    "one copy of it",
                    name, why));
    for (const auto& other : all)
      if (parameter.numel() > 0 && other.parameter.const_data_ptr() == parameter.const_data_ptr())
        throw InvalidArgument(
            formatted("share_parameters: parameters '{}' and '{}' are different tensors with the "
                      "same memory; register one tensor twice instead",
                      other.name, name));
    all.push_back({name, parameter, {}, 0});
  }
  slots_ = std::move(all);
}

bool SharedParameters::contains(const at::Tensor& parameter) {
  Residents& all = residents();
  const std::lock_guard lock(all.mutex);
  return all.counts.contains(parameter.unsafeGetTensorImpl());
}

void SharedParameters::written_alike() {
  ++times_written_alike;
  std::vector<std::shared_ptr<const std::function<void()>>> called;
  {
    const std::lock_guard lock(listeners().mutex);
    std::erase_if(listeners().all, [](const auto& listener) { return listener.expired(); });
    for (const auto& listener : listeners().all) called.push_back(listener.lock());
  }
  for (const auto& listener : called)
    if (listener) (*listener)();
}

void SharedParameters::on_written_alike(std::weak_ptr<const std::function<void()>> listener) {
  const std::lock_guard lock(listeners().mutex);
  listeners().all.push_back(std::move(listener));
}

std::uint64_t SharedParameters::writes_alike() { return times_written_alike.load(); }

/// Returns what forbids an update on this rank; empty if nothing does.
std::string SharedParameters::why_not() {
  const bool forgive =
      std::exchange(forgiven_, times_written_alike.load()) != times_written_alike.load();
  std::string first;
  for (auto& slot : slots_) {  // all, so that what is forgiven is noted
    std::string found;
    if (const char* const why = misfit(slot.parameter)) {
      found =
          formatted("parameter '{}' {}, which does not go with share_parameters", slot.name, why);
    } else if (slot.home.defined() && !is_like(slot.parameter, slot.home)) {
      found = formatted(
          "parameter '{}' has another type, shape or layout than when its optimizer was wrapped "
          "with share_parameters; change the model first and wrap the optimizer then",
          slot.name);
    } else if (slot.is_at_home()) {
      const std::int64_t version = std::exchange(slot.version, detail::version_of(slot.parameter));
      const std::size_t digest = std::exchange(slot.digest, digest_of_part(slot.home));
      if (!forgive && (version != slot.version || digest != slot.digest))
        found = formatted(
            "parameter '{}' was written since the last step, but with share_parameters all ranks "
            "of a host have one copy of it: write it on one of them, between write_parameters() of "
            "the optimizer and the end of what that returns",
            slot.name);
    }
    if (first.empty()) first = std::move(found);
  }
  return first;
}

std::vector<SharedParameters::Slot*> SharedParameters::away() {
  std::vector<Slot*> found;
  if (owners_.size() == 1) return found;  // alone on its host: its parameters stay where they are
  for (auto& slot : slots_)
    if (slot.parameter.numel() > 0 && !slot.is_at_home()) found.push_back(&slot);
  return found;
}

bool SharedParameters::begin_update(const std::string& refusal) {
  const at::NoGradGuard no_gradient;
  const std::string mine = refusal.empty() ? why_not() : refusal;
  const std::vector<Slot*> moving = mine.empty() ? away() : std::vector<Slot*>{};
  std::int64_t values = 0;
  for (const Slot* slot : moving)
    values = (values * 31 + digest(slot->name, slot->parameter)) >> 1 & 0x3FFFFFFFFFFFFFFF;
  const auto count = static_cast<std::int64_t>(moving.size());
  const std::int64_t state = !mine.empty() ? 2 : !unlike_.empty() ? 1 : 0;
  const at::Tensor words = torch::tensor({state, count, -count, values, -values}, at::kLong);
  allreduce_(words, {.name = name_ + "/update", .op = ReduceOp::Max, .process_set = process_set_});
  const auto* const word = words.const_data_ptr<std::int64_t>();
  if (word[0] == 1) {  // some could not follow the owners before
    equalize();
    return begin_update(unlike_);
  }
  if (word[0] != 0)
    refuse(mine.empty() ? "" : formatted("; rank {} has made no step: {}", rank(), mine));
  if (word[1] != -word[2] || word[3] != -word[4]) refuse_different();
  if (moving.empty()) return false;
  bring_home(moving);
  return true;
}

void SharedParameters::end_update(const std::string& failure) {
  const at::Tensor words = torch::tensor({std::int64_t{failure.empty() ? 0 : 1}}, at::kLong);
  allreduce_(words, {.name = name_ + "/updated", .op = ReduceOp::Max, .process_set = process_set_});
  note();
  if (words.item<std::int64_t>() != 0)
    refuse(failure.empty()
               ? ""
               : formatted("; rank {} failed while it updated its share of the parameters: {}",
                           rank(), failure));
}

void SharedParameters::note() {
  for (auto& slot : slots_) {
    slot.version = detail::version_of(slot.parameter);
    if (slot.is_at_home()) slot.digest = digest_of_part(slot.home);
  }
}

/// All ranks of the host together look at all of it.
std::size_t SharedParameters::digest_of_part(const at::Tensor& home) const {
  const std::size_t bytes = home.nbytes(), ranks = owners_.size();
  const std::size_t begin = bytes * self_ / ranks, end = bytes * (self_ + 1) / ranks;
  return digest_of_memory(static_cast<const char*>(home.const_data_ptr()) + begin, end - begin);
}

void SharedParameters::refuse(const std::string& mine) {
  const std::string all = detail::said_by_all(mine, name_ + "/refused", process_set_);
  if (process_set_.size() > static_cast<int>(owners_.size())) equalize();
  throw Mismatch(formatted("{}: share_parameters{}", name_, all));
}

void SharedParameters::equalize() {
  unlike_ = "what makes the hosts alike after a failed step did not end";
  unlike_ = equalize_();
  note();
}

/// Throws what tells the parameters' values apart.
void SharedParameters::refuse_different() const {
  detail::Statements statements;
  for (const auto& slot : slots_)
    statements.emplace_back(
        slot.name, slot.is_at_home()
                       ? std::string("where it was")
                       : formatted("values of checksum {:x}", digest(slot.name, slot.parameter)));
  detail::agree_on(
      "share_parameters, where all ranks must begin with the same parameters (call "
      "broadcast_parameters first)",
      statements, process_set_);
  throw Mismatch(formatted(
      "{}: share_parameters: the ranks' parameters differ; call broadcast_parameters first",
      name_));
}

/// Returns the memory of this host, null for who has made it. Throws InvalidArgument, on all ranks,
/// where a host has none; it is given back then.
std::shared_ptr<void> SharedParameters::open_where_all_have_room(const at::Tensor& places,
                                                                 std::size_t bytes) const {
  const auto running = engine();
  const Topology& topology = running->topology();
  const std::vector<int> ranks = process_set_.ranks();
  std::shared_ptr<void> memory;
  int full = -1;  // the first maker without room
  std::set<int> hosts;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (!hosts.insert(topology.host_of(ranks[i])).second) continue;  // its first rank makes it
    const auto place = places[static_cast<std::int64_t>(i)].item<std::int64_t>();
    if (place < 0) {
      if (full < 0) full = ranks[i];
    } else if (ranks[i] == maker_ && maker_ != rank()) {
      memory = open_host_memory(maker_, static_cast<std::uint64_t>(place));
    }
  }
  if (full >= 0)
    throw InvalidArgument(
        formatted("share_parameters: rank {} has no room for {} bytes of parameters in memory "
                  "that its host's ranks share; raise HVD_ARENA_BYTES",
                  full, bytes));
  return memory;
}

void SharedParameters::bring_home(const std::vector<Slot*>& slots) {
  std::size_t bytes = 0;
  for (const Slot* slot : slots)
    if (!slot->home.defined()) bytes += aligned_to_member(slot->parameter.nbytes());
  const bool makes = maker_ == rank();
  HostMemory memory;
  if (makes && bytes > 0) memory = allocate_for_host(bytes, static_cast<int>(owners_.size()) - 1);
  std::vector<at::Tensor> homes;  // of the slots: they get them when every host has room
  const auto find_homes = [&] {
    std::size_t offset = 0;
    for (const Slot* slot : slots) {
      homes.push_back(slot->home);
      if (slot->home.defined()) continue;
      homes.back() =
          detail::view_of(memory.data, offset, slot->parameter, slot->parameter.scalar_type());
      offset += aligned_to_member(slot->parameter.nbytes());
    }
  };
  if (makes && (memory.data || bytes == 0)) {
    find_homes();
    for (std::size_t i = 0; i < slots.size(); ++i) homes[i].copy_(slots[i]->parameter);
  }
  const at::Tensor place = torch::tensor(
      {memory.data ? static_cast<std::int64_t>(memory.place) : std::int64_t{-1}}, at::kLong);
  const at::Tensor places =
      allgather(place, {.name = name_ + "/place", .process_set = process_set_});
  if (bytes > 0) {
    auto theirs = open_where_all_have_room(places, bytes);
    if (!makes) memory.data = std::move(theirs);
  }
  if (!makes) find_homes();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (!slots[i]->home.defined()) count_resident(slots[i]->parameter, 1);
    slots[i]->home = homes[i];
    slots[i]->parameter.set_data(homes[i]);
  }
  note();
}

}  // namespace hvd
