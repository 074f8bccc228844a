// send and recv of raw buffers; barrier_until.
// Tested in tests/contract/cases/peer_cases.cc

#include <utility>

#include "hvd/api/buffers.h"
#include "hvd/base/text.h"

namespace hvd {

namespace {

PeerCall call_of(const Buffer& buffer, const PeerOptions& options, const char* what,
                 std::shared_ptr<void> owner = nullptr) {
  require_running();
  if (buffer.device.kind != DeviceKind::Cpu)
    throw InvalidArgument(
        formatted("{}: the buffer is in memory of a GPU: copy it to the host", what));
  if (!has_possible_sizes(buffer.shape))
    throw InvalidArgument(formatted("{}: shape {} is impossible", what, to_string(buffer.shape)));
  return {buffer.data,  buffer.data, buffer.dtype,    element_count(buffer.shape),
          options.peer, options.tag, std::move(owner)};
}

}  // namespace

void send(const Buffer& buffer, const PeerOptions& options) {
  const WorldScope scope(options.world);
  const auto world = current_world();
  world->engine->peer_calls().send(call_of(buffer, options, "send"));
}
int recv(const Buffer& buffer, const PeerOptions& options) {
  const WorldScope scope(options.world);
  const auto world = current_world();
  return world->engine->peer_calls().receive(call_of(buffer, options, "recv"));
}

std::vector<int> barrier_until(std::chrono::nanoseconds time) {
  return engine()->peer_calls().meet(time);
}

Handle<void> send_async(const Buffer& buffer, const PeerOptions& options,
                        std::shared_ptr<void> owner) {
  const WorldScope scope(options.world);
  PeerCall call = call_of(buffer, options, "send", std::move(owner));
  auto running = engine();
  auto pending = running->peer_calls().start_send(std::move(call));
  return {std::move(running), std::move(pending), [] {}};
}
Handle<int> recv_async(const Buffer& buffer, const PeerOptions& options,
                       std::shared_ptr<void> owner) {
  const WorldScope scope(options.world);
  PeerCall call = call_of(buffer, options, "recv", std::move(owner));
  auto running = engine();
  auto pending = running->peer_calls().start_receive(std::move(call));
  const auto from = [state = pending] { return static_cast<int>(state->value); };
  return {std::move(running), std::move(pending), from};
}

}  // namespace hvd
