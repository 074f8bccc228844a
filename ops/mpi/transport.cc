#include "ops/mpi/transport.h"

#include <algorithm>
#include <climits>
#include <thread>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

constexpr int kTag = 0;

/// What MPI may still touch is on purpose never freed.
void forget(MPI_Request& request, Bytes& bytes, bool cancel) noexcept {
  if (request == MPI_REQUEST_NULL) return;
  if (cancel) MPI_Cancel(&request);
  MPI_Request_free(&request);
  try {
    static_cast<void>(new Bytes(std::move(bytes)));
  } catch (...) {
    static_cast<void>(0);  // no memory: nothing was moved, and nothing can be done
  }
}

}  // namespace

MpiTransport::MpiTransport(MpiComm comm, std::vector<int> leaders, std::vector<int> domain_of_rank, int domain)
    : comm_(std::move(comm)), leaders_(std::move(leaders)), domain_of_rank_(std::move(domain_of_rank)), domain_(domain) {}

MpiTransport::~MpiTransport() {
  int finalized = 0;
  if (MPI_Finalized(&finalized) != MPI_SUCCESS || finalized != 0) return;
  for (auto& out : outgoing_) forget(out.request, out.bytes, false);
  for (auto& in : incoming_) forget(in.request, in.message.bytes, true);
}

void MpiTransport::send(int to, std::span<const std::byte> bytes) {
  const int rank = leaders_.at(static_cast<std::size_t>(to));
  if (bytes.size() > INT_MAX)
    throw BackendError(formatted("a message of {} bytes to rank {} is longer than MPI can send", bytes.size(), rank));
  reap();
  Outgoing& out = outgoing_.emplace_back();
  out.bytes.assign(bytes.begin(), bytes.end());
  const int code = MPI_Isend(out.bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, rank, kTag, comm_.get(), &out.request);
  if (code == MPI_SUCCESS) return;
  outgoing_.pop_back();
  comm_.check(code, formatted("MPI_Isend to rank {}", rank));
}

void MpiTransport::reap() {
  // Almost always the oldest are done first; one that is not holds back only the freeing of the others.
  while (!outgoing_.empty()) {
    int done = 0;
    comm_.check(MPI_Test(&outgoing_.front().request, &done, MPI_STATUS_IGNORE), "MPI_Test of a message sent");
    if (done == 0) return;
    outgoing_.pop_front();
  }
}

void MpiTransport::look_for_arrivals() {
  while (true) {
    int found = 0;
    MPI_Message arrived = MPI_MESSAGE_NULL;
    MPI_Status status;
    comm_.check(MPI_Improbe(MPI_ANY_SOURCE, kTag, comm_.get(), &found, &arrived, &status), "MPI_Improbe");
    if (found == 0) return;
    int length = 0;
    comm_.check(MPI_Get_count(&status, MPI_BYTE, &length), "MPI_Get_count");
    Incoming& in = incoming_.emplace_back();
    in.message.from = domain_of_rank_.at(static_cast<std::size_t>(status.MPI_SOURCE));
    in.message.bytes.resize(static_cast<std::size_t>(length));
    comm_.check(MPI_Imrecv(in.message.bytes.data(), length, MPI_BYTE, &arrived, &in.request), "MPI_Imrecv");
  }
}

std::optional<Message> MpiTransport::receive() {
  reap();
  look_for_arrivals();
  std::vector<int> held_back;
  for (auto in = incoming_.begin(); in != incoming_.end(); ++in) {
    if (std::find(held_back.begin(), held_back.end(), in->message.from) != held_back.end()) continue;
    int done = 0;
    comm_.check(MPI_Test(&in->request, &done, MPI_STATUS_IGNORE), formatted("MPI_Test of a message from domain {}", in->message.from));
    if (done != 0) {
      Message message = std::move(in->message);
      incoming_.erase(in);
      return message;
    }
    held_back.push_back(in->message.from);
  }
  return std::nullopt;
}

bool MpiTransport::drain(std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (true) {
    reap();
    if (outgoing_.empty()) return true;
    if (std::chrono::steady_clock::now() > deadline) return false;
    look_for_arrivals();  // two leaders that drain at once take each other's
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace hvd
