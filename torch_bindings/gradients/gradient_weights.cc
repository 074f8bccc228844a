#include "torch_bindings/gradients/gradient_weights.h"

#include <torch/torch.h>

#include "hvd/api/request.h"
#include "hvd/base/text.h"
#include "hvd/engine/engine.h"

namespace hvd {

void detail::check_weight(double weight) {
  constexpr double kMost = 9007199254740992;  // so that a sum is finite
  if (!(weight >= 0 && weight <= kMost))
    throw InvalidArgument(
        formatted("set_weight({}): it must be a number of rows or tokens, from 0 to 2^53", weight));
}

void GradientWeights::ask(const std::string& name, bool scattered) {
  if (!own_) return;
  round_ = std::make_shared<Round>();
  const std::int64_t rows = scattered ? process_set_.size() : 1;  // one for each rank
  round_->own.assign(static_cast<std::size_t>(rows), *own_);
  Submission submission =
      request(scattered ? OpKind::Reducescatter : OpKind::Allreduce,
              AllreduceOptions{.name = name, .op = ReduceOp::Sum, .process_set = process_set_});
  submission.tensors.push_back({.input = round_->own.data(),
                                .output = &round_->all,
                                .dtype = DataType::Float64,
                                .shape = {rows}});
  submission.keep_alive = std::shared_ptr<Round>(round_);
  round_->pending = engine()->submit(std::move(submission), After::Return);
}

bool GradientWeights::learn() {
  if (!round_) return true;
  try {
    engine()->wait(*round_->pending);
  } catch (const Mismatch&) {
    return false;
  }
  factor_ = round_->all > 0 ? round_->own.front() / round_->all * process_set_.size() : 0;
  return true;
}

at::Tensor GradientWeights::weighed(const at::Tensor& values) const {
  if (factor_ == 0) return at::zeros_like(values);
  return factor_ == 1 ? values : values * factor_;
}

}  // namespace hvd
