#include "ops/mpi/exchange.h"

#include <algorithm>
#include <climits>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

constexpr std::size_t kPoolBytes = std::size_t{64} << 20;  // kept for the next batch: fresh pages cost more than the copy into them
constexpr std::size_t kAlignment = 64;

int message_bytes(std::size_t bytes) {
  if (bytes > INT_MAX) throw BackendError(formatted("a message of {} bytes is longer than MPI can send", bytes));
  return static_cast<int>(bytes);
}

}  // namespace

Exchange::Exchange(MpiComm comm, std::vector<int> hosts) : comm_(std::move(comm)), hosts_(std::move(hosts)) {}

Exchange::~Exchange() { abandon(); }

void Exchange::abandon() noexcept {
  for (Requests* requests : under_way_) requests->abandon();
}

bool Exchange::is_elsewhere(int rank) const {
  return hosts_[static_cast<std::size_t>(rank)] != hosts_[static_cast<std::size_t>(comm_.rank())];
}

Exchange::Buffer Exchange::take(std::size_t bytes) {
  // A kept buffer may be used for up to half its size.
  const auto fits = [&](const Buffer& buffer) { return buffer.bytes >= bytes && buffer.bytes / 2 <= bytes; };
  if (const auto found = std::find_if(pool_.begin(), pool_.end(), fits); found != pool_.end()) {
    Buffer buffer = std::move(*found);
    pool_.erase(found);
    pooled_bytes_ -= buffer.bytes;
    return buffer;
  }
  return {std::make_unique_for_overwrite<std::byte[]>(bytes), bytes};  // NOLINT(modernize-avoid-c-arrays)
}

void Exchange::give(Buffer buffer) {
  pooled_bytes_ += buffer.bytes;
  pool_.push_back(std::move(buffer));
  while (pooled_bytes_ > kPoolBytes) {
    pooled_bytes_ -= pool_.front().bytes;
    pool_.erase(pool_.begin());
  }
}

Requests::Requests(Exchange& exchange, std::shared_ptr<void> memory) : exchange_(exchange), memory_(std::move(memory)) {
  exchange_.under_way_.insert(this);
}

Requests::~Requests() {
  abandon();
  exchange_.under_way_.erase(this);
  for (auto& buffer : buffers_) exchange_.give(std::move(buffer));
}

std::span<std::byte> Requests::buffer(std::size_t bytes) {
  buffers_.push_back(exchange_.take(bytes + kAlignment));
  void* start = buffers_.back().memory.get();
  std::size_t room = bytes + kAlignment;
  return {static_cast<std::byte*>(std::align(kAlignment, bytes, start, room)), bytes};
}

void Requests::add(MPI_Request request, Message message) {
  ++*message.pending;
  requests_.push_back(request);
  messages_.push_back(message);
}

void Requests::send(std::span<const std::byte> bytes, int to, int tag, std::size_t& pending) {
  const MpiComm& comm = exchange_.comm();
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = MPI_Isend(bytes.data(), message_bytes(bytes.size()), MPI_BYTE, to, tag, comm.get(), &request);
  if (code != MPI_SUCCESS) comm.check(code, formatted("MPI_Isend to rank {}", to));
  if (exchange_.is_elsewhere(to)) bytes_to_other_hosts_ += bytes.size();
  add(request, {&pending, to, -1});
}

void Requests::send_synchronously(std::span<const std::byte> bytes, int to, int tag, std::size_t& pending) {
  const MpiComm& comm = exchange_.comm();
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = MPI_Issend(bytes.data(), message_bytes(bytes.size()), MPI_BYTE, to, tag, comm.get(), &request);
  if (code != MPI_SUCCESS) comm.check(code, formatted("MPI_Issend to rank {}", to));
  if (exchange_.is_elsewhere(to)) bytes_to_other_hosts_ += bytes.size();
  add(request, {&pending, to, -1});
}

void Requests::receive(std::span<std::byte> bytes, int from, int tag, std::size_t& pending) {
  const MpiComm& comm = exchange_.comm();
  MPI_Request request = MPI_REQUEST_NULL;
  const int length = message_bytes(bytes.size());
  const int code = MPI_Irecv(bytes.data(), length, MPI_BYTE, from, tag, comm.get(), &request);
  if (code != MPI_SUCCESS) comm.check(code, formatted("MPI_Irecv from rank {}", from));
  add(request, {&pending, from, length});
}

bool Requests::poll() {
  if (requests_.empty()) return false;
  const MpiComm& comm = exchange_.comm();
  done_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int count = 0;
  const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, done_.data(), statuses_.data());
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) comm.check(code, "MPI_Testsome");
  if (count == MPI_UNDEFINED || count <= 0) return false;
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const Message& message = messages_[static_cast<std::size_t>(done_[at])];
    if (code == MPI_ERR_IN_STATUS && statuses_[at].MPI_ERROR != MPI_SUCCESS)
      comm.check(statuses_[at].MPI_ERROR,
                 formatted("MPI_Testsome, a message {} rank {}", message.expected < 0 ? "to" : "from", message.peer));
    --*message.pending;
    if (message.expected < 0) continue;
    int received = 0;
    comm.check(MPI_Get_count(&statuses_[at], MPI_BYTE, &received), "MPI_Get_count");
    if (received != message.expected)
      throw BackendError(
          formatted("rank {} sent {} bytes where rank {} expects {}", message.peer, received, comm.rank(), message.expected));
  }
  // What is done is MPI_REQUEST_NULL now.
  std::size_t kept = 0;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    requests_[kept] = requests_[i];
    messages_[kept++] = messages_[i];
  }
  requests_.resize(kept);
  messages_.resize(kept);
  return true;
}

void Requests::abandon() noexcept {
  bool touched = false;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    touched = true;
    if (messages_[i].expected >= 0) MPI_Cancel(&requests_[i]);
    MPI_Request_free(&requests_[i]);
  }
  requests_.clear();
  messages_.clear();
  if (!touched) return;
  // MPI may go on reading and writing there, for as long as the process lives: on purpose never freed.
  try {
    static_cast<void>(new std::vector<Exchange::Buffer>(std::move(buffers_)));
    static_cast<void>(new std::shared_ptr<void>(memory_));
  } catch (...) {
    for (auto& buffer : buffers_) static_cast<void>(buffer.memory.release());
  }
  buffers_.clear();
}

}  // namespace hvd
