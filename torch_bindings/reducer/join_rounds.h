#pragma once
/// JoinRounds is what ranks that still train tell one another at each step while guards of a join()
/// (join.h) are alive. One thread at a time; collective where it says so. Throws RankFailed, on all
/// ranks, where a rank has left its guard by an exception.
// Tested in tests/torch_bindings/what_if/what_if_uneven_test.cc

#include <ATen/core/Tensor.h>

#include <string>

#include "hvd/hvd.h"

namespace hvd::detail {

class JoinRounds {
 public:
  JoinRounds(std::string name, ProcessSet process_set, bool divide_by_initial_world_size);

  /// Collective over the ranks that still train. Returns the first of them.
  [[nodiscard]] int first_training() const;
  /// Collective over them, after a reduction. Returns what an average over all ranks is to be
  /// multiplied by. Throws RankFailed if a rank has left its guard by an exception.
  double end_round();
  /// The other ranks' next round throws.
  [[nodiscard]] Handle<at::Tensor> announce_failure() const;
  /// Collective over all. Throws RankFailed if `failed` on any of them.
  void end(bool failed) const;
  [[nodiscard]] bool has_thrown() const { return has_thrown_; }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const ProcessSet& process_set() const { return process_set_; }

 private:
  [[nodiscard]] at::Tensor mark(unsigned char value) const;
  void refuse_failed(const at::Tensor& marks) const;

  const std::string name_;
  const ProcessSet process_set_;
  const bool divide_by_initial_world_size_;
  bool has_thrown_ = false;
};

}  // namespace hvd::detail
