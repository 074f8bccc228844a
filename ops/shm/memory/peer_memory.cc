#include "ops/shm/memory/peer_memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "hvd/routes.h"

namespace hvd {

namespace {

/// Returns the bytes that were copied, or -1 with errno.
ssize_t copy_from(pid_t process, void* to, const void* from, std::size_t bytes) {
  const iovec here{to, bytes};
  const iovec there{const_cast<void*>(from), bytes};
  return ::process_vm_readv(process, &here, 1, &there, 1, 0);
}

}  // namespace

PeerMemory::PeerMemory(std::vector<pid_t> processes, int self, bool usable)
    : processes_(std::move(processes)), self_(self), usable_(usable) {}

bool PeerMemory::can_be_read(const void* memory, std::size_t bytes) const {
  if (!usable_ || bytes == 0) return false;
  if (processes_.size() < 2) return true;
  // The system treats this process's own memory as another's when it is asked for in this way.
  const auto* const first = static_cast<const std::byte*>(memory);
  std::byte byte{};
  return copy_from(::getpid(), &byte, first, 1) == 1 &&
         copy_from(::getpid(), &byte, first + bytes - 1, 1) == 1;
}

bool PeerMemory::read(int index, void* to, const std::byte* from, std::size_t bytes) const {
  if (bytes == 0) return true;
  if (is_here(index)) {
    if (to != from) std::memcpy(to, from, bytes);
    return true;
  }
  const pid_t process = processes_.at(static_cast<std::size_t>(index));
  auto* place = static_cast<std::byte*>(to);
  while (bytes > 0) {
    const ssize_t copied = copy_from(process, place, from, bytes);
    if (copied < 0 && errno == EINTR) continue;
    if (copied < 0 && errno == ESRCH) return false;
    if (copied <= 0)
      throw BackendError(
          formatted("shared memory: reading memory of the rank in process {}: {}; "
                    "HVD_DIRECT_COPIES=off does without",
                    process, std::strerror(copied < 0 ? errno : EFAULT)));
    place += copied;
    from += copied;
    bytes -= static_cast<std::size_t>(copied);
  }
  return true;
}

bool is_slow_to_read() {
  constexpr std::size_t kBytes = 128 << 10;
  constexpr int kTries = 8;
  const std::vector<std::byte> from(kBytes, std::byte{1});
  std::vector<std::byte> to(kBytes, std::byte{2});
  const auto best_of = [&](const auto& copy) {
    auto best = std::chrono::steady_clock::duration::max();
    for (int i = 0; i < kTries; ++i) {
      const auto before = std::chrono::steady_clock::now();
      copy();
      best = std::min(best, std::chrono::steady_clock::now() - before);
    }
    return best;
  };
  const auto by_system =
      best_of([&] { static_cast<void>(copy_from(::getpid(), to.data(), from.data(), kBytes)); });
  const auto by_itself = best_of([&] { std::memcpy(to.data(), from.data(), kBytes); });
  return routes::is_slow(by_system, by_itself);
}

std::string why_unreadable(pid_t other, const std::uint64_t* address, std::uint64_t expected) {
  std::uint64_t word = 0;
  const ssize_t copied = copy_from(other, &word, address, sizeof word);
  if (copied < 0) return formatted("process_vm_readv: {}", std::strerror(errno));
  if (static_cast<std::size_t>(copied) != sizeof word || word != expected)
    return "process_vm_readv reads something else";
  return {};
}

}  // namespace hvd
