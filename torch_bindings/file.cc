#include "torch_bindings/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "hvd/base/text.h"
#include "torch_bindings/checkpoint_error.h"

namespace hvd::detail {

namespace {

[[noreturn]] void fail(const std::string& what, const std::string& path) {
  throw CheckpointError(formatted("{} {}: {}", what, path, std::strerror(errno)));
}

class File {
 public:
  File(std::string path, int flags) : path_(std::move(path)), descriptor_(::open(path_.c_str(), flags | O_CLOEXEC, 0644)) {
    if (descriptor_ < 0) fail("cannot open", path_);
  }
  ~File() { ::close(descriptor_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void write(const std::string& text) const {
    for (std::size_t done = 0; done < text.size();) {
      const auto wrote = ::write(descriptor_, text.data() + done, std::min<std::size_t>(text.size() - done, std::size_t{1} << 30));
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote < 0) fail("cannot write", path_);
      done += static_cast<std::size_t>(wrote);
    }
  }
  /// Survives a crash of the machine.
  void make_durable() const {
    if (::fsync(descriptor_) != 0 && errno != EINVAL) fail("cannot write", path_);  // EINVAL: a file system that has no use for it
  }
  [[nodiscard]] std::string read() const {
    struct stat about {};
    if (::fstat(descriptor_, &about) != 0) fail("cannot read", path_);
    std::string text(static_cast<std::size_t>(about.st_size), '\0');
    for (std::size_t done = 0; done < text.size();) {
      const auto got = ::read(descriptor_, text.data() + done, std::min<std::size_t>(text.size() - done, std::size_t{1} << 30));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail("cannot read", path_);
      if (got == 0) text.resize(done);
      done += static_cast<std::size_t>(got);
    }
    return text;
  }

 private:
  std::string path_;
  int descriptor_;
};

std::string folder_of(const std::string& path) {
  const auto parent = std::filesystem::path(path).parent_path();
  return parent.empty() ? "." : parent.string();
}

std::string number(const std::string& path, int n) { return n == 0 ? path : formatted("{}.{}", path, n); }

/// The newest stays where it is and gets a second name, until the new one takes the first.
void move_back(const std::string& path, int keep) {
  for (int n = keep - 1; n >= 2; --n)
    if (::rename(number(path, n - 1).c_str(), number(path, n).c_str()) != 0 && errno != ENOENT) fail("cannot rename", number(path, n - 1));
  if (::link(path.c_str(), number(path, 1).c_str()) == 0 || errno == ENOENT) return;
  if (errno == EEXIST) {
    ::unlink(number(path, 1).c_str());
    if (::link(path.c_str(), number(path, 1).c_str()) == 0) return;
  }
  if (::rename(path.c_str(), number(path, 1).c_str()) != 0) fail("cannot rename", path);  // a file system without links
}

}  // namespace

void replace_file(const std::string& path, const std::string& text, int keep) {
  std::error_code error;
  std::filesystem::create_directories(folder_of(path), error);
  if (error) throw CheckpointError(formatted("cannot make the folder {}: {}", folder_of(path), error.message()));
  const std::string fresh = formatted("{}.new.{}", path, ::getpid());
  try {
    const File file(fresh, O_WRONLY | O_CREAT | O_TRUNC);
    file.write(text);
    file.make_durable();
    if (keep > 1) move_back(path, keep);
    if (::rename(fresh.c_str(), path.c_str()) != 0) fail("cannot write", path);
    File(folder_of(path), O_RDONLY | O_DIRECTORY).make_durable();
  } catch (...) {
    ::unlink(fresh.c_str());
    throw;
  }
}

std::string read_whole_file(const std::string& path) { return File(path, O_RDONLY).read(); }

}  // namespace hvd::detail
