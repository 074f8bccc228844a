#include "ops/ucx/api.h"

#include <dlfcn.h>

#include <array>
#include <csignal>

#include "hvd/base/text.h"

namespace hvd {

namespace {

constexpr const char* kLibrary = "libucp.so.0";

/// UCX takes the handlers of faults when it is loaded. They are the program's.
class FaultHandlersKept {
 public:
  FaultHandlersKept() {
    for (std::size_t i = 0; i < kSignals.size(); ++i)
      ::sigaction(kSignals[i], nullptr, &before_[i]);
  }
  ~FaultHandlersKept() {
    for (std::size_t i = 0; i < kSignals.size(); ++i)
      ::sigaction(kSignals[i], &before_[i], nullptr);
  }
  FaultHandlersKept(const FaultHandlersKept&) = delete;
  FaultHandlersKept& operator=(const FaultHandlersKept&) = delete;

 private:
  static constexpr std::array kSignals{SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_{};
};

template <class Function>
void find(void* library, const char* name, Function& function, std::string& problem) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr && problem.empty())
    problem = formatted("{} has no {}: it is older than UCX 1.10", kLibrary, name);
}

OpenedUcx open() {
  OpenedUcx opened;
  const FaultHandlersKept kept;
  void* const library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const words = ::dlerror();
    opened.problem =
        formatted("UCX cannot be opened: {} (Debian and Ubuntu: apt-get install libucx0)",
                  words != nullptr ? words : kLibrary);
    return opened;
  }
  UcxApi& api = opened.api;
#define HVD_GET(name, function) find(library, #function, api.name, opened.problem);
  HVD_UCX_FUNCTIONS(HVD_GET)
#undef HVD_GET
  return opened;
}

}  // namespace

const OpenedUcx& opened_ucx() {
  static const OpenedUcx opened = open();
  return opened;
}

}  // namespace hvd
