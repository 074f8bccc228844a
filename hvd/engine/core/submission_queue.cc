#include "hvd/engine/core/submission_queue.h"

#include <algorithm>
#include <iterator>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

std::string third_thread_text(OpKind kind) {
  return formatted(
      "{} without a name: another thread of this program has such operations too. Ranks match them "
      "by their order, which differs from rank to rank where two threads submit: give the "
      "operations of one of the threads names (options.name). Without names may be those of the "
      "thread that has called hvd::init(), and of one other thread at a time",
      name_of(kind));
}

}  // namespace

SubmissionQueue::SubmissionQueue(std::uint32_t slots)
    : names_(std::clamp<std::uint64_t>(slots / 4, 1, kUnnamedNames)) {}

// ------------------------------------------------------------------------------------------- lanes

std::optional<Lane> SubmissionQueue::lane_here(const Owner& owner) const {
  const std::uint64_t here = CallerThread::number_here();
  if (here == CallerThread::kNone) return std::nullopt;
  if (here == init_thread_) return Lane::InitThread;
  if (here != owner.number) return std::nullopt;
  return init_thread_ == CallerThread::kNone ? Lane::InitThread : Lane::OtherThread;
}

/// Gives the calling thread the lane, if nobody has it, or the thread that had it has ended.
std::optional<Lane> SubmissionQueue::take_lane(Owner& owner) {
  if (const auto lane = lane_here(owner)) return lane;
  const auto thread = CallerThread::here();
  if (thread->number() != init_thread_) {
    if (!owner.thread.expired()) return std::nullopt;
    owner = {thread->number(), thread};
  }
  return lane_here(owner);
}

std::string_view SubmissionQueue::name_in(Unnamed& unnamed, int process_set, OpKind kind, Lane lane,
                                          std::span<char> text) {
  return hvd::unnamed(kind, joins_[process_set], unnamed.count(lane) % names_, lane, text);
}

std::optional<UnnamedPlace> SubmissionQueue::name(UnitKey& key) {
  if (is_library_name(key.name)) {
    const auto lane = take_lane(library_[key]);
    if (!lane)
      throw InvalidArgument(
          formatted("{} '{}': another thread of this program does the same, on the same process "
                    "set, and the other ranks cannot tell which of the two it is; let it be one "
                    "thread, or begin when the other has ended",
                    name_of(key.kind), display_name(key.name)));
    key.name = library_name_of(key.name, *lane);
    return std::nullopt;
  }
  if (!key.name.empty()) return std::nullopt;
  Unnamed& unnamed = unnamed_[{key.process_set, key.kind}];
  const auto lane = take_lane(unnamed.owner);
  if (!lane) throw InvalidArgument(third_thread_text(key.kind));
  std::array<char, kUnnamedText> text{};
  key.name = name_in(unnamed, key.process_set, key.kind, *lane, text);
  return UnnamedPlace{*lane, unnamed.count(*lane)++};
}

std::string_view SubmissionQueue::find_name(int process_set, OpKind kind, std::string_view name,
                                            std::span<char> text) {
  if (name.empty()) {
    Unnamed& unnamed = unnamed_[{process_set, kind}];
    const auto lane = lane_here(unnamed.owner);
    return lane ? name_in(unnamed, process_set, kind, *lane, text) : std::string_view();
  }
  const auto owner = library_.find({process_set, kind, std::string(name)});
  const auto lane = owner == library_.end() ? std::nullopt : lane_here(owner->second);
  if (!lane) return {};
  const std::string found = library_name_of(name, *lane);
  if (found.size() > text.size()) return {};
  std::copy(found.begin(), found.end(), text.begin());
  return {text.data(), found.size()};
}

std::optional<UnnamedPlace> SubmissionQueue::next_place(int process_set, OpKind kind) {
  Unnamed& unnamed = unnamed_[{process_set, kind}];
  const auto lane = lane_here(unnamed.owner);
  if (!lane) return std::nullopt;
  return UnnamedPlace{*lane, unnamed.count(*lane)};
}

