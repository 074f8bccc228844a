#include "tools/hvdrun/signals.h"

#include <fmt/format.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace hvdrun {

Signals::Signals() {
  ::signal(SIGCHLD, SIG_DFL);  // where the caller ignores it no end of a rank would be told
  ::sigemptyset(&heard_);
  ::sigaddset(&heard_, SIGCHLD);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGTSTP}) {
    struct sigaction now {};
    if (::sigaction(signal, nullptr, &now) == 0 && now.sa_handler != SIG_IGN) ::sigaddset(&heard_, signal);
  }
  ::sigprocmask(SIG_BLOCK, &heard_, nullptr);
  descriptor_ = ::signalfd(-1, &heard_, SFD_NONBLOCK | SFD_CLOEXEC);
  if (descriptor_ < 0) throw std::runtime_error(fmt::format("signalfd: {}", std::strerror(errno)));
}

Signals::~Signals() { ::close(descriptor_); }

int Signals::next() const {
  signalfd_siginfo info{};
  while (::read(descriptor_, &info, sizeof info) == static_cast<ssize_t>(sizeof info))
    if (info.ssi_signo != SIGCHLD) return static_cast<int>(info.ssi_signo);
  return 0;
}

}  // namespace hvdrun
