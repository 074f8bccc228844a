#pragma once
/// A wire between pretended hosts that is slow, and slower for some than for others.

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <utility>

#include "hvd/transport.h"

namespace hvd::test {

/// Delivers the messages of each host late, by a time of its own that changes with each message; in
/// their order.
class LateTransport final : public Transport {
 public:
  /// `latest`: nothing is later than that, but for one pair of hosts, of which each message is
  /// three times that later. `on_send` sees each message on its way out; `from` is then where it
  /// goes.
  LateTransport(std::unique_ptr<Transport> wire, unsigned seed, std::chrono::microseconds latest,
                std::function<void(const Message&)> on_send = {})
      : wire_(std::move(wire)), dice_(seed), latest_(latest), on_send_(std::move(on_send)) {}
  int domain() const override { return wire_->domain(); }
  int domains() const override { return wire_->domains(); }
  void send(int to, SharedBytes message) override {
    if (on_send_) on_send_({to, *message});
    wire_->send(to, std::move(message));
  }
  std::optional<Message> receive() override {
    const auto now = std::chrono::steady_clock::now();
    while (auto message = wire_->receive()) {
      auto& line = lines_[message->from];
      auto at =
          now + std::chrono::microseconds(
                    latest_.count() == 0 ? 0 : dice_() % static_cast<unsigned>(latest_.count()));
      if (latest_.count() > 0 && message->from == domains() - 1 && domain() == domains() - 2)
        at += 3 * latest_;
      if (!line.empty()) at = std::max(at, line.back().first);
      line.emplace_back(at, std::move(*message));
    }
    for (auto& [from, line] : lines_) {
      if (line.empty() || line.front().first > now) continue;
      Message message = std::move(line.front().second);
      line.pop_front();
      return message;
    }
    return std::nullopt;
  }

 private:
  std::unique_ptr<Transport> wire_;
  std::mt19937 dice_;
  std::chrono::microseconds latest_;
  std::function<void(const Message&)> on_send_;
  std::map<int, std::deque<std::pair<std::chrono::steady_clock::time_point, Message>>> lines_;
};

}  // namespace hvd::test
