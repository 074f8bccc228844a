#include "ops/mpi/point_to_point.h"

#include <climits>
#include <cstring>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

// MPI's handles are pointers or numbers.
template <class Handle>
std::uintptr_t bits_of(Handle handle) {
  static_assert(sizeof handle <= sizeof(std::uintptr_t));
  std::uintptr_t bits = 0;
  std::memcpy(&bits, &handle, sizeof handle);
  return bits;
}

template <class Handle>
Handle handle_of(std::uintptr_t bits) {
  Handle handle{};
  std::memcpy(&handle, &bits, sizeof handle);
  return handle;
}

int message_bytes(std::size_t bytes) {
  if (bytes > INT_MAX)
    throw BackendError(formatted("a message of {} bytes is longer than MPI can send", bytes));
  return static_cast<int>(bytes);
}

}  // namespace

Posted MpiPointToPoint::send(std::span<const std::byte> bytes, int to, int tag, SendMode mode) {
  MPI_Request request{};
  const int length = message_bytes(bytes.size());
  const bool waits = mode == SendMode::Synchronous;
  const int code =
      waits ? mpi().issend(bytes.data(), length, mpi().byte_type, to, tag, comm_.get(), &request)
            : mpi().isend(bytes.data(), length, mpi().byte_type, to, tag, comm_.get(), &request);
  if (code != MPI_SUCCESS)
    comm_.check(code, formatted("{} to rank {}", waits ? "MPI_Issend" : "MPI_Isend", to));
  return {bits_of(request), to, true};
}

Posted MpiPointToPoint::receive(std::span<std::byte> bytes, int from, int tag) {
  MPI_Request request{};
  const int code = mpi().irecv(bytes.data(), message_bytes(bytes.size()), mpi().byte_type, from,
                               tag, comm_.get(), &request);
  if (code != MPI_SUCCESS) comm_.check(code, formatted("MPI_Irecv from rank {}", from));
  return {bits_of(request), from, false};
}

void MpiPointToPoint::test(std::span<Posted> posted, std::vector<Finished>& finished) {
  requests_.clear();
  for (const Posted& one : posted)
    requests_.push_back(one.handle == 0 ? mpi().request_null : handle_of<MPI_Request>(one.handle));
  done_.resize(posted.size());
  statuses_.resize(posted.size());
  int count = 0;
  const int code = mpi().testsome(static_cast<int>(requests_.size()), requests_.data(), &count,
                                  done_.data(), statuses_.data());
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) comm_.check(code, "MPI_Testsome");
  if (count == MPI_UNDEFINED) return;
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const auto place = static_cast<std::size_t>(done_[at]);
    Posted& one = posted[place];
    one.handle = 0;
    if (code == MPI_ERR_IN_STATUS && statuses_[at].MPI_ERROR != MPI_SUCCESS)
      comm_.check(statuses_[at].MPI_ERROR, formatted("MPI_Testsome, a message {} rank {}",
                                                     one.is_send ? "to" : "from", one.peer));
    int received = 0;
    if (!one.is_send)
      comm_.check(mpi().get_count(&statuses_[at], mpi().byte_type, &received), "MPI_Get_count");
    finished.push_back({place, static_cast<std::size_t>(received)});
  }
}

std::optional<Claimed> MpiPointToPoint::claim(int tag) {
  int found = 0;
  MPI_Message arrived{};
  MPI_Status status;
  comm_.check(mpi().improbe(MPI_ANY_SOURCE, tag, comm_.get(), &found, &arrived, &status),
              "MPI_Improbe");
  if (found == 0) return std::nullopt;
  int length = 0;
  comm_.check(mpi().get_count(&status, mpi().byte_type, &length), "MPI_Get_count");
  return Claimed{bits_of(arrived), status.MPI_SOURCE, static_cast<std::size_t>(length)};
}

Posted MpiPointToPoint::receive_claimed(const Claimed& claimed, std::span<std::byte> bytes) {
  MPI_Request request{};
  auto message = handle_of<MPI_Message>(claimed.handle);
  comm_.check(
      mpi().imrecv(bytes.data(), message_bytes(bytes.size()), mpi().byte_type, &message, &request),
      "MPI_Imrecv");
  return {bits_of(request), claimed.from, false};
}

/// MPI ends with the process, and a communicator of ranks that have died is never freed.
void MpiPointToPoint::keep(std::shared_ptr<void> memory) noexcept {
  static_cast<void>(new (std::nothrow) std::shared_ptr<void>(std::move(memory)));
}

bool MpiPointToPoint::drop(Posted& posted) noexcept {
  if (posted.handle == 0) return false;
  auto request = handle_of<MPI_Request>(posted.handle);
  posted.handle = 0;
  int finalized = 0;
  if (mpi().finalized(&finalized) != MPI_SUCCESS || finalized != 0) return false;
  if (!posted.is_send) mpi().cancel(&request);
  mpi().request_free(&request);
  return true;
}

}  // namespace hvd
