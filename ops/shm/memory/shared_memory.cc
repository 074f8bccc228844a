#include "ops/shm/memory/shared_memory.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {
[[noreturn]] void refuse(const std::string& what) {
  throw BackendError(formatted("shared memory: {}: {}", what, std::strerror(errno)));
}

/// A block's number stands behind it in the file, where nobody writes.
using Number = std::uint64_t;

Number read_number(const FileDescriptor& file, std::size_t bytes) {
  Number number = 0;
  if (::pread(file.get(), &number, sizeof number, static_cast<off_t>(bytes)) != sizeof number)
    refuse("reading a block's number");
  return number;
}

/// The blocks that are mapped now, for children that are forked.
class Mapped {
 public:
  static Mapped& instance() {
    static auto* const mapped = [] {
      ::pthread_atfork([] { instance().hold(true); }, [] { instance().hold(false); },
                       [] { instance().become_private(); });
      return new Mapped;
    }();
    return *mapped;
  }
  void add(std::span<std::byte> bytes, int descriptor) {
    const std::lock_guard lock(mutex_);
    places_.push_back({bytes, descriptor});
  }
  void remove(std::span<std::byte> bytes) {
    const std::lock_guard lock(mutex_);
    std::erase_if(places_, [&](const Place& place) { return place.bytes.data() == bytes.data(); });
  }

 private:
  struct Place {
    std::span<std::byte> bytes;
    int descriptor;
  };
  /// A fork() must not come while another thread changes the list. This thread may do so where a
  /// signal handler forks.
  void hold(bool take) {
    if (is_inside_library()) return;
    take ? mutex_.lock() : mutex_.unlock();
  }
  /// Makes the child's memory its own. Where there is no room for a copy, its use of the memory
  /// ends it, and touches nobody else's.
  void become_private() noexcept {
    for (const Place& place : places_) {
      void* const base = place.bytes.data();
      const std::size_t bytes = place.bytes.size();
      if (::mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
                 place.descriptor, 0) == MAP_FAILED)
        ::mmap(base, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
               0);
      ::madvise(base, bytes, MADV_DONTDUMP);
    }
    hold(false);
  }

  std::mutex mutex_;
  std::vector<Place> places_;
};

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

Mapping::Mapping(FileDescriptor file, std::size_t bytes) : file_(std::move(file)) {
  void* base =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_.get(), 0);
  if (base == MAP_FAILED)
    refuse(
        formatted("mmap of {} bytes (the addresses that a process may use are limited by 'ulimit "
                  "-v'; HVD_ARENA_BYTES sets how many are reserved)",
                  bytes));
  ::madvise(base, bytes, MADV_DONTDUMP);  // a core file of all ranks' gradients would help nobody
  bytes_ = {static_cast<std::byte*>(base), bytes};
  Mapped::instance().add(bytes_, file_.get());
}

Mapping::~Mapping() {
  if (!made_.still_here()) return;  // the addresses may be somebody else's by now
  Mapped::instance().remove(bytes_);
  ::munmap(bytes_.data(), bytes_.size());
}

FileDescriptor make_shared_file(const char* name, std::size_t bytes) {
  FileDescriptor file(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) refuse("memfd_create");
  if (::ftruncate(file.get(), static_cast<off_t>(bytes + sizeof(Number))) != 0) refuse("ftruncate");
  Number number = 0;
  if (::getrandom(&number, sizeof number, 0) != sizeof number) refuse("getrandom");
  if (::pwrite(file.get(), &number, sizeof number, static_cast<off_t>(bytes)) != sizeof number)
    refuse("writing a block's number");
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    refuse("sealing a block");
  return file;
}

Ticket ticket_of(const FileDescriptor& file, std::size_t bytes) {
  return {::getpid(), file.get(), bytes, read_number(file, bytes)};
}

std::unique_ptr<Mapping> map_file(const FileDescriptor& file, std::size_t bytes) {
  FileDescriptor copy(::fcntl(file.get(), F_DUPFD_CLOEXEC, 0));
  if (copy.get() < 0) refuse("another descriptor of a block");
  return std::make_unique<Mapping>(std::move(copy), bytes);
}

std::unique_ptr<Mapping> map_ticket(const Ticket& ticket) {
  const std::string path = formatted("/proc/{}/fd/{}", ticket.process, ticket.descriptor);
  FileDescriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (file.get() < 0) refuse("opening another rank's block");
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) refuse("fstat");
  const std::size_t bytes = static_cast<std::size_t>(status.st_size) - sizeof(Number);
  if (ticket.bytes != 0 && (bytes != ticket.bytes || read_number(file, bytes) != ticket.number)) {
    errno = ESTALE;
    refuse("another rank's block is not where it should be; is that rank in another container?");
  }
  return std::make_unique<Mapping>(std::move(file), bytes);
}

}  // namespace hvd
