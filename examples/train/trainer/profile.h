#pragma once
/// A Profile records some training steps: what LibTorch computes on every rank, and hvd's timeline, in one file for Perfetto and
/// chrome://tracing. Collective: all ranks call the same functions at the same steps, in one thread. The clocks of the two are laid on one
/// another by an allreduce that both know. Rank 0 writes the file; it fails by throwing Refused on all ranks.

#include <cstdint>
#include <string>

namespace examples {

class Profile {
 public:
  /// Records `steps` steps, after `skip` that warm up. An empty path: nothing.
  Profile(std::string path, std::int64_t skip, std::int64_t steps);

  /// To be called before each step.
  void before_step();
  /// To be called when training ends; writes the file where that has not been done. Returns whether there is one.
  bool finish();

 private:
  void begin();
  void end();

  std::string path_;
  std::int64_t skip_, steps_;
  std::int64_t done_ = 0;  ///< steps begun
  bool running_ = false, written_ = false;
  std::int64_t marked_ = 0;  ///< when the common allreduce was over on this rank, in nanoseconds since 1970
};

}  // namespace examples
