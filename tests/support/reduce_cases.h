#pragma once
/// Room card: what the reduction kernel is tried with, on a GPU (tests/gpu/shared_reduce_gpu_test.cc) and thread by thread on the host
/// (tests/unit/shared_reduce_test.cc): every supported type and operation x numbers of ranks x scales x counts around the kernel's
/// boundaries x alignments x in place or into one output. What must come out is computed by `reduce_job_on_host`. Any thread.

#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/support/copy_cases.h"
#include "tests/support/host_reduce.h"

namespace hvd::nccl::test {

struct ReduceCase {
  DataType dtype = DataType::Float32;
  ReduceOp op = ReduceOp::Sum;
  int ranks = 1;
  double prescale = 1;
  double postscale = 1;
  bool zeros = false;
  bool in_place = true;  ///< otherwise into one output
  std::size_t skew = 0;  ///< elements behind a 256-byte boundary
  std::vector<std::int64_t> counts;

  std::string text() const {
    return std::string(name_of(dtype)) + " " + std::string(name_of(op)) + ", " + std::to_string(ranks) + " ranks, scales " +
           std::to_string(prescale) + " and " + std::to_string(postscale) + (zeros ? ", zeros" : "") + (in_place ? ", in place" : "") +
           ", skew " + std::to_string(skew) + ", " + std::to_string(counts.size()) + " items";
  }
};

/// Every rank's tensors in one block, on a 256-byte boundary; behind them the outputs that are no inputs.
class ReduceMemory {
 public:
  explicit ReduceMemory(const ReduceCase& tried) : element_(element_bytes(tried.dtype)) {
    std::size_t bytes = 0;
    for (const auto count : tried.counts) {
      places_.push_back(bytes + tried.skew * element_);
      bytes += (static_cast<std::size_t>(count) * element_ + tried.skew * element_ + 255) / 256 * 256;
    }
    stride_ = bytes + 256;
    std::minstd_rand random(static_cast<unsigned>(stride_) + static_cast<unsigned>(tried.ranks));
    const auto blocks = static_cast<std::size_t>(tried.ranks) + 1;
    for (std::size_t block = 0; block < blocks; ++block) {
      const auto some = random_values(tried.dtype, stride_, random);
      bytes_.insert(bytes_.end(), some.begin(), some.end());
    }
  }

  std::vector<std::byte>& bytes() { return bytes_; }

  /// The job on these bytes, or on a copy of them at `base`. The lists live until the next call.
  ReduceJob job(const ReduceCase& tried, std::byte* base = nullptr) {
    if (base == nullptr) base = aligned();
    inputs_.clear();
    outputs_.clear();
    const auto ranks = static_cast<std::size_t>(tried.ranks);
    for (const std::size_t place : places_) {
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        inputs_.push_back(base + rank * stride_ + place);
        if (tried.in_place) outputs_.push_back(base + rank * stride_ + place);
      }
      if (!tried.in_place) outputs_.push_back(base + ranks * stride_ + place);
    }
    ReduceJob made;
    made.inputs = inputs_;
    made.outputs = outputs_;
    made.counts = tried.counts;
    made.ins = tried.ranks;
    made.outs = tried.in_place ? tried.ranks : 1;
    made.dtype = tried.dtype;
    made.op = tried.op;
    made.prescale = tried.prescale;
    made.postscale = tried.postscale;
    made.divisor = tried.ranks + (tried.zeros ? 1 : 0);
    made.zeros = tried.zeros;
    return made;
  }

  /// What differs in content, but for the payloads of NaNs, first of all.
  std::optional<std::string> difference(const ReduceCase& tried, ReduceMemory& expected) {
    const DataType type = tried.dtype == DataType::Complex64    ? DataType::Float32
                          : tried.dtype == DataType::Complex128 ? DataType::Float64
                                                                : tried.dtype;
    const std::byte* mine = current();
    const std::byte* right = expected.current();
    const std::size_t size = element_bytes(type);
    for (std::size_t at = 0; at + size <= bytes_.size(); at += size) {
      if (std::memcmp(mine + at, right + at, size) == 0) continue;
      if (!is_integer(type) && type != DataType::Bool && is_nan(type, mine + at) && is_nan(type, right + at)) continue;
      return tried.text() + ": byte " + std::to_string(at) + " of " + std::to_string(stride_) + " per rank";
    }
    return std::nullopt;
  }
  void replace(const std::vector<std::byte>& bytes) { bytes_ = bytes, aligned_.clear(); }

 private:
  static bool is_nan(DataType type, const std::byte* at) {
    bool nan = false;
    with_host_type(type, [&](auto tag) {
      using T = typename decltype(tag)::Native;
      T value;
      std::memcpy(&value, at, sizeof value);
      if constexpr (!kInteger<T>) nan = std::isnan(static_cast<double>(value));
    });
    return nan;
  }
  /// The bytes on a boundary, copied there at first use; copies of this object start from the bytes again.
  std::byte* aligned() {
    if (aligned_.empty()) {
      aligned_.resize(bytes_.size() + 256);
      std::memcpy(boundary(), bytes_.data(), bytes_.size());
    }
    return boundary();
  }
  std::byte* boundary() { return aligned_.data() + (256 - reinterpret_cast<std::uintptr_t>(aligned_.data()) % 256) % 256; }
  const std::byte* current() { return aligned_.empty() ? bytes_.data() : boundary(); }

  std::size_t element_;
  std::size_t stride_ = 0;
  std::vector<std::size_t> places_;
  std::vector<std::byte> bytes_, aligned_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

inline void for_each_reduce_case(const std::function<void(const ReduceCase&)>& use) {
  using enum DataType;
  const std::vector<std::int64_t> few{1, 0, 7, 8, 9, 63, 64, 65, 1025, 4099};
  const std::vector<std::int64_t> many(300, 3);  // more than one launch holds
  for (const DataType dtype : {UInt8, Int8, Int16, Int32, Int64, Float16, BFloat16, Float32, Float64, Bool, Complex64, Complex128}) {
    for (const ReduceOp op : {ReduceOp::Average, ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product}) {
      if (!reduce_supported(dtype, op)) continue;
      for (const int ranks : {1, 2, 4, 7}) {
        ReduceCase tried{.dtype = dtype, .op = op, .ranks = ranks, .counts = few};
        use(tried);
        tried.in_place = false;
        tried.skew = 1;
        tried.prescale = 0.5;
        use(tried);
        tried.skew = 0;
        tried.prescale = 1;
        tried.postscale = 3;
        tried.zeros = true;
        use(tried);
      }
    }
    const ReduceOp plain = dtype == Bool ? ReduceOp::Max : ReduceOp::Sum;
    use({.dtype = dtype, .op = plain, .ranks = 5, .counts = many});
    use({.dtype = dtype, .op = plain, .ranks = 3, .counts = {3 * 16384 + 5}});
  }
}

}  // namespace hvd::nccl::test
