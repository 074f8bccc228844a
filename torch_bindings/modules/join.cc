#include "torch_bindings/modules/join.h"

#include <c10/util/ScopeExit.h>
#include <torch/torch.h>

#include <exception>
#include <utility>

#include "hvd/base/log.h"
#include "hvd/base/text.h"
#include "torch_bindings/optimizer/optimizer.h"
#include "torch_bindings/optimizer/optimizer_parts.h"
#include "torch_bindings/optimizer/parameters.h"
#include "torch_bindings/reducer/join_rounds.h"
#include "torch_bindings/reducer/reducer.h"

namespace hvd {

namespace detail {

std::shared_ptr<JoinRounds> begin_rounds(GradientReducer& reducer, const JoinOptions& options) {
  if (reducer.join_rounds() != nullptr)
    throw InvalidArgument(
        formatted("{}: join() while the guard of an earlier join() lives", reducer.name()));
  if (reducer.compressor() != nullptr && reducer.process_set().size() > 1)
    throw InvalidArgument(
        formatted("{}: join() with a compression that has a memory, which needs all ranks at each "
                  "step: use none, fp16 or bf16",
                  reducer.name()));
  auto rounds = std::make_shared<JoinRounds>(reducer.name() + "/join", reducer.process_set(),
                                             options.divide_by_initial_world_size);
  reducer.set_join(rounds);
  return rounds;
}

}  // namespace detail

JoinGuard::JoinGuard(Parts parts)
    : parts_(std::make_unique<Parts>(std::move(parts))), exceptions_(std::uncaught_exceptions()) {}

JoinGuard::JoinGuard(JoinGuard&& other) noexcept = default;

JoinGuard::~JoinGuard() noexcept(false) {
  if (!parts_) return;
  if (std::uncaught_exceptions() == exceptions_) {
    end();
    return;
  }
  try {
    finish(true);
  } catch (const std::exception& error) {
    log(LogLevel::Debug, "at the end of a guard that an exception leaves: {}", error.what());
  }
}

void JoinGuard::end() {
  if (parts_) finish(false);
}

void JoinGuard::finish(bool failed) {
  const auto parts = std::exchange(parts_, nullptr);
  const WorldScope scope(parts->world, WorldScope::kAlsoGlobal);
  const auto& rounds = *parts->rounds;
  const auto at_end = c10::make_scope_exit([&] { parts->end(); });
  if (rounds.process_set().size() == 1) return;
  const bool first_to_fail = failed && !rounds.has_thrown();
  Handle<at::Tensor> notice;
  if (first_to_fail) {
    log(LogLevel::Error,
        "{}: this rank leaves the guard by an exception, and waits for the others to notice",
        rounds.name());
    notice = rounds.announce_failure();
  }
  const int last = hvd::join(rounds.process_set());
  if (first_to_fail) notice.wait();
  rounds.end(first_to_fail);
  parts->share(last);
}

JoinGuard DistributedOptimizer::join() { return join(JoinOptions{}); }

JoinGuard DistributedOptimizer::join(const JoinOptions& options) {
  detail::OptimizerParts& parts = this->parts().reconciled();
  const ProcessSet set = parts.options.process_set;
  if (set.size() > 1 && is_sharded())
    throw InvalidArgument(
        "join: the optimizer's state is sharded, and a rank that has ended could not update its "
        "share");
  if (parts.deltas)
    throw InvalidArgument(
        "join: Adasum combines what every rank's own step changed; a rank that has ended makes "
        "none");
  if (parts.is_local()) return {};
  auto rounds = detail::begin_rounds(parts.reducers.first(), options);
  for (const auto& reducer : parts.reducers.all()) reducer->set_join(rounds);
  const std::weak_ptr<detail::OptimizerParts> held = parts_;
  const auto share = [held, set](int last) {
    const auto self = held.lock();
    if (!self) throw InvalidArgument("join: the optimizer has ended before its guard");
    // At once, so that ranks which differ in what has been added all hear of it.
    std::vector<std::pair<std::string, at::Tensor>> all;
    for (const auto& reducer : self->reducers.all())
      for (auto& [name, parameter] : reducer->parameters())
        all.emplace_back(reducer.get() == &self->reducers.first()
                             ? name
                             : formatted("{}: {}", reducer->name(), name),
                         parameter);
    broadcast_parameters(all, last, set);
    broadcast_optimizer_state(*self->wrapper, last, set);
  };
  const auto end = [held] {
    const auto self = held.lock();
    if (!self) return;
    for (const auto& reducer : self->reducers.all()) {
      reducer->set_join(nullptr);
      reducer->begin_step();
    }
  };
  return JoinGuard({std::move(rounds), share, end});
}

}  // namespace hvd
