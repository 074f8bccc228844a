#include "ops/ucx/worker.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

using namespace std::chrono_literals;

constexpr auto kGraceOfLost = 1s;
constexpr auto kPatienceAtEnd = 1s;
constexpr const char* kLogLevel = "LOG_LEVEL";
constexpr unsigned kMajor = 1;
constexpr unsigned kLastMinorWithPuts = 13;
constexpr unsigned kFirstMinorWithNegation = 11;  // of transports: "^sm"
// of progress at once, so that who has much to receive comes to what it has received
constexpr int kMostSteps = 8;

struct Version {
  unsigned major = 0, minor = 0, release = 0;
};

/// UCX 1.13 may end the process when a rank dies in the middle of a put over TCP ("tcp_ep.c:939
/// Assertion `ep->flags & UCT_TCP_EP_FLAG_PUT_TX_WAITING_ACK' failed"). This is its name for
/// UCX_TCP_PUT_ENABLE; later versions have others.
void avoid_puts(const UcxApi& api, const Version& version, ucp_config_t* config) {
  if (version.major == kMajor && version.minor <= kLastMinorWithPuts)
    static_cast<void>(api.config_modify(config, "PUT_ENABLE", "n"));
}

/// Returns whether neither the environment nor UCX's file says which transports may be used.
bool is_free_to_choose(const UcxApi& api, const ucp_config_t* config) {
  char* text = nullptr;
  std::size_t bytes = 0;
  FILE* const printed = ::open_memstream(&text, &bytes);
  if (printed == nullptr) return false;
  api.config_print(config, printed, nullptr, UCS_CONFIG_PRINT_CONFIG);
  const bool is_closed = std::fclose(printed) == 0;
  const bool is_free =
      is_closed && std::string_view(text, bytes).find("UCX_TLS=all\n") != std::string_view::npos;
  std::free(text);
  return is_free;
}

/// Each worker would take 4 MiB of /dev/shm, and not begin where there is no room, for transports
/// that no connection with error handling uses. The 64 MiB of a container would do for fifteen.
void avoid_shared_memory(const UcxApi& api, const Version& version, ucp_config_t* config) {
  const bool can_leave_out = version.major > kMajor || version.minor >= kFirstMinorWithNegation;
  if (can_leave_out && is_free_to_choose(api, config))
    static_cast<void>(api.config_modify(config, "TLS", "^sm"));
}

}  // namespace

UcxWorker::UcxWorker(const UcxApi& api, int rank, int size)
    : api_(api), rank_(rank), peers_(static_cast<std::size_t>(size)) {
  for (Peer& peer : peers_) peer.worker = this;
  ucp_config_t* config = nullptr;
  check(api_.config_read(nullptr, nullptr, &config), "ucp_config_read");
  Version version;
  api_.get_version(&version.major, &version.minor, &version.release);
  avoid_puts(api_, version, config);
  avoid_shared_memory(api_, version, config);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED |
                      UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
  params.features = UCP_FEATURE_TAG;
  params.mt_workers_shared = 0;
  params.estimated_num_eps = peers_.size();
  const ucs_status_t status =
      api_.init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  api_.config_release(config);
  check(status, "ucp_init");
  ucp_worker_params_t of_worker{};
  of_worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS;
  of_worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  of_worker.flags = UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK;
  const ucs_status_t made = api_.worker_create(context_, &of_worker, &worker_);
  if (made != UCS_OK) api_.cleanup(context_);
  check(made, "ucp_worker_create");
  be_quiet();
}

void UcxWorker::be_quiet() {
  std::array<char, 32> level{};
  if (api_.get_global_option(kLogLevel, level.data(), level.size()) != UCS_OK) return;
  const std::string_view said = level.data();
  if (said == "WARN" || said == "warn") api_.set_global_option(kLogLevel, "fatal");
}

UcxWorker::~UcxWorker() {
  close_endpoints();
  api_.worker_destroy(worker_);
  api_.cleanup(context_);
}

void UcxWorker::keep(std::shared_ptr<void> memory) noexcept {
  try {
    kept_.push_back(std::move(memory));
  } catch (const std::bad_alloc&) {
    static_cast<void>(new (std::nothrow) std::shared_ptr<void>(std::move(memory)));  // for ever
  }
}

