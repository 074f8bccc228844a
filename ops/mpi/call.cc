#include "ops/mpi/call.h"

#include <array>
#include <string>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

void check_mpi(int code, std::string_view call, int rank) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  const bool known = mpi().error_string(code, text.data(), &length) == MPI_SUCCESS && length > 0;
  const std::string words = known ? std::string(text.data(), static_cast<std::size_t>(length))
                                  : formatted("error {}", code);
  throw BackendError(formatted("{} on rank {}: {}", call, rank, words));
}

MpiComm::MpiComm(MPI_Comm comm) : comm_(comm) {
  check(mpi().comm_set_errhandler(comm_, mpi().errors_return), "MPI_Comm_set_errhandler");
  check(mpi().comm_rank(comm_, &rank_), "MPI_Comm_rank");
  check(mpi().comm_size(comm_, &size_), "MPI_Comm_size");
}

MpiComm MpiComm::duplicate(MPI_Comm of) {
  MPI_Comm copy{};
  check_mpi(mpi().comm_dup(of, &copy), "MPI_Comm_dup", -1);
  return MpiComm(copy);
}

MpiComm::MpiComm(MpiComm&& other) noexcept
    : comm_(std::exchange(other.comm_, kNone)), rank_(other.rank_), size_(other.size_) {}

MpiComm::~MpiComm() {
  if (comm_ == kNone) return;
  int finalized = 0;
  if (mpi().finalized(&finalized) == MPI_SUCCESS && finalized == 0) mpi().comm_free(&comm_);
}

int MpiComm::largest_tag() const {
  int* value = nullptr;
  int found = 0;
  check(mpi().comm_get_attr(comm_, MPI_TAG_UB, static_cast<void*>(&value), &found),
        "MPI_Comm_get_attr");
  constexpr int kGuaranteed = 32767;
  return found != 0 && value != nullptr ? *value : kGuaranteed;
}

}  // namespace hvd
