#include "examples/train/trainer/collectively.h"

#include <hvd/torch.h>
#include <torch/torch.h>

#include <optional>

namespace examples {

void collectively(const std::function<void()>& work) {
  std::optional<std::string> failure;
  try {
    work();
  } catch (const std::exception& error) {
    failure = words_of(error);
  }
  const auto mine = torch::tensor(failure ? hvd::rank() : hvd::size(), torch::kInt64);
  const auto first = hvd::allreduce(mine, {.op = hvd::ReduceOp::Min}).item<std::int64_t>();
  if (first < hvd::size()) throw Refused(first == hvd::rank() ? *failure : std::string());
}

void fail_on_all(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    throw Refused(hvd::rank() == 0 ? words_of(error) : std::string());
  }
}

void on_rank_zero(const std::function<void()>& work) {
  collectively([&] {
    if (hvd::rank() == 0) work();
  });
}

std::string words_of(const std::exception& error) {
  if (const auto* in_worker = dynamic_cast<const torch::data::WorkerException*>(&error)) {
    try {
      std::rethrow_exception(in_worker->original_exception);
    } catch (const std::exception& original) {
      return words_of(original);
    }
  }
  if (const auto* torch_error = dynamic_cast<const c10::Error*>(&error))
    return torch_error->what_without_backtrace();
  return error.what();
}

}  // namespace examples
