#pragma once
/// A Submission is what a user gives the engine: it is moved into the engine and owned by it. A
/// HandleState is what the user holds until it is done: it is shared by the engine and the user's
/// handle.
// Tested in tests/hvd/api/request_test.cc

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hvd/errors.h"
#include "hvd/types.h"

#pragma GCC visibility push(default)
namespace hvd {

/// A TensorArgument is one tensor of a submission.
struct TensorArgument {
  const void* input = nullptr;  ///< its first element; the memory is the user's
  void* output = nullptr;  ///< null for Allgather and Alltoall, whose output is allocated when its
                           ///< size is known; may be for Reducescatter
  DataType dtype = DataType::Float32;  ///< the type of its elements
  Shape shape;                         ///< of the input
  void* ready_event =
      nullptr;  ///< native device event after which `input` may be read; null: it already may
  bool present =
      true;  ///< false: this rank has nothing to say, its input counts as the zeros that it holds
  /// For each rank of the set, in the set's order. Alltoall: rows that go to it. Reducescatter:
  /// elements that it keeps, all of them together, the same on all ranks; `output` may then be
  /// where this rank's lie in `input`, or is allocated for so many rows of a tensor of one
  /// dimension. Empty: by rows, the first get one more.
  std::vector<std::int64_t> splits = {};
  std::string name = {};  ///< of a member of a group: what messages call it; not negotiated
  bool padded = false;  ///< from the end of `output` to the next multiple of `kMemberAlignment` it
                        ///< may be overwritten
  /// Allgather, Alltoall into memory that exists: the rows that it has, which must be as many as
  /// come; -1: `allocate` makes as many.
  std::int64_t output_rows = -1;
};

/// A Submission is one operation: of a tensor, or of a group that becomes ready together and fails
/// together. Barrier and Join have no tensor; the tensor of a Control stands for a list of ranks,
/// which is its shape.
struct Submission : OperationTerms {
  std::string name;     ///< empty: numbered per op and process set
  int process_set = 0;  ///< id of the set
  std::chrono::nanoseconds deadline{
      0};         ///< from here on, when the world ends unless the operation has; 0: none
  Device device;  ///< where all of its tensors are
  std::vector<TensorArgument> tensors;  ///< one, or the members of a group
  /// Returns memory for `rows` rows of tensor `index`, which has no output. Called once for each
  /// such tensor, by the thread that has the turn, before the batch runs.
  std::function<void*(std::size_t index, std::int64_t rows)> allocate;
  /// Owns whatever must live as long as the buffers are in use.
  std::shared_ptr<void> keep_alive;
  /// Says that the tensors are a device's and that their user works on a stream of it: `wait()`
  /// returns when all is enqueued there, and the stream is to wait for the `completions`. A later
  /// submission under the same name then waits for this one, its caller does not. An error that the
  /// device meets after that is the next operation's.
  bool on_stream = false;
  bool internal = false;  ///< made by the library for itself: `stats()` does not count it
};

struct Callbacks;

/// A HandleState is the state behind a handle. The engine writes everything before it stores
/// `done`; then it is only read.
struct HandleState : std::enable_shared_from_this<HandleState> {
  std::atomic<bool> done{false};  ///< all else is written, and stays
  std::atomic<bool> waited_for{
      false};  ///< a thread is, or was, inside `wait()`, or was told otherwise that it is over
  std::atomic<bool> polled{
      false};  ///< a thread has asked lately whether it is over, and it was not
  std::atomic<bool> enqueued{
      false};     ///< of a submission `on_stream`: `wait()` may return; all but `status` is written
  Status status;  ///< what it failed with, if it did
  std::vector<bool> present_anywhere;  ///< per tensor: some rank had something to say (all true
                                       ///< unless `present` was used)
  std::vector<std::vector<std::int64_t>> rows;  ///< Allgather, Alltoall: by tensor, rows from each
  std::int64_t value = 0;   ///< Join: the rank that joined last; Control: id of the process set;
                            ///< recv: the rank that the message is of
  bool is_message = false;  ///< of send or recv; never changes
  /// A Completion is a native device event that follows the outputs.
  struct Completion {
    void* event = nullptr;        ///< a cudaEvent_t
    std::shared_ptr<void> owner;  ///< keeps the event
  };
  std::vector<Completion> completions;  ///< one for each batch that it travelled in; empty on hosts
  /// The engine's: what is to be called once `wait()` may return, see `Handle::then`; null, as long
  /// as that is nothing, and afterwards.
  std::shared_ptr<Callbacks> callbacks;
};

}  // namespace hvd
#pragma GCC visibility pop
