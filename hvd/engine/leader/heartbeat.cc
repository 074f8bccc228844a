#include "hvd/engine/leader/heartbeat.h"

#include <algorithm>
#include <utility>

namespace hvd {

Heartbeat::Heartbeat(Transport& wire, std::vector<int> neighbours) : wire_(wire) {
  const auto now = Clock::now();
  for (const int neighbour : neighbours) lines_[neighbour] = {now, now};
}

void Heartbeat::send(int to, SharedBytes message) {
  wire_.send(to, std::move(message));
  if (const auto line = lines_.find(to); line != lines_.end()) line->second.sent = Clock::now();
}

std::optional<Message> Heartbeat::receive() {
  while (auto message = wire_.receive()) {
    if (const auto line = lines_.find(message->from); line != lines_.end())
      line->second.heard = Clock::now();
    if (!message->bytes.empty()) return message;
  }
  return std::nullopt;
}

void Heartbeat::beat() {
  const auto now = Clock::now();
  const auto missed = now - std::exchange(beat_at_, now);
  for (auto& [neighbour, line] : lines_) {
    if (missed > kInterval) line.heard = std::min(line.heard + missed, now);
    if (now - line.sent < kInterval) continue;
    wire_.send(neighbour, share({}));
    line.sent = now;
  }
}

std::vector<Heartbeat::Silence> Heartbeat::silences(std::chrono::seconds limit) const {
  std::vector<Silence> silences;
  const auto now = Clock::now();
  for (const auto& [neighbour, line] : lines_)
    if (now - line.heard >= limit)
      silences.push_back(
          {neighbour, std::chrono::duration_cast<std::chrono::seconds>(now - line.heard)});
  return silences;
}

}  // namespace hvd
