#pragma once
/// This is anonymous shared memory (memfd): it does not depend on the size of /dev/shm, and is gone with the last process that has it,
/// however that ends. A block is made by one rank, which says where it is (`Ticket`); others of the same host map it through /proc. It
/// fails with BackendError carrying the system's words.

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <span>

namespace hvd {

/// Where a block can be found by other processes of the host, while its maker keeps it open.
struct Ticket {
  pid_t process = 0;
  int descriptor = -1;
  std::size_t bytes = 0;
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
  Mapping(int descriptor, std::size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

/// Makes a zeroed block of `bytes`.
FileDescriptor make_shared_file(const char* name, std::size_t bytes);
Ticket ticket_of(const FileDescriptor& file, std::size_t bytes);
/// Maps a block of this process or another one of the host.
std::unique_ptr<Mapping> map_ticket(const Ticket& ticket);

}  // namespace hvd
