#include "examples/train/trainer/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <stdexcept>

namespace examples {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& what, const fs::path& file) {
  throw std::runtime_error(what + " " + file.string() + ": " + std::strerror(errno) + "; name a place that can be written to");
}

/// Makes a file, or the entries of a folder, survive a crash of the machine.
void make_durable(const fs::path& path, int flags) {
  const int descriptor = ::open(path.c_str(), flags | O_CLOEXEC);
  if (descriptor < 0) fail("cannot open", path);
  const bool good = ::fsync(descriptor) == 0 || errno == EINVAL;  // EINVAL: a file system that has no use for it
  const int reason = errno;
  ::close(descriptor);
  errno = reason;
  if (!good) fail("cannot write", path);
}

fs::path folder_of(const fs::path& file) { return file.has_parent_path() ? file.parent_path() : fs::path("."); }

}  // namespace

void replace_file(const fs::path& file, const std::function<void(const std::string& name)>& write) {
  const fs::path fresh = file.string() + ".new." + std::to_string(::getpid());
  try {
    write(fresh.string());
    make_durable(fresh, O_RDONLY);
    if (::rename(fresh.c_str(), file.c_str()) != 0) fail("cannot write", file);
    make_durable(folder_of(file), O_RDONLY | O_DIRECTORY);
  } catch (...) {
    ::unlink(fresh.c_str());
    throw;
  }
}

void check_writable(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    errno = error.value();
    fail("cannot make the folder", folder);
  }
  const fs::path probe = folder / (".writable." + std::to_string(::getpid()));
  const int descriptor = ::open(probe.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (descriptor < 0) fail("cannot write into the folder", folder);
  ::close(descriptor);
  ::unlink(probe.c_str());
}

}  // namespace examples
