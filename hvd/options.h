#pragma once
/// What users say beside their tensors. Values; the fields' defaults are what Horovod's are.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/types.h"

namespace hvd {

/// A group of ranks that has collectives of its own. A value: the global set unless made by `process_set` or `add_process_set`.
class ProcessSet {
 public:
  ProcessSet() = default;
  explicit ProcessSet(int id) : id_(id) {}
  /// 0 for the global set.
  [[nodiscard]] int id() const { return id_; }
  /// This process's rank in the set, -1 if it is not included. Throws NotInitialized before `init()`.
  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  [[nodiscard]] bool included() const;
  /// The global ranks in the set, ascending.
  [[nodiscard]] std::vector<int> ranks() const;
  bool operator==(const ProcessSet&) const = default;

 private:
  int id_ = 0;
};

/// How gradients travel. fp16 and bf16 halve the bytes: values are rounded once to 16 bits, summed in fp32 and rounded once more.
/// The others leave more out, and need a memory of what they left out (error feedback, torch_bindings/compressor.h): they go with
/// DistributedOptimizer and DistributedDataParallel only. Everything else that takes a Compression (allreduce, grouped_allreduce and
/// sparse_allreduce, of tensors and of buffers) has no such memory and refuses them with InvalidArgument, at the call.
class Compression {
 public:
  enum class Kind : std::uint8_t { None, Fp16, Bf16, Int8, TopK, PowerSgd };
  static Compression none() { return {}; }
  static Compression fp16() { return Compression(Kind::Fp16); }
  static Compression bf16() { return Compression(Kind::Bf16); }
  /// A quarter of the bytes of fp32: blocks of 256 values, each with a scale.
  static Compression int8() { return Compression(Kind::Int8); }
  /// Of each tensor, the values of largest magnitude travel: `ratio` of them, 0 < ratio <= 1, and at least one. Throws InvalidArgument.
  static Compression topk(double ratio = 0.01);
  /// A matrix travels as two thin ones of `rank` >= 1 columns. Throws InvalidArgument.
  static Compression powersgd(int rank = 4);

  Compression() = default;
  [[nodiscard]] Kind kind() const { return kind_; }
  /// Of topk; 1 otherwise.
  [[nodiscard]] double ratio() const { return ratio_; }
  /// Of powersgd; 0 otherwise.
  [[nodiscard]] int rank() const { return rank_; }
  /// Whether it leaves out so much that it needs a memory.
  [[nodiscard]] bool needs_memory() const { return kind_ >= Kind::Int8; }
  /// Throws InvalidArgument if it needs a memory; `what`: the call that has none.
  void refuse_memory(std::string_view what) const;
  /// The type in which a tensor of `dtype` travels: 16 bits for Float32 and Float64 with fp16 and bf16, otherwise `dtype`.
  [[nodiscard]] DataType wire_type(DataType dtype) const {
    const bool wide = dtype == DataType::Float32 || dtype == DataType::Float64;
    if ((kind_ != Kind::Fp16 && kind_ != Kind::Bf16) || !wide) return dtype;
    return kind_ == Kind::Fp16 ? DataType::Float16 : DataType::BFloat16;
  }
  bool operator==(const Compression&) const = default;

 private:
  explicit Compression(Kind kind) : kind_(kind) {}
  Kind kind_ = Kind::None;
  int rank_ = 0;
  double ratio_ = 1;
};

/// `prescale_factor` multiplies every rank's input before the reduction, `postscale_factor` the result after it (integers in double,
/// truncated toward zero). An empty name is made up, the same on all ranks that make their calls in the same order.
struct AllreduceOptions {
  std::string name;
  ReduceOp op = ReduceOp::Average;
  double prescale_factor = 1;
  double postscale_factor = 1;
  ProcessSet process_set;
  Compression compression;
};

struct AllgatherOptions {
  std::string name;
  ProcessSet process_set;
};

/// `splits[i]`: rows for rank i of the set; empty: the first dimension is divided evenly.
struct AlltoallBufferOptions {
  std::string name;
  std::vector<std::int64_t> splits;
  ProcessSet process_set;
};

struct ReducescatterOptions {
  std::string name;
  ReduceOp op = ReduceOp::Average;
  double prescale_factor = 1;
  double postscale_factor = 1;
  ProcessSet process_set;
};

/// `root_rank` is global, also within a process set.
struct BroadcastOptions {
  std::string name;
  int root_rank = 0;
  ProcessSet process_set;
};

struct TimelineOptions {
  bool mark_cycles = false;  ///< show where each batch is cut
};

}  // namespace hvd
