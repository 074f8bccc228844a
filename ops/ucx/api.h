#pragma once
/// UcxApi is a table of the functions of UCX that are called. The library is opened when it is
/// first asked for, not linked: where nobody uses it, it need not be there, and does nothing at the
/// start of the program. It stays open for as long as the process. Any thread.
// Tested in tests/ops/p2p/transport_test.cc

#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>

#include <string>

/// X(name in the table, name in UCX) for each: those of libucp, and of libucs, which that needs.
// clang-format off
#define HVD_UCX_FUNCTIONS(X) \
  X(get_version, ucp_get_version) X(config_read, ucp_config_read) \
  X(config_modify, ucp_config_modify) X(config_print, ucp_config_print) \
  X(config_release, ucp_config_release) X(init_version, ucp_init_version) \
  X(cleanup, ucp_cleanup) X(worker_create, ucp_worker_create) \
  X(worker_destroy, ucp_worker_destroy) X(worker_get_address, ucp_worker_get_address) \
  X(worker_release_address, ucp_worker_release_address) X(worker_progress, ucp_worker_progress) \
  X(worker_flush_nbx, ucp_worker_flush_nbx) X(ep_create, ucp_ep_create) \
  X(ep_close_nbx, ucp_ep_close_nbx) X(ep_flush_nbx, ucp_ep_flush_nbx) \
  X(tag_send_nbx, ucp_tag_send_nbx) X(tag_recv_nbx, ucp_tag_recv_nbx) \
  X(tag_probe_nb, ucp_tag_probe_nb) X(tag_msg_recv_nbx, ucp_tag_msg_recv_nbx) \
  X(request_check_status, ucp_request_check_status) \
  X(tag_recv_request_test, ucp_tag_recv_request_test) X(request_cancel, ucp_request_cancel) \
  X(request_free, ucp_request_free) X(status_string, ucs_status_string) \
  X(get_global_option, ucs_global_opts_get_value) \
  X(set_global_option, ucs_global_opts_set_value)
// clang-format on

namespace hvd {

struct UcxApi {
#define HVD_FIELD(name, function) decltype(&::function) name;
  HVD_UCX_FUNCTIONS(HVD_FIELD)
#undef HVD_FIELD
};

/// The result of opening UCX.
struct OpenedUcx {
  UcxApi api{};
  std::string problem;  ///< why it cannot be used; empty if it can
};
const OpenedUcx& opened_ucx();

}  // namespace hvd
