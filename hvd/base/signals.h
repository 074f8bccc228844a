#pragma once
/// SignalsKeptOff leaves signals to the program's own threads while it lives: a thread that is started meanwhile takes none but those of
/// its own faults. Every thread of the library is started under it: a signal that the program's threads have blocked would else run its
/// handler there, and an exit() in it would wait for that very thread.
// Tested in tests/system/scripts/process_exits.sh

#include <pthread.h>

#include <csignal>

namespace hvd {

class SignalsKeptOff {
 public:
  SignalsKeptOff() {
    sigset_t all;
    ::sigfillset(&all);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT, SIGPROF}) ::sigdelset(&all, own);
    ::pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsKeptOff() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsKeptOff(const SignalsKeptOff&) = delete;
  SignalsKeptOff& operator=(const SignalsKeptOff&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace hvd
