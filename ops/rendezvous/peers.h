#pragma once
/// Watches the other ranks of this host while there is no board yet that tells who lives: through a descriptor of each process, which the
/// kernel marks when it ends. Used inside `init()` and at the end of `shutdown()`, in the caller's thread. Owns the descriptors. Never
/// fails: a process that cannot be watched, on another host, in another pid namespace or under a kernel without pidfd_open, is not.
// Tested in tests/system/scripts/process_starts.sh, tests/system/scripts/without_mpi.sh

#include <optional>
#include <string>
#include <vector>

#include "hvd/base/wire.h"
#include "ops/shm/memory/shared_memory.h"

namespace hvd {

class Peers {
 public:
  /// Names the kernel and the pid namespace of this process, where process ids mean the same; empty where it cannot be told.
  static std::string name_of_process_space();
  /// Returns what the others need to know to watch this process.
  static Bytes introduce();
  /// `all`: what each rank said of itself, by rank; `self` is this one.
  void watch(const std::vector<Bytes>& all, int self);
  /// Returns a rank whose process has ended, if there is one.
  [[nodiscard]] std::optional<int> find_dead() const;

 private:
  struct Peer {
    int rank;
    FileDescriptor process;
  };
  std::vector<Peer> peers_;
};

}  // namespace hvd
