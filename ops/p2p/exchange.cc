#include "ops/p2p/exchange.h"

#include <algorithm>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

// cached for the next batch: fresh pages cost more than the copy into them
constexpr std::size_t kPoolBytes = std::size_t{64} << 20;
constexpr std::size_t kAlignment = 64;

}  // namespace

Exchange::Exchange(std::unique_ptr<PointToPoint> wire, std::vector<int> hosts, bool looks_again)
    : wire_(std::move(wire)), hosts_(std::move(hosts)), looks_again_(looks_again) {}

Exchange::~Exchange() { abandon(); }

void Exchange::abandon() noexcept {
  for (Requests* requests : under_way_) requests->abandon();
}

bool Exchange::is_elsewhere(int rank) const {
  return hosts_[static_cast<std::size_t>(rank)] != hosts_[static_cast<std::size_t>(wire_->rank())];
}

Exchange::Buffer Exchange::take(std::size_t bytes) {
  // A cached buffer is used for no less than half its size.
  const auto fits = [&](const Buffer& buffer) {
    return buffer.bytes >= bytes && buffer.bytes / 2 <= bytes;
  };
  if (const auto found = std::find_if(pool_.begin(), pool_.end(), fits); found != pool_.end()) {
    Buffer buffer = std::move(*found);
    pool_.erase(found);
    pooled_bytes_ -= buffer.bytes;
    return buffer;
  }
  // NOLINT(modernize-avoid-c-arrays)
  return {std::make_unique_for_overwrite<std::byte[]>(bytes), bytes};
}

void Exchange::give(Buffer buffer) {
  pooled_bytes_ += buffer.bytes;
  pool_.push_back(std::move(buffer));
  while (pooled_bytes_ > kPoolBytes) {
    pooled_bytes_ -= pool_.front().bytes;
    pool_.erase(pool_.begin());
  }
}

Requests::Requests(Exchange& exchange, std::shared_ptr<void> memory)
    : exchange_(exchange), memory_(std::move(memory)) {
  exchange_.under_way_.insert(this);
}

Requests::~Requests() {
  abandon();
  exchange_.under_way_.erase(this);
  try {
    for (auto& buffer : buffers_) exchange_.give(std::move(buffer));
  } catch (const std::bad_alloc&) {  // the next ones are made anew
  }
}

std::span<std::byte> Requests::buffer(std::size_t bytes) {
  buffers_.push_back(exchange_.take(bytes + kAlignment));
  void* start = buffers_.back().memory.get();
  std::size_t room = bytes + kAlignment;
  return {static_cast<std::byte*>(std::align(kAlignment, bytes, start, room)), bytes};
}

void Requests::add(const Posted& posted, Message message) {
  ++*message.pending;
  is_to_flush_ = true;
  posted_.push_back(posted);
  messages_.push_back(message);
}

template <class Byte, class Visit>
void Requests::each_piece(std::span<Byte> bytes, int peer, Visit&& visit) const {
  const std::size_t most =
      exchange_.is_elsewhere(peer) ? exchange_.wire().piece_bytes() : bytes.size();
  for (; bytes.size() > most; bytes = bytes.subspan(most)) visit(bytes.first(most));
  visit(bytes);
}

void Requests::send(std::span<const std::byte> bytes, int to, int tag, SendMode mode,
                    std::size_t& pending) {
  if (exchange_.is_elsewhere(to)) bytes_to_other_hosts_ += bytes.size();
  each_piece(bytes, to, [&](auto piece) {
    add(exchange_.wire().send(piece, to, tag, mode), {&pending, 0});
  });
}

void Requests::receive(std::span<std::byte> bytes, int from, int tag, std::size_t& pending) {
  each_piece(bytes, from, [&](auto piece) {
    add(exchange_.wire().receive(piece, from, tag), {&pending, piece.size()});
  });
}

bool Requests::idle() {
  if (!posted_.empty()) return false;
  if (is_to_flush_ && !exchange_.looks_again()) is_to_flush_ = !exchange_.wire().flush();
  return !is_to_flush_ || exchange_.looks_again();
}

bool Requests::poll() {
  if (posted_.empty()) return false;
  finished_.clear();
  exchange_.wire().test(posted_, finished_);
  if (finished_.empty()) return false;
  for (const Finished& one : finished_) {
    const Message& message = messages_[one.place];
    --*message.pending;
    const Posted& posted = posted_[one.place];
    if (!posted.is_send && one.bytes != message.expected)
      throw BackendError(formatted("rank {} sent {} bytes where rank {} expects {}", posted.peer,
                                   one.bytes, exchange_.wire().rank(), message.expected));
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < posted_.size(); ++i) {
    if (posted_[i].handle == 0) continue;
    posted_[kept] = posted_[i];
    messages_[kept++] = messages_[i];
  }
  posted_.resize(kept);
  messages_.resize(kept);
  return true;
}

void Requests::abandon() noexcept {
  bool touched = false;
  for (Posted& posted : posted_) touched = exchange_.wire().drop(posted) || touched;
  posted_.clear();
  messages_.clear();
  if (!touched) return;
  exchange_.wire().keep(memory_);
  try {
    exchange_.wire().keep(std::make_shared<std::vector<Exchange::Buffer>>(std::move(buffers_)));
  } catch (const std::bad_alloc&) {
    for (auto& buffer : buffers_) static_cast<void>(buffer.memory.release());  // for ever
  }
  buffers_.clear();
}

}  // namespace hvd
