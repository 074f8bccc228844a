#pragma once
/// UcxApi is a table of the functions of UCX that are called. The library is opened when it is first asked for, not linked: where nobody
/// uses it, it need not be there, and does nothing at the start of the program. It stays open for as long as the process. Any thread.
// Tested in tests/ops/p2p/transport_test.cc

#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>

#include <string>

namespace hvd {

struct UcxApi {
  decltype(&::ucp_get_version) get_version;
  decltype(&::ucp_config_read) config_read;
  decltype(&::ucp_config_modify) config_modify;
  decltype(&::ucp_config_print) config_print;
  decltype(&::ucp_config_release) config_release;
  decltype(&::ucp_init_version) init_version;
  decltype(&::ucp_cleanup) cleanup;
  decltype(&::ucp_worker_create) worker_create;
  decltype(&::ucp_worker_destroy) worker_destroy;
  decltype(&::ucp_worker_get_address) worker_get_address;
  decltype(&::ucp_worker_release_address) worker_release_address;
  decltype(&::ucp_worker_progress) worker_progress;
  decltype(&::ucp_worker_flush_nbx) worker_flush_nbx;
  decltype(&::ucp_ep_create) ep_create;
  decltype(&::ucp_ep_close_nbx) ep_close_nbx;
  decltype(&::ucp_ep_flush_nbx) ep_flush_nbx;
  decltype(&::ucp_tag_send_nbx) tag_send_nbx;
  decltype(&::ucp_tag_recv_nbx) tag_recv_nbx;
  decltype(&::ucp_tag_probe_nb) tag_probe_nb;
  decltype(&::ucp_tag_msg_recv_nbx) tag_msg_recv_nbx;
  decltype(&::ucp_request_check_status) request_check_status;
  decltype(&::ucp_tag_recv_request_test) tag_recv_request_test;
  decltype(&::ucp_request_cancel) request_cancel;
  decltype(&::ucp_request_free) request_free;
  decltype(&::ucs_status_string) status_string;
  decltype(&::ucs_global_opts_get_value) get_global_option;
  decltype(&::ucs_global_opts_set_value) set_global_option;
};

/// The result of opening UCX.
struct OpenedUcx {
  UcxApi api{};
  std::string problem;  ///< why it cannot be used; empty if it can
};
const OpenedUcx& opened_ucx();

}  // namespace hvd
