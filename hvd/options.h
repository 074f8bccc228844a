#pragma once
/// This file has what users say beside their tensors. All are values; the fields' defaults are
/// Horovod's.
// Tested in tests/hvd/api/request_test.cc

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/types.h"
#include "hvd/world.h"

#pragma GCC visibility push(default)
namespace hvd {

/// A ProcessSet stands for a group of ranks that has collectives of its own. It is a value: the
/// global set unless made by `process_set` or `add_process_set`. Its functions tell of the world
/// that it was made in, wherever they are called. They throw NotInitialized before `init()`, or
/// where that world has ended, and InvalidArgument where there is no such set.
class ProcessSet {
 public:
  static constexpr std::uint64_t kAnyWorld = ~std::uint64_t{0};  ///< as a world's number
  /// Makes the global set.
  ProcessSet() = default;
  /// Makes the set of this id in the world of this number, or in any; for front ends.
  explicit ProcessSet(int id, std::uint64_t world = kAnyWorld) : id_(id), world_(world) {}
  /// Returns its number, 0 for the global set; throws nothing.
  [[nodiscard]] int id() const { return id_; }
  /// Returns the number of its world, another one after each `init()`; kAnyWorld where it may be
  /// any, as of the set of all ranks.
  [[nodiscard]] std::uint64_t world_number() const { return world_; }
  /// Returns this process's rank in the set, -1 if it is not included.
  [[nodiscard]] int rank() const;
  /// Returns the number of ranks in the set.
  [[nodiscard]] int size() const;
  /// Returns whether this process is in the set.
  [[nodiscard]] bool included() const;
  /// Returns the global ranks in the set, ascending.
  [[nodiscard]] std::vector<int> ranks() const;
  /// Compares the ids, and the worlds where both have one.
  bool operator==(const ProcessSet& other) const {
    return id_ == other.id_ &&
           (world_ == other.world_ || world_ == kAnyWorld || other.world_ == kAnyWorld);
  }

 private:
  int id_ = 0;
  std::uint64_t world_ = kAnyWorld;
};

/// Compression says how gradients travel. fp16 and bf16 halve the bytes: values are rounded once to
/// 16 bits, summed in fp32 and rounded once more. The others leave more out. DistributedOptimizer
/// and DistributedDataParallel remember what (error feedback,
/// torch_bindings/gradients/compressor.h); allreduce and grouped_allreduce of tensors forget it; of
/// buffers, persistent ones and sparse_allreduce refuse these kinds with InvalidArgument, at the
/// call.
class Compression {
 public:
  /// Kind has a value for each of the ways below.
  enum class Kind : std::uint8_t { None, Fp16, Bf16, Int8, TopK, PowerSgd };
  /// Returns the way of tensors that travel as they are.
  static Compression none() { return {}; }
  /// Returns the way through 16-bit floats of 11 significant bits.
  static Compression fp16() { return Compression(Kind::Fp16); }
  /// Returns the way through 16-bit floats with the range of fp32.
  static Compression bf16() { return Compression(Kind::Bf16); }
  /// Returns the way with a quarter of the bytes of fp32: blocks of 256 values, each with a scale.
  static Compression int8() { return Compression(Kind::Int8); }
  /// Returns the way on which, of each tensor, the values of largest magnitude travel: `ratio` of
  /// them, 0 < ratio <= 1, and at least one. Throws InvalidArgument for another ratio.
  static Compression topk(double ratio = 0.01);
  /// Returns the way on which a matrix travels as two thin ones of `rank` >= 1 columns. Throws
  /// InvalidArgument for another rank.
  static Compression powersgd(int rank = 4);

  /// Makes `none()`.
  Compression() = default;
  /// Returns which way it is.
  [[nodiscard]] Kind kind() const { return kind_; }
  /// Returns the ratio of topk; 1 otherwise.
  [[nodiscard]] double ratio() const { return ratio_; }
  /// Returns the rank of powersgd; 0 otherwise.
  [[nodiscard]] int rank() const { return rank_; }
  /// Returns whether it leaves out values, which the optimizer's wrapper remembers for the next
  /// step and a tensor's allreduce does not.
  [[nodiscard]] bool needs_memory() const { return kind_ >= Kind::Int8; }
  /// Throws InvalidArgument if it leaves out values. `what` names the call that cannot.
  void refuse_memory(std::string_view what) const;
  /// Returns the type in which a tensor of `dtype` travels: 16 bits for Float32 and Float64 with
  /// fp16 and bf16, otherwise `dtype`.
  [[nodiscard]] DataType wire_type(DataType dtype) const {
    const bool wide = dtype == DataType::Float32 || dtype == DataType::Float64;
    if ((kind_ != Kind::Fp16 && kind_ != Kind::Bf16) || !wide) return dtype;
    return kind_ == Kind::Fp16 ? DataType::Float16 : DataType::BFloat16;
  }
  /// Compares way, ratio and rank.
  bool operator==(const Compression&) const = default;

