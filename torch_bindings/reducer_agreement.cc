// What the ranks of a GradientReducer compare: which round this is, which parameters there are, and what they say where they differ.
#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/agreement.h"
#include "torch_bindings/reducer.h"

namespace hvd {

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
  if (&bucket == &buckets_.front()) history_.end_announcement();
  for (std::size_t i = 0; i < bucket.slots.size(); ++i)
    if (bucket.round.pending()->present_anywhere[i]) bucket.memory.note_result(i);
}

void GradientReducer::announce(Shape layout, std::string said) {
  const std::lock_guard lock(mutex_);
  history_.announce(std::move(layout), std::move(said));
}

void GradientReducer::compare(Shape layout, std::string said) {
  const std::lock_guard lock(mutex_);
  if (options_.process_set.size() == 1) return;
  const at::NoGradGuard no_gradient;
  history_.announce(std::move(layout), std::move(said));
  if (buckets_.empty()) {
    replicas_.begin_round();  // as in any round
    replicas_.end_round();
    compressor_->compare(history_.announced());
    history_.drop_announcement();
    return;
  }
  history_.end_round();  // it is none that a rank could take for its next one
  try {
    reduce(Round::ThrownAway);
  } catch (...) {
    history_.drop_announcement();
    throw;
  }
  history_.undo_round();
  forget();
}

/// Collective over the ranks that have got a Mismatch for the bucket: the error with what is unusual on each of them.
Mismatch GradientReducer::explained(const Mismatch& error, const Bucket& bucket) const {
  std::string mine = history_.peculiarities(weights_.own().has_value());
  if (!mine.empty()) mine = formatted("; rank {} {}", hvd::rank(), mine);
  const std::string all = detail::said_by_all(mine, bucket.name + "/differences", options_.process_set);
  if (all.empty()) return error;
  return Mismatch(formatted("{} (dimensions of 1 in front of a shape tell rounds apart{})", error.what(), all));
}

}  // namespace hvd
