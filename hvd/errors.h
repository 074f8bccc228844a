#pragma once
/// This file has every way in which an operation can fail. `Error` and its children are thrown at
/// the edge, in the caller's thread; between threads and ranks a failure travels as a `Status`
/// value. Who learns of which error: docs/semantics.md, "Errors".

#include <stdexcept>
#include <string>
#include <utility>

#pragma GCC visibility push(default)
namespace hvd {

/// Error is the base of all exceptions of the library. Its text says what is wrong and what to do.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// NotInitialized: a function that needs `init()` was called before it, or after `shutdown()`.
struct NotInitialized : Error {
  using Error::Error;
};
/// InvalidArgument: the call itself is wrong. It is raised at the call, on this rank only, and
/// leaves no trace, unless the function says otherwise.
struct InvalidArgument : Error {
  using Error::Error;
};
/// Mismatch: the ranks disagree. All that take part raise it at `wait()`; the library stays usable.
struct Mismatch : Error {
  using Error::Error;
};
/// Deadlock: the ranks wait for one another, each for what the others do not submit. It is raised
/// on every rank that waits; what they have submitted besides and the others have not ends
/// likewise. The library stays usable.
struct Deadlock : Mismatch {
  using Mismatch::Mismatch;
};
/// DuplicateName: the name is in flight on this rank for the same operation and process set.
struct DuplicateName : InvalidArgument {
  using InvalidArgument::InvalidArgument;
};
/// Joined: the operation cannot run without the ranks that have joined, or this rank has.
struct Joined : Error {
  using Error::Error;
};
/// RankFailed: a rank died, fell silent, gave up, called `abort()`, or left a World where it was
/// needed. The text names it.
struct RankFailed : Error {
  using Error::Error;
};
/// StallTimeout: a tensor waited longer than the stall shutdown time, or its
/// deadline.
struct StallTimeout : Error {
  using Error::Error;
};
/// Shutdown: this rank, or one that the operation needs, has called `shutdown()`.
struct Shutdown : Error {
  using Error::Error;
};
/// BackendError: MPI, NCCL or CUDA refused a call. The text has the call, the rank, the tensors and
/// the library's own words.
struct BackendError : Error {
  using Error::Error;
};
/// CheckpointError: a checkpoint cannot be written or read. The text names the file, the rank, what
/// is wrong. hvd::torch throws it, on all ranks.
struct CheckpointError : Error {
  using Error::Error;
};

/// A Status is a failure as a value. It travels between threads and, as code and text, ranks.
class Status {
 public:
  /// Code has a value for each kind of Error that may travel.
  enum class Code : unsigned char {
    Ok,
    Mismatch,
    Joined,
    RankFailed,
    StallTimeout,
    Shutdown,
    BackendError,
    InvalidArgument,
    Deadlock
  };

  /// Makes a Status that is ok.
  Status() = default;
  /// Makes a failure with what its Error is to say.
  Status(Code code, std::string text) : code_(code), text_(std::move(text)) {}

  /// Returns whether nothing has failed.
  [[nodiscard]] bool ok() const { return code_ == Code::Ok; }
  /// Returns the kind of the failure.
  [[nodiscard]] Code code() const { return code_; }
  /// Returns what the Error is to say; empty when ok.
  [[nodiscard]] const std::string& text() const { return text_; }

  /// Throws the Error of this code; does nothing when ok.
  void raise() const;

 private:
  Code code_ = Code::Ok;
  std::string text_;
};

/// Returns the Status of the exception now being handled; BackendError for what is not ours.
/// Requires to be called inside a `catch`.
Status status_of_current_exception();

}  // namespace hvd
#pragma GCC visibility pop
