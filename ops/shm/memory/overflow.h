#pragma once
/// Blocks for staging that the arena has no room for: in segments of shared memory that are made
/// when they are needed and stay, each as large as all before together. A block is known by a word
/// that any rank of the domain can follow: the owner's descriptor of the segment, and where the
/// block begins in it; whoever follows it first maps the segment through /proc.
///
///     bits 36 to 58   descriptor of the segment in the process of its owner
///     bits  0 to 35   where the block begins, in units of 64 bytes
///
/// Any thread. Owns the segments, and the mappings of the others'. Fails with BackendError carrying
/// the system's words.
// Tested in tests/ops/shm/arena_test.cc, tests/ops/shm/shared_memory_test.cc

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ops/shm/memory/arena.h"
#include "ops/shm/memory/shared_memory.h"

namespace hvd {

class Overflow {
 public:
  /// `processes`: of the ranks of the domain, by index; empty where all are of this process.
  /// `self`: this rank's index. `has_failed`: whether the world has. Then nothing is handed out a
  /// second time, as in the arena.
  Overflow(std::vector<pid_t> processes, int self, std::function<bool()> has_failed = {});

  /// Returns the word of a block of this rank's own, of at least `bytes`.
  std::uint64_t allocate(std::size_t bytes);
  void free(std::uint64_t word) noexcept;
  /// Returns where the block of the rank with this index is, in this process.
  [[nodiscard]] std::byte* address(int index, std::uint64_t word);

 private:
  struct Segment {
    FileDescriptor file;
    std::unique_ptr<Mapping> mapping;
    std::unique_ptr<Arena> blocks;
  };
  Segment& add_segment(std::size_t bytes);
  [[nodiscard]] Segment& segment_of(std::uint64_t word);

  const std::vector<pid_t> processes_;
  const int self_;
  const std::function<bool()> has_failed_;
  std::mutex mutex_;
  std::vector<Segment> segments_;
  // by the owner's index and its descriptor
  std::map<std::pair<int, int>, std::unique_ptr<Mapping>> others_;
};

}  // namespace hvd
