#include "tests/support/gpu/checks/happens_before.h"

#include <algorithm>
#include <utility>

namespace hvd::gpu::test {

namespace {
std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

std::size_t& this_threads_voice() {
  static thread_local std::size_t voice = 0;
  return voice;
}

}  // namespace

void Clock::join(const Clock& other) {
  if (steps_.size() < other.steps_.size()) steps_.resize(other.steps_.size());
  for (std::size_t actor = 0; actor < other.steps_.size(); ++actor)
    steps_[actor] = std::max(steps_[actor], other.steps_[actor]);
}

std::uint64_t Clock::tick(std::size_t actor) {
  if (steps_.size() <= actor) steps_.resize(actor + 1);
  return ++steps_[actor];
}

std::size_t HappensBefore::add_stream() {
  const std::lock_guard lock(mutex_);
  return actors_++;
}

HappensBefore::Thread& HappensBefore::thread() {
  const std::size_t key =
      one_host ? this_threads_voice() : std::hash<std::thread::id>()(std::this_thread::get_id());
  const auto [found, fresh] = threads_.try_emplace(key);
  if (fresh) found->second.actor = actors_++;
  return found->second;
}

std::size_t HappensBefore::speak_as(std::size_t voice) {
  const std::lock_guard lock(mutex_);
  const std::size_t before = std::exchange(this_threads_voice(), 0);
  const Clock first = thread().clock;
  this_threads_voice() = voice;
  thread().clock.join(first);
  return before;
}

Clock HappensBefore::now() {
  const std::lock_guard lock(mutex_);
  return thread().clock;
}

void HappensBefore::learn(const Clock& clock) {
  const std::lock_guard lock(mutex_);
  thread().clock.join(clock);
}

void HappensBefore::tell(const void* subject) {
  const std::lock_guard lock(mutex_);
  told_[subject].join(thread().clock);
}

void HappensBefore::hear(const void* subject) {
  const std::lock_guard lock(mutex_);
  thread().clock.join(told_[subject]);
}

void HappensBefore::host_uses(const UseOfMemory& done) {
  const std::lock_guard lock(mutex_);
  Thread& self = thread();
  self.clock.tick(self.actor);
  use(self.actor, self.clock, done);
}

void HappensBefore::stream_uses(std::size_t stream, const Clock& clock, const UseOfMemory& done) {
  const std::lock_guard lock(mutex_);
  use(stream, clock, done);
}

void HappensBefore::watch(const void* begin, std::size_t bytes, const std::string& name) {
  std::vector<std::uintptr_t> before;  // pieces that have been freed
  {
    const std::lock_guard lock(mutex_);
    for (auto next = regions_.lower_bound(number(begin) + bytes); next != regions_.begin();) {
      --next;
      if (next->first + next->second.bytes <= number(begin) && next->first != number(begin)) break;
      before.push_back(next->first);
    }
  }
  for (const std::uintptr_t region : before) forget(reinterpret_cast<const void*>(region));
  const std::lock_guard lock(mutex_);
  regions_[number(begin)] = {bytes, StateText(name), {}};
  if (bytes != 0) cells_[number(begin)].end = number(begin) + bytes;
}

void HappensBefore::free(const void* begin, const std::string& call) {
  std::size_t bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto region = regions_.find(number(begin));
    if (region == regions_.end()) return;
    bytes = region->second.bytes;
  }
  host_uses({.name = call, .writes = {{begin, bytes}}});
  const std::lock_guard lock(mutex_);
  regions_[number(begin)].freed = StateText(call);
}

void HappensBefore::forget(const void* begin) {
  const std::lock_guard lock(mutex_);
  const auto region = regions_.find(number(begin));
  if (region == regions_.end()) return;
  cells_.erase(cells_.lower_bound(region->first),
               cells_.lower_bound(region->first + region->second.bytes));
  regions_.erase(region);
}

void HappensBefore::hand_on(const void* begin, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  Clock all;
  for (const auto& [unused, known] : threads_) all.join(known.clock);
  const auto is_over = [&](const Touch& touch) { return all.of(touch.actor) >= touch.step; };
  split(number(begin));
  split(number(begin) + bytes);
  for (auto at = cells_.lower_bound(number(begin));
       at != cells_.end() && at->first < number(begin) + bytes; ++at) {
    if (at->second.write && is_over(*at->second.write)) at->second.write.reset();
    std::erase_if(at->second.reads, is_over);
  }
}

