#pragma once
/// PeerMemory reads ordinary memory of the other ranks of the domain: one copy, made by the kernel
/// (process_vm_readv), instead of one into shared memory and one out of it. Memory is only ever
/// read: what a rank of a failed world still does can then harm nobody. Ranks that are threads of
/// one process read each other's memory as their own. Any thread; it keeps no state but who is who.
/// It fails with BackendError that carries the system's words.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "hvd/base/visible.h"

namespace hvd {

class PeerMemory {
 public:
  /// `processes`: of the ranks of the domain, by index; empty where all are of this process.
  /// `self`: this rank's index. `usable`: all ranks of the domain may read one another.
  PeerMemory(std::vector<pid_t> processes, int self, bool usable);

  /// Returns whether the other ranks may read what lies there: not where the system keeps them off
  /// (memory of a device, a secret).
  [[nodiscard]] bool can_be_read(const void* memory, std::size_t bytes) const;
  /// Returns whether addresses of the rank with this index are addresses here.
  [[nodiscard]] bool is_here(int index) const { return index == self_ || processes_.empty(); }
  /// Copies `bytes` at `from`, an address of the rank with this index, to `to`. Returns false if
  /// that rank's process has ended.
  bool read(int index, void* to, const std::byte* from, std::size_t bytes) const;

 private:
  const std::vector<pid_t> processes_;
  const int self_;
  const bool usable_;
};

/// Measures, for some 100 us, and returns whether the system copies memory that is in the cache so
/// much more slowly than this process does itself that two copies by way of shared memory are
/// faster: it is asked for each page, which costs some processors more than the copy.
HVD_BETWEEN_LIBRARIES bool is_slow_to_read();

/// Returns why this process may not read a word of process `other` at `address`, where it should
/// find `expected`; empty if it may.
std::string why_unreadable(pid_t other, const std::uint64_t* address, std::uint64_t expected);

}  // namespace hvd
