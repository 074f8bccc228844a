#include "ops/ucx/point_to_point.h"

#include <limits>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

// UCX's tag: 8 bits for the channel, 24 for the sender, 32 for the message's tag.
constexpr unsigned kSenderShift = 32;
constexpr unsigned kChannelShift = 56;
constexpr std::uint64_t kSenderMask = std::uint64_t{0xffffff} << kSenderShift;

std::uint64_t ucx_tag(std::uint64_t channel, int sender, int tag) {
  return channel << kChannelShift | static_cast<std::uint64_t>(sender) << kSenderShift |
         static_cast<std::uint32_t>(tag);
}

ucp_request_param_t host_memory() {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  return param;
}

}  // namespace

int UcxPointToPoint::largest_tag() const { return std::numeric_limits<int>::max(); }

Posted UcxPointToPoint::post(const Operation& operation, int peer, bool is_send) {
  if (unused_.empty()) {
    unused_.push_back(operations_.size());
    operations_.emplace_back();
  }
  const std::size_t place = unused_.back();
  unused_.pop_back();
  operations_[place] = operation;
  return {place + 1, peer, is_send};
}

void UcxPointToPoint::give_back(Posted& posted) {
  unused_.push_back(std::exchange(posted.handle, 0) - 1);
}

Posted UcxPointToPoint::send(std::span<const std::byte> bytes, int to, int tag, SendMode mode) {
  const UcxApi& api = worker_->api();
  Operation operation;
  operation.is_needed = mode == SendMode::Synchronous;
  ucp_ep_h endpoint = worker_->endpoint(to);
  operation.is_lost = endpoint == nullptr;
  operation.is_to_flush = mode == SendMode::Synchronous;
  if (!operation.is_lost) {
    const ucp_request_param_t param = host_memory();
    operation.request = take_begin(api.tag_send_nbx(endpoint, bytes.data(), bytes.size(),
                                                    ucx_tag(channel_, rank(), tag), &param),
                                   operation, to);
    if (operation.request == nullptr) begin_flush(operation, to);
  }
  return post(operation, to, true);
}

void* UcxPointToPoint::take_begin(ucs_status_ptr_t request, Operation& operation, int peer) {
  if (UCS_PTR_IS_ERR(request)) {
    worker_->lose(peer, UCS_PTR_STATUS(request));
    operation.is_lost = true;
  }
  return UCS_PTR_IS_PTR(request) ? request : nullptr;
}

void UcxPointToPoint::begin_flush(Operation& operation, int peer) {
  if (operation.is_lost || !std::exchange(operation.is_to_flush, false)) return;
  const ucp_request_param_t param{};
  ucp_ep_h endpoint = worker_->endpoint(peer);
  if (endpoint == nullptr) {
    operation.is_lost = true;
  } else {
    operation.flush = take_begin(worker_->api().ep_flush_nbx(endpoint, &param), operation, peer);
  }
}

Posted UcxPointToPoint::receive(std::span<std::byte> bytes, int from, int tag) {
  static_cast<void>(worker_->endpoint(from));  // so that it is missed when it goes
  ucp_request_param_t param = host_memory();
  param.op_attr_mask |= UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  Operation operation;
  operation.request =
      worker_->api().tag_recv_nbx(worker_->get(), bytes.data(), bytes.size(),
                                  ucx_tag(channel_, from, tag), ~std::uint64_t{0}, &param);
  if (UCS_PTR_IS_ERR(operation.request))
    worker_->check(UCS_PTR_STATUS(operation.request),
                   formatted("ucp_tag_recv_nbx from rank {}", from));
  return post(operation, from, false);
}

bool UcxPointToPoint::take_end(void*& request, ucs_status_t status, Operation& operation,
                               const Posted& posted) {
  worker_->api().request_free(std::exchange(request, nullptr));
  if (status == UCS_OK) return true;
  if (status == UCS_ERR_MESSAGE_TRUNCATED)
    throw BackendError(
        formatted("rank {} sent more bytes than rank {} expects", posted.peer, rank()));
  worker_->lose(posted.peer, status);
  operation.is_lost = true;
  return !operation.is_needed;
}

bool UcxPointToPoint::is_done(Operation& operation, const Posted& posted) {
  const UcxApi& api = worker_->api();
  if (operation.is_lost) return !operation.is_needed;
  if (operation.request != nullptr) {
    ucp_tag_recv_info_t info{};
    const ucs_status_t status = posted.is_send
                                    ? api.request_check_status(operation.request)
                                    : api.tag_recv_request_test(operation.request, &info);
    if (status == UCS_INPROGRESS) return false;
    operation.bytes = info.length;
    if (!take_end(operation.request, status, operation, posted)) return false;
    begin_flush(operation, posted.peer);
    if (operation.is_lost) return !operation.is_needed;
  }
  if (operation.flush == nullptr) return true;
  const ucs_status_t status = api.request_check_status(operation.flush);
  return status != UCS_INPROGRESS && take_end(operation.flush, status, operation, posted);
}

void UcxPointToPoint::test(std::span<Posted> posted, std::vector<Finished>& finished) {
  worker_->progress();
  for (std::size_t place = 0; place < posted.size(); ++place) {
    Posted& one = posted[place];
    if (one.handle == 0) continue;
    Operation& operation = operations_[one.handle - 1];
    if (is_done(operation, one)) {
      finished.push_back({place, operation.bytes});
      give_back(one);
    } else {
      worker_->require(one.peer);
    }
  }
}

std::optional<Claimed> UcxPointToPoint::claim(int tag) {
  worker_->progress();
  ucp_tag_recv_info_t info{};
  constexpr int kRemove = 1;
  ucp_tag_message_h message = worker_->api().tag_probe_nb(worker_->get(), ucx_tag(channel_, 0, tag),
                                                          ~kSenderMask, kRemove, &info);
  if (message == nullptr) {
    worker_->require_all();
    return std::nullopt;
  }
  const auto from = static_cast<int>((info.sender_tag & kSenderMask) >> kSenderShift);
  return Claimed{reinterpret_cast<std::uintptr_t>(message), from, info.length};
}

Posted UcxPointToPoint::receive_claimed(const Claimed& claimed, std::span<std::byte> bytes) {
  ucp_request_param_t param = host_memory();
  param.op_attr_mask |= UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  Operation operation;
  operation.request =
      worker_->api().tag_msg_recv_nbx(worker_->get(), bytes.data(), bytes.size(),
                                      reinterpret_cast<ucp_tag_message_h>(claimed.handle), &param);
  if (UCS_PTR_IS_ERR(operation.request))
    worker_->check(UCS_PTR_STATUS(operation.request),
                   formatted("ucp_tag_msg_recv_nbx from rank {}", claimed.from));
  return post(operation, claimed.from, false);
}

bool UcxPointToPoint::drop(Posted& posted) noexcept {
  if (posted.handle == 0) return false;
  const UcxApi& api = worker_->api();
  Operation operation = operations_[posted.handle - 1];
  give_back(posted);
  bool is_under_way = false;
  for (void* const request : {operation.request, operation.flush}) {
    if (request == nullptr) continue;
    if (api.request_check_status(request) == UCS_INPROGRESS && !posted.is_send)
      api.request_cancel(worker_->get(), request);
    is_under_way = is_under_way || api.request_check_status(request) == UCS_INPROGRESS;
    api.request_free(request);
  }
  if (is_under_way) worker_->abandon();
  return is_under_way;
}

}  // namespace hvd
