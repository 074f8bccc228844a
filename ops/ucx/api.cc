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
    for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], nullptr, &before_[i]);
  }
  ~FaultHandlersKept() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
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
  if (function == nullptr && problem.empty()) problem = formatted("{} has no {}: it is older than UCX 1.10", kLibrary, name);
}

OpenedUcx open() {
  OpenedUcx opened;
  const FaultHandlersKept kept;
  void* const library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const words = ::dlerror();
    opened.problem =
        formatted("UCX cannot be opened: {} (Debian and Ubuntu: apt-get install libucx0)", words != nullptr ? words : kLibrary);
    return opened;
  }
  UcxApi& api = opened.api;
  const auto get = [&](const char* name, auto& function) { find(library, name, function, opened.problem); };
  get("ucp_get_version", api.get_version);
  get("ucp_config_read", api.config_read);
  get("ucp_config_modify", api.config_modify);
  get("ucp_config_print", api.config_print);
  get("ucp_config_release", api.config_release);
  get("ucp_init_version", api.init_version);
  get("ucp_cleanup", api.cleanup);
  get("ucp_worker_create", api.worker_create);
  get("ucp_worker_destroy", api.worker_destroy);
  get("ucp_worker_get_address", api.worker_get_address);
  get("ucp_worker_release_address", api.worker_release_address);
  get("ucp_worker_progress", api.worker_progress);
  get("ucp_worker_flush_nbx", api.worker_flush_nbx);
  get("ucp_ep_create", api.ep_create);
  get("ucp_ep_close_nbx", api.ep_close_nbx);
  get("ucp_ep_flush_nbx", api.ep_flush_nbx);
  get("ucp_tag_send_nbx", api.tag_send_nbx);
  get("ucp_tag_recv_nbx", api.tag_recv_nbx);
  get("ucp_tag_probe_nb", api.tag_probe_nb);
  get("ucp_tag_msg_recv_nbx", api.tag_msg_recv_nbx);
  get("ucp_request_check_status", api.request_check_status);
  get("ucp_tag_recv_request_test", api.tag_recv_request_test);
  get("ucp_request_cancel", api.request_cancel);
  get("ucp_request_free", api.request_free);
  // Those of libucs, which libucp needs.
  get("ucs_status_string", api.status_string);
  get("ucs_global_opts_get_value", api.get_global_option);
  get("ucs_global_opts_set_value", api.set_global_option);
  return opened;
}

}  // namespace

const OpenedUcx& opened_ucx() {
  static const OpenedUcx opened = open();
  return opened;
}

}  // namespace hvd
