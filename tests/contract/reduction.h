#pragma once
/// A tensor that is to be reduced: its memory, the call's argument and the expected result, for any
/// operation that reduces.

#include "tests/contract/form.h"

namespace hvd::contract {

struct Asked {
  DataType dtype = DataType::Float32;
  ReduceOp op = ReduceOp::Sum;
  Form form;
  /// The ranks whose values count; of those that are not in `present` zeros do.
  std::vector<int> ranks;
  std::vector<int> absent = {};
  bool exact = false;  ///< values whose sums no order and no rounding can change
};

class Reducing {
 public:
  Reducing(Context& context, const Asked& asked, Shape shape, std::uint64_t salt);
  [[nodiscard]] Tensor tensor() const { return tensor_; }
  [[nodiscard]] const Expected& expected() const { return expected_; }
  [[nodiscard]] const Shape& shape() const { return tensor_.shape; }
  [[nodiscard]] Block result() const;
  /// Of an allreduce: the output is as expected, the input untouched, and nothing was written
  /// behind them.
  void check(Context& context) const;
  /// Of what makes its own output: the input is untouched.
  void check_input(Context& context) const;

 private:
  Memory input_, output_;
  Block before_;
  Expected expected_;
  Tensor tensor_;
  bool in_place_;
};

/// The call of an allreduce, without tensors.
Call allreduce_call(const Context& context, const Asked& asked, std::string name);
/// Runs the calls as the form says: one after the other, or all in flight.
std::vector<Results> run_all(Context& context, const Form& form, const std::vector<Call>& calls);
/// Runs persistent operations once, in orders that differ between ranks, as the form says.
std::vector<Results> run_again(Context& context, const Form& form,
                               const std::vector<Again>& operations);
/// One unnamed allreduce of the whole world: it matches its partners' only if all ranks have
/// numbered alike.
void check_unnamed(Context& context);

}  // namespace hvd::contract