std::deque<std::unique_ptr<Entry>> SubmissionQueue::go_back(int process_set, OpKind kind,
                                                            UnnamedPlace place) {
  std::uint64_t& count = unnamed_[{process_set, kind}].count(place.lane);
  count = std::min(count, place.number);
  std::deque<std::unique_ptr<Entry>> later;
  for (auto queue = waiting_.begin(); queue != waiting_.end();) {
    const auto here = queue++;
    const auto& unnamed = here->second.front()->unnamed;
    if (here->first.process_set != process_set || here->first.kind != kind || !unnamed ||
        unnamed->lane != place.lane || unnamed->number < place.number)
      continue;
    std::ranges::move(here->second, std::back_inserter(later));
    waiting_.erase(here);
  }
  return later;
}

void SubmissionQueue::use_name(int process_set, OpKind kind) {
  Unnamed& unnamed = unnamed_[{process_set, kind}];
  if (const auto lane = lane_here(unnamed.owner)) ++unnamed.count(*lane);
}

void SubmissionQueue::take_back_name(int process_set, OpKind kind, std::string_view name) {
  Unnamed& unnamed = unnamed_[{process_set, kind}];
  const auto lane = lane_here(unnamed.owner);
  if (!lane) return;  // numbers have started again
  std::array<char, kUnnamedText> text{};
  --unnamed.count(*lane);
  if (name_in(unnamed, process_set, kind, *lane, text) != name) ++unnamed.count(*lane);  // likewise
}

std::string SubmissionQueue::next_persistent_name(int process_set, OpKind kind) {
  Unnamed& unnamed = persistent_[{process_set, kind}];
  const auto lane = take_lane(unnamed.owner);
  if (!lane) throw InvalidArgument(third_thread_text(kind));
  return unnamed_persistent(kind, joins_[process_set], unnamed.count(*lane)++, *lane);
}

void SubmissionQueue::start_again(int process_set) {
  ++joins_[process_set];
  std::erase_if(unnamed_, [&](const auto& next) { return next.first.first == process_set; });
  std::erase_if(persistent_, [&](const auto& next) { return next.first.first == process_set; });
}

void SubmissionQueue::forget_set(int process_set) {
  start_again(process_set);
  joins_.erase(process_set);
  std::erase_if(library_,
                [&](const auto& known) { return known.first.process_set == process_set; });
}

// --------------------------------------------------------------------------- submissions that wait

void SubmissionQueue::push(std::unique_ptr<Entry>&& entry) {
  const UnitKey key = entry->key;
  waiting_[key].push_back(std::move(entry));
}

void SubmissionQueue::put_back(std::unique_ptr<Entry> entry) {
  const UnitKey key = entry->key;
  waiting_[key].push_front(std::move(entry));
}

std::unique_ptr<Entry> SubmissionQueue::pop_ready(Ledger& ledger) {
  const auto ready = std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& queue) {
    return ledger.find(queue.first) == nullptr;
  });
  if (ready == waiting_.end()) return nullptr;
  auto entry = std::move(ready->second.front());
  ready->second.pop_front();
  if (ready->second.empty()) waiting_.erase(ready);
  return entry;
}

bool SubmissionQueue::has_ready(Ledger& ledger) const {
  return std::any_of(waiting_.begin(), waiting_.end(),
                     [&](const auto& queue) { return ledger.find(queue.first) == nullptr; });
}

bool SubmissionQueue::contains_set(int process_set) const {
  return std::any_of(waiting_.begin(), waiting_.end(),
                     [&](const auto& queue) { return queue.first.process_set == process_set; });
}

std::deque<std::unique_ptr<Entry>> SubmissionQueue::take_all() {
  std::deque<std::unique_ptr<Entry>> all;
  for (auto& [key, entries] : waiting_)
    for (auto& entry : entries) all.push_back(std::move(entry));
  waiting_.clear();
  return all;
}

}  // namespace hvd
