// What the ranks of a GradientReducer compare: which round this is, which parameters there are, and what they say where they differ.
#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/agreement.h"
#include "torch_bindings/reducer.h"

namespace hvd {

namespace {

/// As many rounds between two steps are told apart.
constexpr std::size_t kMostRoundsTold = 8;

}  // namespace

/// As many dimensions of 1 are put in front of a shape: none in the first round after a step.
std::size_t GradientReducer::kind_of_round() const { return std::min(rounds_, kMostRoundsTold) + (unstepped_ ? kMostRoundsTold + 1 : 0); }

void GradientReducer::wait_for(Bucket& bucket, Round round) {
  const auto running = engine();
  for (bool again = false;; again = true) {
    try {
      running->wait(*bucket.round.pending());
      break;
    } catch (const Deadlock&) {  // the others are somewhere else, and answer no question
      put_given_back(bucket);
      throw;
    } catch (const Mismatch& error) {
      put_given_back(bucket);
      // The ranks may differ just in who knows that a gradient is sparse. Then all know now, and try again.
      if (again || options_.sparse_as_dense || !learn_sparse(bucket)) throw explained(error, bucket);
      if (weights_.are_asked() && bucket.round.pending() == weights_.pending()) ask_for_weights();
      submit(bucket, round, true);
    }
  }
  if (&bucket == &buckets_.front() && !announcing_.empty() && std::exchange(announcing_, {}) == announced_) announced_.clear();
  for (std::size_t i = 0; i < bucket.slots.size(); ++i)
    if (bucket.round.pending()->present_anywhere[i]) bucket.memory.note_result(i);
}

void GradientReducer::announce(Shape layout, std::string said) {
  const std::lock_guard lock(mutex_);
  announced_ = std::move(layout);
  said_ = std::move(said);
}

void GradientReducer::compare(Shape layout, std::string said) {
  const std::lock_guard lock(mutex_);
  if (options_.process_set.size() == 1) return;
  const at::NoGradGuard no_gradient;
  announced_ = std::move(layout);
  said_ = std::move(said);
  if (buckets_.empty()) {
    replicas_.begin_round();  // as in any round
    replicas_.end_round();
    compressor_->compare(announced_);
    announced_.clear();
    return;
  }
  ++rounds_;  // it is none that a rank could take for its next one
  try {
    reduce(Round::ThrownAway);
  } catch (...) {
    announced_.clear();
    throw;
  }
  --rounds_;
  forget();
}

/// What is unusual about this rank's round, so that other ranks may be in another one; empty: nothing is.
std::string GradientReducer::peculiarities() const {
  std::vector<std::string> said;
  if (!announced_.empty()) {
    said.push_back(said_.empty() ? formatted("has changed the parameters or groups of {}", name_) : said_);
  } else if (rounds_ > 0) {
    said.emplace_back("has reduced gradients since its last step() or zero_grad()");
  }
  if (weights_.own()) said.emplace_back("has called set_weight() for this step");
  if (!refused_.empty()) {
    said.push_back(formatted("has not made its last step, as the gradient of '{}' was changed while on its way", refused_));
  } else if (unstepped_) {
    said.emplace_back("has thrown its last gradients away without a step()");
  }
  return joined(said, ", and ");
}

/// Collective over the ranks that have got a Mismatch for the bucket: the error with what is unusual on each of them.
Mismatch GradientReducer::explained(const Mismatch& error, const Bucket& bucket) const {
  std::string mine = peculiarities();
  if (!mine.empty()) mine = formatted("; rank {} {}", hvd::rank(), mine);
  const std::string all = detail::said_by_all(mine, bucket.name + "/differences", options_.process_set);
  if (all.empty()) return error;
  return Mismatch(formatted("{} (dimensions of 1 in front of a shape tell rounds apart{})", error.what(), all));
}

}  // namespace hvd
