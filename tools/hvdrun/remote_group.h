#pragma once
/// RemoteGroup is the ranks of one host that a helper starts there (helper.h): on another host by ssh, on this one as a process of its own.
/// It owns the process of ssh, and the pipes to it; what the ranks say goes to RankLines. When the connection is lost all of its ranks have
/// ended. For one thread. Throws std::runtime_error, which names the host, where the ranks cannot be started.

#include <sys/types.h>

#include <array>
#include <chrono>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "tools/hvdrun/meeting_port.h"
#include "tools/hvdrun/messages.h"
#include "tools/hvdrun/outlet.h"
#include "tools/hvdrun/plan.h"
#include "tools/hvdrun/rank.h"
#include "tools/hvdrun/rank_lines.h"
#include "tools/hvdrun/ranks.h"

namespace hvdrun {

class RemoteGroup final : public RankGroup {
 public:
  /// Starts the helper. `outlets`, which are borrowed, take standard output and error of the ranks.
  RemoteGroup(const Plan& plan, const HostRanks& host, const OutputOptions& options, const std::array<Outlet*, 2>& outlets);
  /// Waits for the helper, which ends what is left, and no longer than that may take.
  ~RemoteGroup() override;
  RemoteGroup(const RemoteGroup&) = delete;
  RemoteGroup& operator=(const RemoteGroup&) = delete;

  // ---- To start, one after the other; pass_on() throws meanwhile if something goes wrong
  [[nodiscard]] bool has_greeted() const { return has_greeted_; }
  /// Returns SSH_CONNECTION of the helper: the address of this host, its port, the address of that one, its port. Empty: unknown.
  [[nodiscard]] const std::string& connection() const { return connection_; }
  void reserve(const MeetingCandidates& candidates);
  /// Returns where the ranks are to meet; empty: it has not answered.
  [[nodiscard]] const std::string& reserved() const { return reserved_; }
  void start(const HostJob& job);
  [[nodiscard]] bool has_started() const { return has_started_; }
  [[nodiscard]] const HostRanks& host() const { return host_; }

  std::vector<Rank*> ranks() override;
  void add_waited(std::vector<pollfd>& waited) const override;
  void pass_on() override;
  [[nodiscard]] bool has_said_all() const override;
  void finish_output() override;
  void begin_to_end() override { is_ending_ = true; }
  /// Tells the helper that nothing more comes: it ends what runs.
  void hang_up();

 private:
  class RemoteRank;
  void listen();
  void listen_to_errors();
  void follow(const Message& message);
  void take_input();
  void send(Kind kind, const Packer& said) { send(framed(kind, said.bytes())); }
  void send(const std::string& message);
  void close_to();
  void lose();
  [[nodiscard]] std::string describe_loss();
  [[nodiscard]] RemoteRank& rank_of(std::uint32_t number);

  const HostRanks host_;
  const std::chrono::seconds time_to_end_;
  pid_t process_ = -1;
  int to_helper_ = -1, from_ = -1, errors_ = -1;
  int input_ = -1;            // what rank 0 reads; borrowed
  std::optional<Outlet> to_;  // none when nothing more can be said
  Outlet* const remarks_;
  MessageReader in_;
  std::string remark_;                  // a line of ssh's without its end
  std::deque<std::string> last_words_;  // of ssh's
  std::string connection_, reserved_, lost_;
  bool has_begun_ = false, has_greeted_ = false, has_started_ = false, is_ending_ = false, is_lost_ = false;
  std::size_t untaken_ = 0;  // bytes of input that are on their way
  std::optional<std::chrono::steady_clock::time_point> give_up_;
  std::list<RemoteRank> ranks_;
};

}  // namespace hvdrun
