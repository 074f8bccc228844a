#pragma once
/// What this process writes to standard error while the object lives. One at a time.

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <string>

namespace hvd::test {

class StderrText {
 public:
  StderrText() : before_(::dup(STDERR_FILENO)), file_(::memfd_create("stderr", MFD_CLOEXEC)) {
    ::dup2(file_, STDERR_FILENO);
  }
  ~StderrText() {
    ::dup2(before_, STDERR_FILENO);
    ::close(before_);
    ::close(file_);
  }
  StderrText(const StderrText&) = delete;
  StderrText& operator=(const StderrText&) = delete;
  /// So far.
  [[nodiscard]] std::string get() const {
    std::string text;
    std::array<char, 4096> part{};
    for (ssize_t got = 0;
         (got = ::pread(file_, part.data(), part.size(), static_cast<off_t>(text.size()))) > 0;)
      text.append(part.data(), static_cast<std::size_t>(got));
    return text;
  }

 private:
  int before_, file_;
};

}  // namespace hvd::test
