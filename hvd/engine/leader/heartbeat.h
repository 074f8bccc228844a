#pragma once
/// A Heartbeat is a leader's transport that keeps its lines alive: it sends an empty message where
/// nothing else was sent for a while, and tells from which neighbours in the leader tree nothing
/// has come for long. A host that is frozen, without power or cut off shows in no other way: it
/// neither answers nor closes a connection. Of the thread that has the turn.
// Tested in tests/hvd/engine/failure_messenger_test.cc

#include <chrono>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "hvd/transport.h"

namespace hvd {

class Heartbeat final : public Transport {
 public:
  using Clock = std::chrono::steady_clock;
  /// Sent where nothing else was sent for so long.
  static constexpr std::chrono::milliseconds kInterval{1000};
  /// Silence that is worth a word, and the least that may end a world: so many beats are not late.
  static constexpr std::chrono::seconds kMissed{3};

  /// `neighbours`: those with which `wire` exchanges messages; each has a Heartbeat too.
  Heartbeat(Transport& wire, std::vector<int> neighbours);

  [[nodiscard]] int domain() const override { return wire_.domain(); }
  [[nodiscard]] int domains() const override { return wire_.domains(); }
  void send(int to, SharedBytes message) override;
  /// Returns the next message that says something.
  std::optional<Message> receive() override;

  /// Sends empty messages where it is time. Called again and again: for a time in which it is not,
  /// as this process is stopped, nobody else is silent.
  void beat();
  struct Silence {
    int domain = 0;
    std::chrono::seconds lasted{0};
  };
  /// Returns the neighbours from which nothing has come for `limit`.
  [[nodiscard]] std::vector<Silence> silences(std::chrono::seconds limit) const;

 private:
  struct Line {
    Clock::time_point sent, heard;
  };
  Transport& wire_;
  std::map<int, Line> lines_;  ///< by neighbour
  Clock::time_point beat_at_ = Clock::now();
};

}  // namespace hvd