void UcxWorker::close_endpoints() noexcept {
  if (flushing_ != nullptr) api_.request_free(flushing_);
  std::vector<ucs_status_ptr_t> closing;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  for (Peer& peer : peers_) {
    if (peer.endpoint == nullptr) continue;
    const ucs_status_ptr_t request = api_.ep_close_nbx(peer.endpoint, &param);
    if (UCS_PTR_IS_PTR(request)) closing.push_back(request);
  }
  const auto deadline = Clock::now() + kPatienceAtEnd;
  for (const ucs_status_ptr_t request : closing) {
    while (api_.request_check_status(request) == UCS_INPROGRESS && Clock::now() < deadline)
      api_.worker_progress(worker_);
    api_.request_free(request);
  }
}

Bytes UcxWorker::address() const {
  ucp_address_t* address = nullptr;
  std::size_t length = 0;
  check(api_.worker_get_address(worker_, &address, &length), "ucp_worker_get_address");
  const auto* const begin = reinterpret_cast<const std::byte*>(address);
  Bytes bytes(begin, begin + length);
  api_.worker_release_address(worker_, address);
  return bytes;
}

void UcxWorker::learn(std::vector<Bytes> addresses) {
  for (std::size_t rank = 0; rank < peers_.size(); ++rank)
    peers_[rank].address = std::move(addresses.at(rank));
}

ucp_ep_h UcxWorker::endpoint(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.is_lost) return nullptr;
  if (peer.endpoint != nullptr) return peer.endpoint;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_USER_DATA;
  params.address = reinterpret_cast<const ucp_address_t*>(peer.address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &UcxWorker::lose_endpoint;
  params.user_data = &peer;
  const ucs_status_t status = api_.ep_create(worker_, &params, &peer.endpoint);
  if (status != UCS_OK) {
    peer.endpoint = nullptr;
    throw BackendError(
        formatted("UCX finds no way from rank {} to rank {}: {}; UCX_NET_DEVICES and UCX_TLS must "
                  "allow one that both have",
                  rank_, rank, api_.status_string(status)));
  }
  return peer.endpoint;
}

void UcxWorker::progress() {
  for (int step = 0; step < kMostSteps && api_.worker_progress(worker_) != 0; ++step) continue;
}

bool UcxWorker::flush() {
  if (has_abandoned_) {
    progress();
    return true;
  }
  if (flushing_ == nullptr) {
    const ucp_request_param_t param{};
    flushing_ = api_.worker_flush_nbx(worker_, &param);
    // done, or a connection is lost, over which nothing will leave
    if (!UCS_PTR_IS_PTR(flushing_)) {
      flushing_ = nullptr;
      return true;
    }
  }
  progress();
  if (api_.request_check_status(flushing_) == UCS_INPROGRESS) return false;
  api_.request_free(std::exchange(flushing_, nullptr));
  return true;
}

void UcxWorker::lose_endpoint(void* peer, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  Peer& lost = *static_cast<Peer*>(peer);
  lost.worker->lose(lost, status);
}

void UcxWorker::lose(int rank, ucs_status_t status) {
  lose(peers_[static_cast<std::size_t>(rank)], status);
}

void UcxWorker::lose(Peer& peer, ucs_status_t status) {
  if (peer.is_lost) return;
  peer.is_lost = any_lost_ = true;
  peer.status = status;
  peer.since = Clock::now();
}

bool UcxWorker::is_given_up(int rank) const {
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  return peer.is_lost && Clock::now() >= peer.since + kGraceOfLost;
}

void UcxWorker::require(int rank) {
  if (!any_lost_ || !is_given_up(rank)) return;
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  peer.is_told = true;
  throw RankFailed(
      formatted("rank {} has ended, or cannot be reached any more by rank {}: UCX says '{}'", rank,
                rank_, api_.status_string(peer.status)));
}

void UcxWorker::require_all() {
  if (!any_lost_) return;
  for (std::size_t rank = 0; rank < peers_.size(); ++rank)
    if (!peers_[rank].is_told) require(static_cast<int>(rank));
}

void UcxWorker::check(ucs_status_t status, std::string_view call) const {
  if (status != UCS_OK)
    throw BackendError(formatted("{} on rank {}: {}", call, rank_, api_.status_string(status)));
}

}  // namespace hvd
