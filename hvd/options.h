#pragma once
/// Room card: what users say beside their tensors. Values; the fields' defaults are what Horovod's are.

#include <memory>
#include <optional>
#include <string>
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
class Compression {
 public:
  enum class Kind : std::uint8_t { None, Fp16, Bf16 };
  static Compression none() { return {}; }
  static Compression fp16() { return Compression(Kind::Fp16); }
  static Compression bf16() { return Compression(Kind::Bf16); }

  Compression() = default;
  [[nodiscard]] Kind kind() const { return kind_; }
  /// The type in which a tensor of `dtype` travels: 16 bits for Float32 and Float64 if compressed, otherwise `dtype`.
  [[nodiscard]] DataType wire_type(DataType dtype) const {
    const bool wide = dtype == DataType::Float32 || dtype == DataType::Float64;
    if (kind_ == Kind::None || !wide) return dtype;
    return kind_ == Kind::Fp16 ? DataType::Float16 : DataType::BFloat16;
  }
  bool operator==(const Compression&) const = default;

 private:
  explicit Compression(Kind kind) : kind_(kind) {}
  Kind kind_ = Kind::None;
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
