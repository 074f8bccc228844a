// The order in which backward gives a GradientReducer its gradients, and how its ranks come to know one order: it is that of the set's
// first rank, and travels beside a round.
#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "torch_bindings/collectives.h"
#include "torch_bindings/reducer.h"

namespace hvd {

/// On the host the order of the parameters does: what is reduced early there takes cores that backward needs.
bool GradientReducer::deals_as_gradients_come() const {
  if (!std::holds_alternative<std::monostate>(options_.groups)) return false;
  if (options_.process_set.size() == 1 || !options_.process_set.included()) return false;
  if (options_.shard_optimizer_state || options_.share_parameters) return false;
  const auto wanted = [this](const Slot& slot) { return taking_ == Taking::Together || !slot.named.parameter.is_cpu(); };
  return std::any_of(slots_.begin(), slots_.end(), wanted);
}

void GradientReducer::note_arrival(const Slot& slot) {
  if (order_.empty() && as_gradients_come_) arrivals_.push_back(static_cast<std::size_t>(&slot - slots_.data()));
}

/// Which parameters are dealt first: the order that was learned; before that the last, whose gradients backward gives first as a rule.
std::vector<std::size_t> GradientReducer::order_of_dealing() const {
  if (!order_.empty()) return order_;
  std::vector<std::size_t> reversed(slots_.size());
  for (std::size_t i = 0; i < reversed.size(); ++i) reversed[i] = reversed.size() - 1 - i;
  return reversed;
}

/// Beside each round until the order is known: ranks are in the same rounds, whatever they make of them. Of one that failed here, it waits
/// for the next. The last number counts the ranks: one that has joined does not hear of it.
void GradientReducer::submit_order(Round round) {
  if (!as_gradients_come_ || !order_.empty() || keeper_ != nullptr || ordering_) return;
  at::Tensor places = at::zeros({static_cast<std::int64_t>(slots_.size()) + 1}, at::kLong);
  auto* next = places.mutable_data_ptr<std::int64_t>();
  next[slots_.size()] = 1;
  if (options_.process_set.rank() == 0 && round == Round::Kept && !arrivals_.empty()) {
    std::vector<bool> listed(slots_.size(), false);
    const auto list = [&](std::size_t slot) {
      if (!listed[slot]) *next++ = static_cast<std::int64_t>(slot) + 1;
      listed[slot] = true;
    };
    for (const auto slot : arrivals_) list(slot);
    for (const auto slot : order_of_dealing()) list(slot);
  }
  ordering_ = allreduce_async(places, {.name = name_ + "/order of arrival", .op = ReduceOp::Sum, .process_set = options_.process_set});
}

/// Takes it over, where the first rank had one and all ranks hear of it. Buckets are dealt anew when the next round begins: by then users
/// have let go of the gradients, as a rule, and their memory is there for others.
void GradientReducer::learn_order() {
  if (!ordering_) return;
  const at::Tensor places = std::exchange(ordering_, std::nullopt)->wait();
  const auto* said = places.const_data_ptr<std::int64_t>();
  if (said[slots_.size()] != options_.process_set.size() || said[0] == 0) return;
  const auto before = order_of_dealing();
  for (std::size_t i = 0; i < slots_.size(); ++i) order_.push_back(static_cast<std::size_t>(said[i] - 1));
  deal_anew_ = order_ != before;
}

}  // namespace hvd
