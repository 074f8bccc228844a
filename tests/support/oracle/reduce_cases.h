#pragma once
/// What the reduction kernel is tried with, on a GPU (tests/gpu/shared_reduce_gpu_test.cc) and
/// thread by thread on the host (tests/ops/gpu/kernels/shared_reduce_test.cc): every supported type
/// and operation x numbers of ranks x scales x counts around the kernel's boundaries x alignments x
/// in place or into one output. What must come out is computed by `reduce_job_on_host`. Any thread.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/gpu/host_kernels.h"
#include "tests/support/oracle/copy_cases.h"

namespace hvd::gpu::test {

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

  std::string text() const;
};

/// Every rank's tensors in one block, on a 256-byte boundary; behind them the outputs that are no
/// inputs.
class ReduceMemory {
 public:
  explicit ReduceMemory(const ReduceCase& tried);

  std::vector<std::byte>& bytes() { return bytes_; }

  /// The job on these bytes, or on a copy of them at `base`. The lists live until the next call.
  ReduceJob job(const ReduceCase& tried, std::byte* base = nullptr);

  /// What differs in content, but for the payloads of NaNs, first of all.
  std::optional<std::string> difference(const ReduceCase& tried, ReduceMemory& expected);
  void replace(const std::vector<std::byte>& bytes) { bytes_ = bytes, aligned_.clear(); }

 private:
  /// The bytes on a boundary, copied there at first use; copies of this object start from the bytes
  /// again.
  std::byte* aligned();
  std::byte* boundary() {
    return aligned_.data() + (256 - reinterpret_cast<std::uintptr_t>(aligned_.data()) % 256) % 256;
  }
  const std::byte* current() { return aligned_.empty() ? bytes_.data() : boundary(); }

  std::size_t element_;
  std::size_t stride_ = 0;
  std::vector<std::size_t> places_;
  std::vector<std::byte> bytes_, aligned_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

void for_each_reduce_case(const std::function<void(const ReduceCase&)>& use);

}  // namespace hvd::gpu::test
