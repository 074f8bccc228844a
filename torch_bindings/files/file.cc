#include "torch_bindings/files/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>

#include "hvd/base/process.h"
#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd::detail {

namespace {

// of bytes, as the kernel takes no more than 2 GiB
constexpr std::size_t kAtOnce = std::size_t{1} << 30;

[[noreturn]] void fail(const std::string& what, const std::string& path) {
  throw CheckpointError(formatted("{} {}: {}", what, path, std::strerror(errno)));
}

std::string folder_of(const std::string& path) {
  const auto parent = std::filesystem::path(path).parent_path();
  return parent.empty() ? "." : parent.string();
}

std::string number(const std::string& path, int n) {
  return n == 0 ? path : formatted("{}.{}", path, n);
}

/// Makes the folder of a file.
void make_folder_of(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(folder_of(path), error);
  if (error)
    throw CheckpointError(
        formatted("cannot make the folder {}: {}", folder_of(path), error.message()));
}

/// Returns the path under which this host writes new files, one after the other.
std::string name_beside(const std::string& path) {
  return formatted("{}.new.{}", path, host_name());
}

/// Opens the file of that name for this process alone, and empties it: a process that was killed
/// may have left it. Returns null where another one writes it.
std::unique_ptr<const File> take_over(const std::string& name) {
  try {
    auto file = std::make_unique<const File>(name, O_WRONLY | O_CREAT | O_NOFOLLOW);
    if (file->claim()) return file;
  } catch (const CheckpointError&) {  // of another user
  }
  return nullptr;
}

/// The newest stays where it is and gets a second name, until the new one takes the first.
void move_back(const std::string& path, int keep) {
  for (int n = keep - 1; n >= 2; --n)
    if (::rename(number(path, n - 1).c_str(), number(path, n).c_str()) != 0 && errno != ENOENT)
      fail("cannot rename", number(path, n - 1));
  if (::link(path.c_str(), number(path, 1).c_str()) == 0 || errno == ENOENT) return;
  if (errno == EEXIST) {
    ::unlink(number(path, 1).c_str());
    if (::link(path.c_str(), number(path, 1).c_str()) == 0) return;
  }
  // a file system without links
  if (::rename(path.c_str(), number(path, 1).c_str()) != 0) fail("cannot rename", path);
}

}  // namespace

File::File(std::string path, int flags)
    : path_(std::move(path)), descriptor_(::open(path_.c_str(), flags | O_CLOEXEC, 0644)) {
  if (descriptor_ < 0) fail("cannot open", path_);
}

File::~File() { ::close(descriptor_); }

void File::write(const void* data, std::size_t bytes) const {
  for (std::size_t done = 0; done < bytes;) {
    const auto wrote = ::write(descriptor_, static_cast<const char*>(data) + done,
                               std::min(bytes - done, kAtOnce));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) fail("cannot write", path_);
    done += static_cast<std::size_t>(wrote);
  }
}

void File::make_durable() const {
  // EINVAL: a file system that has no use for it
  if (::fsync(descriptor_) != 0 && errno != EINVAL) fail("cannot write", path_);
}

std::uint64_t File::size() const {
  struct stat about {};
  if (::fstat(descriptor_, &about) != 0) fail("cannot read", path_);
  return static_cast<std::uint64_t>(about.st_size);
}

void File::read(std::uint64_t from, void* to, std::size_t bytes) const {
  for (std::size_t done = 0; done < bytes;) {
    const auto got = ::pread(descriptor_, static_cast<char*>(to) + done,
                             std::min(bytes - done, kAtOnce), static_cast<off_t>(from + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("cannot read", path_);
    if (got == 0) throw CheckpointError(formatted("{} ends after {} bytes", path_, from + done));
    done += static_cast<std::size_t>(got);
  }
}

bool File::claim() const {
  while (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return false;
    if (errno != EINTR) break;  // a file system without locks
  }
  // who had the lock before may have put the file in the place of another, under its name
  struct stat own {};
  struct stat named {};
  if (::fstat(descriptor_, &own) != 0 || ::lstat(path_.c_str(), &named) != 0) return false;
  if (own.st_dev != named.st_dev || own.st_ino != named.st_ino) return false;
  if (::ftruncate(descriptor_, 0) != 0) fail("cannot write", path_);
  return true;
}

FreshFile::FreshFile(std::string path) : path_(std::move(path)), fresh_(name_beside(path_)) {
  make_folder_of(path_);
  file_ = take_over(fresh_);
  if (file_) return;
  fresh_ += formatted(".{:08x}", std::random_device{}());
  file_ = std::make_unique<const File>(fresh_, O_WRONLY | O_CREAT | O_EXCL);
}

FreshFile::~FreshFile() {
  if (!replaced_) ::unlink(fresh_.c_str());
}

void FreshFile::replace(int keep) {
  file_->make_durable();
  if (keep > 1) move_back(path_, keep);
  if (::rename(fresh_.c_str(), path_.c_str()) != 0) fail("cannot write", path_);
  replaced_ = true;
  File(folder_of(path_), O_RDONLY | O_DIRECTORY).make_durable();
}

}  // namespace hvd::detail
