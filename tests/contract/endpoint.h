#pragma once
/// The way by which a case reaches the library: an engine of a world of threads, or the front door
/// of hvd/hvd.h. A endpoint belongs to one rank; its calls throw what the library throws.

#include <cstddef>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "hvd/engine/engine.h"
#include "hvd/types.h"

namespace hvd::contract {

/// Memory of the caller's. `output` is only looked at by allreduce and broadcast, and where the
/// call is `into` it.
struct Tensor {
  DataType dtype = DataType::Float32;
  Shape shape;
  void* input = nullptr;
  void* output = nullptr;
  std::int64_t output_rows = -1;  ///< of a call `into` it
};

/// What one rank calls.
struct Call {
  OpKind kind = OpKind::Allreduce;
  std::string name;
  int set = 0;
  ReduceOp op = ReduceOp::Sum;
  double prescale = 1;
  double postscale = 1;
  int root = 0;
  Device device;
  std::vector<Tensor> tensors;
  std::vector<std::int64_t> splits;
  bool into =
      false;  ///< Allgather, Alltoall, Reducescatter of one tensor: the result goes to its output
};

/// What an operation that makes its own output returns for a tensor.
struct Made {
  std::vector<std::byte> data;
  Shape shape;
  std::vector<std::int64_t> received;  ///< Alltoall
};
using Results = std::vector<Made>;
/// Blocks until the operation is done.
using Wait = std::function<Results()>;

/// A message of host memory that is sent, or received.
struct Letter {
  DataType dtype = DataType::Float32;
  Shape shape;
  void* memory = nullptr;
  int peer = 0;
  int tag = 0;
};

/// A persistent operation.
struct Again {
  std::function<void()> start;
  Wait wait;
};

class Endpoint {
 public:
  virtual ~Endpoint() = default;
  /// Of an allreduce, or of a call `into` memory. The front door's only.
  virtual Again describe(const Call& /*call*/) {
    throw std::logic_error("persistent operations are the front door's");
  }
  /// The asynchronous form, and the one that waits at once.
  virtual Wait start(const Call& call) = 0;
  virtual Results run(const Call& call) = 0;
  virtual int add_set(const std::vector<int>& ranks) = 0;
  virtual void remove_set(int set) = 0;
  virtual int join(int set) = 0;
  virtual void barrier(int set) = 0;
  /// Of what was started, a call waits; of a recv it returns the rank that the message came from,
  /// as `recv` does.
  virtual void send(const Letter& letter) = 0;
  virtual int recv(const Letter& letter) = 0;
  virtual std::function<void()> start_send(const Letter& letter) = 0;
  virtual std::function<int()> start_recv(const Letter& letter) = 0;
  /// Null where ranks do not share memory.
  virtual std::shared_ptr<void> allocate_shared(std::size_t bytes) = 0;
  virtual void shutdown() = 0;
  /// Of this rank; for statistics, and for what no function of the front door does.
  virtual Engine& engine() = 0;

  Stats stats() { return engine().stats(); }
  /// Whether some backend of this rank does it, as the engine asks.
  bool supports(OpKind kind, DataType dtype, ReduceOp op, Device device);
};

/// A submission that waits for nothing: Join while the caller goes on.
std::function<int()> start_join(Engine& engine, int set);

std::unique_ptr<Endpoint> make_engine_door(
    Engine& engine, std::function<std::shared_ptr<void>(std::size_t)> allocate);
/// Of the world that hvd::init() has made.
std::unique_ptr<Endpoint> make_front_door();

}  // namespace hvd::contract
