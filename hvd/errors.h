#pragma once
/// Every way an operation can fail. `Error` and its children are thrown at the edge, in the caller's thread;
/// between threads and ranks a failure travels as a `Status` value.

#include <stdexcept>
#include <string>
#include <utility>

namespace hvd {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// A function that needs `init()` was called before it, or after `shutdown()`.
struct NotInitialized : Error {
  using Error::Error;
};
/// The call itself is wrong; raised at the call, on this rank only, and leaves no trace.
struct InvalidArgument : Error {
  using Error::Error;
};
/// The ranks disagree; raised on every participating rank at `wait()`. The library stays usable.
struct Mismatch : Error {
  using Error::Error;
};
/// The name is already in flight on this rank for the same operation and process set.
struct DuplicateName : InvalidArgument {
  using InvalidArgument::InvalidArgument;
};
/// An operation that cannot run without the ranks that have joined.
struct Joined : Error {
  using Error::Error;
};
/// A rank died or left; the text names it.
struct RankFailed : Error {
  using Error::Error;
};
/// A tensor waited longer than the stall shutdown time.
struct StallTimeout : Error {
  using Error::Error;
};
/// The library was shut down with the operation pending.
struct Shutdown : Error {
  using Error::Error;
};
/// MPI, NCCL or CUDA refused a call; the text has the call, the rank, the tensors and the library's own words.
struct BackendError : Error {
  using Error::Error;
};

/// A failure as a value. Travels between threads, and between ranks as (code, text).
class Status {
 public:
  enum class Code : unsigned char { Ok, Mismatch, Joined, RankFailed, StallTimeout, Shutdown, BackendError, InvalidArgument };

  Status() = default;
  Status(Code code, std::string text) : code_(code), text_(std::move(text)) {}

  [[nodiscard]] bool ok() const { return code_ == Code::Ok; }
  [[nodiscard]] Code code() const { return code_; }
  [[nodiscard]] const std::string& text() const { return text_; }

  /// Throws the Error of this code; does nothing when ok.
  void raise() const;

 private:
  Code code_ = Code::Ok;
  std::string text_;
};

/// The Status of the exception now being handled; BackendError for what is not ours. Call inside a `catch`.
Status status_of_current_exception();

}  // namespace hvd
