#include "ops/rendezvous/store.h"

#include <algorithm>

#include "hvd/base/text.h"
#include "hvd/negotiation/values/status_wire.h"

namespace hvd {

namespace {

/// Bounds what a program that is wrong can make the server keep.
constexpr std::size_t kMostValues = 1U << 16;

Bytes answer(const std::string& key, const Bytes& value) {
  return Writer().put_string(key).put_bytes(value).take();
}

}  // namespace

Store::Store(int size)
    : who_(static_cast<std::size_t>(size)),
      here_(static_cast<std::size_t>(size), false),
      parts_(static_cast<std::size_t>(size)) {}

std::optional<std::pair<Refusal, std::string>> Store::come(const Hello& hello) {
  const int size = static_cast<int>(who_.size());
  std::string problem;
  if (hello.size != size) {
    problem = formatted(
        "WORLD_SIZE is {} for rank {} ({}), and {} for rank 0; it must be the same for all",
        hello.size, hello.rank, hello.who, size);
  } else if (hello.rank < 0 || hello.rank >= size) {
    problem = formatted("{} says that it is rank {} of {}", hello.who, hello.rank, size);
  } else if (const std::string& other = who_[static_cast<std::size_t>(hello.rank)];
             !other.empty()) {
    problem = formatted(
        "two processes say that they are rank {} of {}: {}, and {}; each needs a RANK of its own",
        hello.rank, size, other, hello.who);
  }
  if (!problem.empty()) {
    if (is_complete())
      return {{Refusal::Complete,
               formatted("all {} ranks of the job are there already; {}", size, problem)}};
    fail({Status::Code::InvalidArgument, problem});
    return {{Refusal::Wrong, problem}};
  }
  if (!failed_.ok()) return {{Refusal::Wrong, failed_.text()}};
  who_[static_cast<std::size_t>(hello.rank)] = hello.who.empty() ? "a process" : hello.who;
  here_[static_cast<std::size_t>(hello.rank)] = true;
  ++come_;
  if (is_complete())
    for (int rank = 0; rank < size; ++rank) reply(rank, FrameKind::Complete, {});
  return std::nullopt;
}

std::vector<int> Store::missing() const {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < who_.size(); ++rank)
    if (who_[rank].empty()) ranks.push_back(static_cast<int>(rank));
  return ranks;
}

void Store::leave(int rank) {
  const auto place = static_cast<std::size_t>(rank);
  here_[place] = false;
  std::erase_if(waiting_, [&](const auto& waiting) { return waiting.second == rank; });
  if (!is_complete()) {
    fail({Status::Code::RankFailed,
          formatted("rank {} ({}) has ended while it waited for other ranks to come", rank,
                    who_[place])});
  } else if (parts_here_ > 0 && !parts_[place]) {
    fail({Status::Code::RankFailed,
          formatted("rank {} has ended while others wait for it in hvd::init() or hvd::shutdown()",
                    rank)});
  }
}

void Store::fail(Status status) {
  if (!failed_.ok()) return;
  failed_ = std::move(status);
  for (std::size_t rank = 0; rank < here_.size(); ++rank)
    if (here_[rank]) reply(static_cast<int>(rank), FrameKind::Failed, to_wire(failed_));
}

void Store::take(int rank, const Frame& frame) {
  if (!is_complete()) throw WireError("a rank speaks before all are there");
  if (!failed_.ok()) return;  // it has been told
  Reader reader(frame.payload);
  if (frame.kind == FrameKind::Gather) {
    gather(rank, frame.payload);
  } else if (frame.kind == FrameKind::Put) {
    put(reader);
  } else if (frame.kind == FrameKind::Get) {
    get(rank, reader.get_string());
  } else {
    throw WireError("no rank says that");
  }
}

void Store::gather(int rank, Bytes bytes) {
  auto& part = parts_[static_cast<std::size_t>(rank)];
  if (part) throw WireError("a rank takes part twice");
  part = std::move(bytes);
  ++parts_here_;
  for (std::size_t other = 0; other < here_.size(); ++other) {
    if (here_[other] || parts_[other]) continue;
    fail({Status::Code::RankFailed,
          formatted("rank {} has ended while others wait for it in hvd::init() or hvd::shutdown()",
                    other)});
    return;
  }
  if (parts_here_ < static_cast<int>(parts_.size())) return;
  Writer all;
  for (auto& one : parts_) {
    all.put_bytes(*one);
    one.reset();
  }
  parts_here_ = 0;
  for (std::size_t other = 0; other < here_.size(); ++other)
    if (here_[other]) reply(static_cast<int>(other), FrameKind::Gathered, all.bytes());
}

void Store::put(Reader& reader) {
  std::string key = reader.get_string();
  Value value;
  value.takers = reader.get<std::uint32_t>();
  value.bytes = reader.get_bytes();
  if (values_.size() >= kMostValues || values_.contains(key)) throw WireError("a value too many");
  auto [first, last] = waiting_.equal_range(key);
  for (auto waiting = first; waiting != last && value.takers > 0;
       waiting = waiting_.erase(waiting), --value.takers)
    reply(waiting->second, FrameKind::Value, answer(key, value.bytes));
  if (value.takers > 0) values_.emplace(std::move(key), std::move(value));
}

void Store::get(int rank, std::string key) {
  const auto found = values_.find(key);
  if (found == values_.end()) {
    waiting_.emplace(std::move(key), rank);
    return;
  }
  reply(rank, FrameKind::Value, answer(found->first, found->second.bytes));
  if (--found->second.takers == 0) values_.erase(found);
}

}  // namespace hvd
