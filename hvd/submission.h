#pragma once
/// Room card: what a user gives the engine, and what the user holds until it is done. A Submission is moved into the engine and
/// owned by it; a Pending is shared by the engine and the user's handle.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hvd/errors.h"
#include "hvd/types.h"

namespace hvd {

struct TensorArgument {
  const void* input = nullptr;
  void* output = nullptr;  ///< null for Allgather, whose output is allocated when its size is known
  DataType dtype = DataType::Float32;
  Shape shape;
  void* ready_event = nullptr;  ///< native device event after which `input` may be read; null: it already may
  bool present = true;          ///< false: this rank has nothing to say, its input counts as the zeros that it holds
};

/// One operation: a tensor, or a group that becomes ready together and fails together. Barrier has no tensor.
struct Submission {
  OpKind kind = OpKind::Allreduce;
  std::string name;  ///< empty: numbered per op and process set
  int process_set = 0;
  ReduceOp op = ReduceOp::Average;
  double prescale_factor = 1;
  double postscale_factor = 1;
  int root = 0;  ///< global rank
  Device device;
  std::vector<TensorArgument> tensors;
  /// Allgather: returns memory for `rows` rows of tensor `index`; called once for each, on the driver, before the batch runs.
  std::function<void*(std::size_t index, std::int64_t rows)> allocate;
  /// Whatever must live as long as the buffers are in use.
  std::shared_ptr<void> keep_alive;
};

/// The state behind a handle. The engine writes everything before it stores `done`; then it is only read.
struct Pending {
  std::atomic<bool> done{false};
  Status status;
  std::vector<bool> present_anywhere;  ///< per tensor: some rank had something to say (all true unless `present` was used)
  void* completion_event = nullptr;    ///< native device event that follows the outputs; null on hosts
  std::shared_ptr<void> event_owner;
};

}  // namespace hvd
