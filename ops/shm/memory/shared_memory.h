#pragma once
/// This is anonymous shared memory (memfd): it does not depend on the size of /dev/shm, and is gone
/// with the last process that has it, however that ends; it is sealed, so that no process can
/// change its size under the others. A block is made by one rank, which says where it is
/// (`Ticket`); others of the same host map it through /proc, and know it by a random number behind
/// its end: in another container the same process id and descriptor may well be a block of the same
/// size. A child that is forked from a rank has private copies of the blocks instead: it reads what
/// was there, and what it writes is its own. It fails with BackendError carrying the system's
/// words.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "hvd/base/process.h"

namespace hvd {

/// The place at which other processes of the host find a block, while its maker keeps it open.
struct Ticket {
  pid_t process = 0;
  int descriptor = -1;
  std::size_t bytes = 0;  ///< of `map_ticket`: 0 takes the block's own size, whichever block it is
  std::uint64_t number = 0;  ///< its own
};

/// A file descriptor, closed by its owner.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int descriptor) : descriptor_(descriptor) {}
  FileDescriptor(FileDescriptor&& other) noexcept : descriptor_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  [[nodiscard]] int get() const { return descriptor_; }
  int release() {
    const int descriptor = descriptor_;
    descriptor_ = -1;
    return descriptor;
  }

 private:
  int descriptor_ = -1;
};

/// A mapping, unmapped by its owner. Pages take memory when they are first written.
class Mapping {
 public:
  /// Keeps `file` open, for children that are forked.
  Mapping(FileDescriptor file, std::size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }

 private:
  FileDescriptor file_;
  std::span<std::byte> bytes_;
  MadeHere made_;
};

/// Makes a zeroed block of `bytes`, which stays of that size.
FileDescriptor make_shared_file(const char* name, std::size_t bytes);
Ticket ticket_of(const FileDescriptor& file, std::size_t bytes);
/// Maps a block of this process; `file` stays the caller's.
std::unique_ptr<Mapping> map_file(const FileDescriptor& file, std::size_t bytes);
/// Maps a block of this process or another one of the host.
std::unique_ptr<Mapping> map_ticket(const Ticket& ticket);

}  // namespace hvd
