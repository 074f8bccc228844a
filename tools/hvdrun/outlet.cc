#include "tools/hvdrun/outlet.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace hvdrun {

namespace {

/// A pipe that can be written takes so much without a wait (PIPE_BUF).
constexpr std::size_t kPiece = 4096;

bool is_socket(int descriptor) {
  struct stat status {};
  return ::fstat(descriptor, &status) == 0 && S_ISSOCK(status.st_mode);
}

}  // namespace

Outlet::Outlet(int descriptor) : descriptor_(descriptor), is_socket_(is_socket(descriptor)) {}

void Outlet::write_some() {
  while (!is_empty()) {
    pollfd one{descriptor_, POLLOUT, 0};
    if (::poll(&one, 1, 0) <= 0) break;
    const char* const next = waiting_.data() + begin_;
    const std::size_t length = std::min(kPiece, waiting_.size() - begin_);
    const auto written = is_socket_ ? ::send(descriptor_, next, length, MSG_NOSIGNAL | MSG_DONTWAIT) : ::write(descriptor_, next, length);
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
