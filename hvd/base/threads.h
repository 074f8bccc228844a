#pragma once
/// These say which signals the library's own threads take, and which core they run on. Nothing here
/// keeps a state; the list of cores is `Config::thread_affinity`.
// Tested in tests/hvd/base/affinity_test.cc, tests/system/scripts/process_exits.sh

#include <pthread.h>

#include <csignal>
#include <string>
#include <vector>

namespace hvd {

/// SignalsKeptOff leaves signals to the program's own threads while it lives: a thread that is
/// started meanwhile takes none but those of its own faults. Every thread of the library is started
/// under it: a signal that the program's threads have blocked would else run its handler there, and
/// an exit() in it would wait for that very thread.
class SignalsKeptOff {
 public:
  SignalsKeptOff() {
    sigset_t all;
    ::sigfillset(&all);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT, SIGPROF})
      ::sigdelset(&all, own);
    ::pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsKeptOff() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsKeptOff(const SignalsKeptOff&) = delete;
  SignalsKeptOff& operator=(const SignalsKeptOff&) = delete;

 private:
  sigset_t before_{};
};

/// Returns why the thread of `local_rank` cannot be pinned, naming what is allowed; empty if it
/// can, or if `cores` is empty.
std::string affinity_problem(const std::vector<int>& cores, int local_rank, int local_size);
/// Pins the calling thread to `cores[local_rank]`; does nothing where `cores` is empty, and only
/// warns where the system refuses.
void pin_this_thread(const std::vector<int>& cores, int local_rank);

}  // namespace hvd
