#pragma once
/// This header has the owner of a communicator, and makes of MPI's error codes a BackendError with
/// the call, the rank and MPI's own words. Communicators made here return their errors instead of
/// ending the program.
// Tested in tests/ops/p2p/backend_test.cc

#include <string_view>

#include "ops/mpi/api.h"

namespace hvd {

/// Throws BackendError if `code` is an error. `rank`: of the caller, for the text.
void check_mpi(int code, std::string_view call, int rank);

/// Owns an MPI_Comm. Freed with it, unless MPI has been finalized before, or it is kept.
class MpiComm {
 public:
  /// Takes over `comm`.
  explicit MpiComm(MPI_Comm comm);
  /// Collective over `of`.
  static MpiComm duplicate(MPI_Comm of);
  MpiComm(MpiComm&& other) noexcept;
  ~MpiComm();
  /// It is never freed. MPI gives the number of a freed one to the next, and with it messages that
  /// nobody has received.
  void keep() { comm_ = kNone; }
  MpiComm& operator=(MpiComm&&) = delete;

  [[nodiscard]] MPI_Comm get() const { return comm_; }
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  /// Returns the largest tag that messages may carry.
  [[nodiscard]] int largest_tag() const;
  void check(int code, std::string_view call) const { check_mpi(code, call, rank_); }

 private:
  // not MPI_COMM_NULL, which is the library's; no communicator is this either
  static constexpr MPI_Comm kNone{};
  MPI_Comm comm_;
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace hvd
