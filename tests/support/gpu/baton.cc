#include "tests/support/gpu/baton.h"

#include <algorithm>
#include <utility>

namespace hvd::gpu::test {

void Baton::choose() {
  std::vector<int> running;
  for (std::size_t rank = 0; rank < states_.size(); ++rank)
    if (states_[rank] == State::Running) running.push_back(static_cast<int>(rank));
  holder_ = running.empty() ? -1 : random_.pick(running);
  changed_.notify_all();
}

void Baton::await(std::unique_lock<std::mutex>& lock, int rank) {
  changed_.wait(lock, [&] { return holder_ == rank; });
}

void Baton::begin(int rank) {
  std::unique_lock lock(mutex_);
  states_[static_cast<std::size_t>(rank)] = State::Running;
  if (std::find(states_.begin(), states_.end(), State::Absent) == states_.end()) choose();
  await(lock, rank);
}

void Baton::pass(int rank) {
  std::unique_lock lock(mutex_);
  if (states_[static_cast<std::size_t>(rank)] != State::Running) return;
  choose();
  await(lock, rank);
}

void Baton::leave(int rank) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(states_[static_cast<std::size_t>(rank)], State::Left) == State::Running &&
      holder_ == rank)
    choose();
}

GpuApi taking_turns(GpuApi table, const std::function<void()>& pass) {
  table.event_query = [pass, inner = std::move(table.event_query)](CudaEvent* event) {
    const CudaCode code = inner(event);
    if (code == CudaCode::NotReady) pass();
    return code;
  };
  table.comm_get_async_error = [pass, inner = std::move(table.comm_get_async_error)](
                                   NcclComm* comm, NcclCode* state) {
    const NcclCode code = inner(comm, state);
    if (code == NcclCode::Success && *state == NcclCode::InProgress) pass();
    return code;
  };
  return table;
}

}  // namespace hvd::gpu::test
