#include "examples/hvdrun/outlet.h"

#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace hvdrun {

namespace {

/// A pipe that can be written takes so much without a wait (PIPE_BUF).
constexpr std::size_t kPiece = 4096;

}  // namespace

void Outlet::write_some() {
  while (!is_empty()) {
    pollfd one{descriptor_, POLLOUT, 0};
    if (::poll(&one, 1, 0) <= 0) break;
    const auto written = ::write(descriptor_, waiting_.data() + begin_, std::min(kPiece, waiting_.size() - begin_));
    if (written < 0 && (errno == EINTR || errno == EAGAIN)) break;
    // What nobody can take any more is lost, as it would be for the rank itself.
    begin_ = written < 0 ? waiting_.size() : begin_ + static_cast<std::size_t>(written);
  }
  if (!is_empty() && begin_ < kMost) return;
  waiting_.erase(0, begin_);
  begin_ = 0;
}

bool Outlet::is_same_file(const Outlet& other) const {
  struct stat own {};
  struct stat others {};
  return ::fstat(descriptor_, &own) == 0 && ::fstat(other.descriptor_, &others) == 0 && own.st_dev == others.st_dev &&
         own.st_ino == others.st_ino;
}

}  // namespace hvdrun
