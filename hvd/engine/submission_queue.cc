#include "hvd/engine/submission_queue.h"

#include <algorithm>
#include <array>

namespace hvd {

SubmissionQueue::SubmissionQueue(std::uint32_t slots) : names_(std::clamp<std::uint64_t>(slots / 4, 1, kUnnamedNames)) {}

std::string_view SubmissionQueue::next_name(int process_set, OpKind kind, std::span<char> text) {
  return unnamed(kind, joins_[process_set], unnamed_[{process_set, kind}] % names_, text);
}

void SubmissionQueue::take_back_name(int process_set, OpKind kind, std::string_view name) {
  auto& next = unnamed_[{process_set, kind}];
  std::array<char, kUnnamedText> text{};
  --next;
  if (next_name(process_set, kind, text) != name) ++next;  // another thread has drawn the next one meanwhile
}

std::string SubmissionQueue::next_persistent_name(int process_set, OpKind kind) {
  return unnamed_persistent(kind, joins_[process_set], persistent_[{process_set, kind}]++);
}

void SubmissionQueue::start_again(int process_set) {
  ++joins_[process_set];
  std::erase_if(unnamed_, [&](const auto& next) { return next.first.first == process_set; });
  std::erase_if(persistent_, [&](const auto& next) { return next.first.first == process_set; });
}

void SubmissionQueue::forget_set(int process_set) {
  joins_.erase(process_set);
  std::erase_if(unnamed_, [&](const auto& next) { return next.first.first == process_set; });
  std::erase_if(persistent_, [&](const auto& next) { return next.first.first == process_set; });
}

void SubmissionQueue::push(std::unique_ptr<Entry> entry) {
  const UnitKey key = entry->key;
  waiting_[key].push_back(std::move(entry));
}

void SubmissionQueue::put_back(std::unique_ptr<Entry> entry) {
  const UnitKey key = entry->key;
  waiting_[key].push_front(std::move(entry));
}

std::unique_ptr<Entry> SubmissionQueue::pop_ready(Ledger& ledger) {
  const auto ready = std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& queue) { return ledger.find(queue.first) == nullptr; });
  if (ready == waiting_.end()) return nullptr;
  auto entry = std::move(ready->second.front());
  ready->second.pop_front();
  if (ready->second.empty()) waiting_.erase(ready);
  return entry;
}

bool SubmissionQueue::has_ready(Ledger& ledger) const {
  return std::any_of(waiting_.begin(), waiting_.end(), [&](const auto& queue) { return ledger.find(queue.first) == nullptr; });
}

bool SubmissionQueue::contains_set(int process_set) const {
  return std::any_of(waiting_.begin(), waiting_.end(), [&](const auto& queue) { return queue.first.process_set == process_set; });
}

std::deque<std::unique_ptr<Entry>> SubmissionQueue::take_all() {
  std::deque<std::unique_ptr<Entry>> all;
  for (auto& [key, entries] : waiting_)
    for (auto& entry : entries) all.push_back(std::move(entry));
  waiting_.clear();
  return all;
}

}  // namespace hvd
