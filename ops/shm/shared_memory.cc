#include "ops/shm/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {
[[noreturn]] void refuse(const char* what) { throw BackendError(formatted("shared memory: {}: {}", what, std::strerror(errno))); }
}  // namespace

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = other.release();
  }
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Mapping::Mapping(int descriptor, std::size_t bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (base == MAP_FAILED) refuse("mmap");
  ::madvise(base, bytes, MADV_DONTDUMP);  // a core file of all ranks' gradients would help nobody
  bytes_ = {static_cast<std::byte*>(base), bytes};
}

Mapping::~Mapping() { ::munmap(bytes_.data(), bytes_.size()); }

FileDescriptor make_shared_file(const char* name, std::size_t bytes) {
  FileDescriptor file(::memfd_create(name, MFD_CLOEXEC));
  if (file.get() < 0) refuse("memfd_create");
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) refuse("ftruncate");
  return file;
}

Ticket ticket_of(const FileDescriptor& file, std::size_t bytes) { return {::getpid(), file.get(), bytes}; }

std::unique_ptr<Mapping> map_ticket(const Ticket& ticket) {
  const std::string path = formatted("/proc/{}/fd/{}", ticket.process, ticket.descriptor);
  const FileDescriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (file.get() < 0) refuse("opening another rank's block");
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) refuse("fstat");
  if (static_cast<std::size_t>(status.st_size) != ticket.bytes) {
    errno = ESTALE;
    refuse("another rank's block has the wrong size");
  }
  return std::make_unique<Mapping>(file.get(), ticket.bytes);
}

}  // namespace hvd