 private:
  explicit Compression(Kind kind) : kind_(kind) {}
  Kind kind_ = Kind::None;
  int rank_ = 0;
  double ratio_ = 1;
};

/// AllreduceOptions are those of allreduce, grouped_allreduce and sparse_allreduce.
struct AllreduceOptions {
  std::string
      name{};  ///< empty: made up, the same on all ranks that make their calls in the same order
  ReduceOp op = ReduceOp::Average;  ///< how the ranks' values are combined
  double prescale_factor = 1;   ///< multiplies every rank's input before the reduction (integers in
                                ///< double, truncated toward zero)
  double postscale_factor = 1;  ///< multiplies the result after it, likewise
  ProcessSet process_set{};     ///< the ranks that take part
  Compression compression{};    ///< raw buffers, persistent and sparse: none, fp16 or bf16
  /// From the call on (of a persistent operation from `start()` on): an operation, or group, that
  /// has not ended by then ends the world with a StallTimeout on all ranks, which says which ranks
  /// have not come, be it waited for or not. Ranks may differ. 0: none; such an operation takes no
  /// fast path. Negative: InvalidArgument.
  std::chrono::nanoseconds deadline{0};
  World world{};  ///< the world; the one of the thread (World::current) unless given
};

/// AllgatherOptions are those of allgather and grouped_allgather.
struct AllgatherOptions {
  std::string name{};                    ///< see AllreduceOptions::name
  ProcessSet process_set{};              ///< the ranks that take part
  std::chrono::nanoseconds deadline{0};  ///< see AllreduceOptions::deadline
  World world{};                         ///< see AllreduceOptions::world
};

/// AlltoallBufferOptions are those of alltoall on raw buffers.
struct AlltoallBufferOptions {
  std::string name{};  ///< see AllreduceOptions::name
  std::vector<std::int64_t>
      splits{};  ///< rows for each rank of the set; empty: the first dimension is divided evenly
  ProcessSet process_set{};              ///< the ranks that take part
  std::chrono::nanoseconds deadline{0};  ///< see AllreduceOptions::deadline
  World world{};                         ///< see AllreduceOptions::world
};

/// ReducescatterOptions are those of reducescatter and grouped_reducescatter.
struct ReducescatterOptions {
  std::string name{};               ///< see AllreduceOptions::name
  ReduceOp op = ReduceOp::Average;  ///< Average or Sum
  double prescale_factor = 1;       ///< see AllreduceOptions::prescale_factor
  double postscale_factor = 1;      ///< see AllreduceOptions::postscale_factor
  ProcessSet process_set{};         ///< the ranks that take part
  /// Elements of the tensor for each rank of the set, in their order, the same on all ranks and all
  /// of them together: the result is then one-dimensional. Empty: whole rows, the first ranks get
  /// one more. Not for groups of several tensors.
  std::vector<std::int64_t> counts{};
  std::chrono::nanoseconds deadline{0};  ///< see AllreduceOptions::deadline
  World world{};                         ///< see AllreduceOptions::world
};

/// BroadcastOptions are those of broadcast.
struct BroadcastOptions {
  std::string name{};        ///< see AllreduceOptions::name
  int root_rank = 0;         ///< the rank that sends: a global rank, also within a process set
  ProcessSet process_set{};  ///< the ranks that take part
  std::chrono::nanoseconds deadline{0};  ///< see AllreduceOptions::deadline
  World world{};                         ///< see AllreduceOptions::world
};

/// The peer of a recv that takes a message of any rank.
inline constexpr int kAnyPeer = -1;

/// PeerOptions are those of send and recv.
struct PeerOptions {
  int peer = kAnyPeer;  ///< the rank of the world that a message goes to, or comes from; kAnyPeer:
                        ///< comes from any, this one included
  int tag = 0;          ///< not negative; a recv takes messages of its tag alone
  World world{};        ///< see AllreduceOptions::world
};

/// TimelineOptions are those of start_timeline.
struct TimelineOptions {
  bool mark_cycles = false;  ///< show where each batch is cut
};

}  // namespace hvd
#pragma GCC visibility pop