const HappensBefore::Region* HappensBefore::region_of(std::uintptr_t at,
                                                      std::uintptr_t* begin) const {
  const auto next = regions_.upper_bound(at);
  if (next == regions_.begin()) return nullptr;
  const auto& [first, region] = *std::prev(next);
  *begin = first;
  return at < first + region.bytes ? &region : nullptr;
}

/// Lets a cell begin there, if there is watched memory.
void HappensBefore::split(std::uintptr_t at) {
  const auto next = cells_.upper_bound(at);
  if (next == cells_.begin()) return;
  auto& [first, cell] = *std::prev(next);
  if (first == at || cell.end <= at) return;
  Cell rest = cell;
  cell.end = at;
  cells_.emplace(at, std::move(rest));
}

void HappensBefore::use(std::size_t actor, const Clock& clock, const UseOfMemory& done) {
  const Touch own{actor, clock.of(actor), &*names_.emplace(done.name).first};
  for (const MemoryRange& range : done.reads) touch(range, false, done, own, clock);
  for (const MemoryRange& range : done.writes) touch(range, true, done, own, clock);
}

void HappensBefore::touch(const MemoryRange& range, bool writes, const UseOfMemory& use,
                          const Touch& touch, const Clock& clock) {
  if (range.bytes == 0) return;
  const std::uintptr_t begin = number(range.begin), end = begin + range.bytes;
  std::uintptr_t first = 0;
  if (const Region* region = region_of(begin, &first); region != nullptr) {
    if (end > first + region->bytes)
      report(use.name + " reaches beyond the end of " + text_of(region->name));
    if (!region->freed.empty())
      return report(use.name + " uses " + text_of(region->name) + " after " +
                    text_of(region->freed));
  }
  split(begin);
  split(end);
  for (auto at = cells_.lower_bound(begin); at != cells_.end() && at->first < end; ++at) {
    Cell& cell = at->second;
    check(cell, at->first, writes, use, touch, clock);
    if (writes) {
      cell.write = touch;
      cell.reads.clear();
      continue;
    }
    const auto same = std::find_if(cell.reads.begin(), cell.reads.end(),
                                   [&](const Touch& read) { return read.actor == touch.actor; });
    if (same != cell.reads.end()) *same = touch;
    if (same == cell.reads.end()) cell.reads.push_back(touch);
  }
}

void HappensBefore::check(const Cell& cell, std::uintptr_t at, bool writes, const UseOfMemory& use,
                          const Touch& touch, const Clock& clock) {
  const auto conflict = [&](const Touch& other, const char* does) {
    if (other.actor == touch.actor || clock.of(other.actor) >= other.step) return;
    report(use.name + (writes ? " writes " : " reads ") + place(at, cell.end) + ", which " +
           text_of(*other.who) + " " + does + ", and nothing orders the two");
  };
  if (cell.write) conflict(*cell.write, "writes");
  if (writes)
    for (const Touch& read : cell.reads) conflict(read, "reads");
  if (!writes && !cell.write && knows_all_writes && use.reads_results)
    report(use.name + " reads " + place(at, cell.end) + ", which nobody has written");
}

std::string HappensBefore::place(std::uintptr_t begin, std::uintptr_t end) const {
  std::uintptr_t first = 0;
  const Region* region = region_of(begin, &first);
  const std::string of = region == nullptr ? "memory" : text_of(region->name);
  return "bytes " + std::to_string(begin - first) + " to " + std::to_string(end - first) + " of " +
         of;
}

void HappensBefore::report(const std::string& error) {
  constexpr std::size_t kMost = 20;
  const StateText kept(error);
  if (errors_.size() < kMost && std::find(errors_.begin(), errors_.end(), kept) == errors_.end())
    errors_.push_back(kept);
}

std::vector<std::string> HappensBefore::errors() {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> all;
  for (const StateText& error : errors_) all.push_back(text_of(error));
  return all;
}

}  // namespace hvd::gpu::test
