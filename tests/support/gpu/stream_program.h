#pragma once
/// A program of collective operations on virtual GPUs, drawn from a seed, as a user's streams make
/// it: kernels write the inputs, events say when, results are read and overwritten behind the
/// completion event, tensors are used again and again, and the host waits for nothing but the
/// oldest of several operations. Every result is compared, at the end. Values, and one thread per
/// rank.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hvd/backend.h"
#include "tests/support/gpu/host_gpu_api.h"

namespace hvd::gpu::test {

struct StepDraw {
  OpKind kind = OpKind::Allreduce;
  DataType dtype = DataType::Float32;
  ReduceOp op = ReduceOp::Sum;
  double prescale = 1, postscale = 1;
  int root = 0;
  std::vector<std::int64_t> bases;  ///< of each tensor, from which its counts follow
  bool in_place = false;
  bool lent = false;          ///< in memory of the backend's, where it lends any
  bool one_stream = false;    ///< one of the user's streams makes all its inputs
  std::uint64_t streams = 0;  ///< which of the user's streams do what
};

struct ProgramDraw {
  std::uint64_t seed = 0;
  int ranks = 2;
  int in_flight = 2;  ///< operations that the host lets run
  bool away = false;  ///< the user's thread has another GPU current, which is in use; otherwise,
                      ///< one that is not
  bool capturing = false;  ///< the user captures a graph in another thread meanwhile
  bool abandons = false;   ///< the backends are aborted while the last operations are under way
  std::vector<StepDraw> steps;
};

/// Says which operations are drawn.
struct ProgramLimits {
  std::vector<OpKind> kinds;
  std::vector<DataType> types;
  std::vector<ReduceOp> ops{ReduceOp::Sum};
  int steps = 8;
};
ProgramDraw draw_stream_program(std::uint64_t seed, int ranks, const ProgramLimits& limits);

/// Drives the backend of one rank, without an engine.
class ProgramDriver {
 public:
  virtual ~ProgramDriver() = default;
  /// Does the backend's share in submitting tensors; all ranks have done it when `launch` is
  /// called.
  virtual void prepare(std::size_t /*step*/, const BatchTraits& /*traits*/,
                       std::vector<BatchMember>& /*members*/) {}
  virtual std::unique_ptr<Execution> launch(std::size_t step, const BatchTraits& traits,
                                            std::vector<BatchMember> members) = 0;
  virtual Progress advance(std::size_t /*step*/, Execution& execution) {
    return execution.advance();
  }
  /// Tells that the rank is done with the batch.
  virtual void finish(std::size_t /*step*/) {}
  virtual std::shared_ptr<void> allocate(const BatchTraits& traits, std::size_t bytes) = 0;
  /// Aborts the backend when all ranks have come here; returns what that says.
  virtual bool abandon() = 0;
  /// Lets others run.
  virtual void idle() = 0;
};

/// Runs the rank's part; throws what is wrong. `set` outlives it. `table`: of the user's own calls.
void run_stream_program(const ProgramDraw& program, HostCluster& cluster, HostDevice& device,
                        const GpuApi& table, const ProcessSetInfo& set, ProgramDriver& driver);

/// Sets which GPU is current in the rank's thread, before the program's first call.
void stand_where_the_user_does(const ProgramDraw& program, HostDevice& device, int rank);

}  // namespace hvd::gpu::test
