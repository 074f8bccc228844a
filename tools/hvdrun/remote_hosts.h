#pragma once
/// RemoteHosts starts the ranks of a job on its hosts, by a helper on each: all helpers at once, then one of the first host finds the place
/// where the ranks meet, then all start theirs. It owns the groups. When it ends, so do the ranks. For one thread. Throws
/// std::runtime_error, which names the host, where that cannot be; and Interrupted.

#include <array>
#include <list>
#include <memory>
#include <stdexcept>
#include <string>

#include "tools/hvdrun/outlet.h"
#include "tools/hvdrun/plan.h"
#include "tools/hvdrun/ranks.h"
#include "tools/hvdrun/remote_group.h"
#include "tools/hvdrun/signals.h"

namespace hvdrun {

/// A signal has come while the ranks were being started.
struct Interrupted : std::runtime_error {
  explicit Interrupted(int number) : std::runtime_error("interrupted"), signal(number) {}
  int signal;
};

class RemoteHosts {
 public:
  RemoteHosts(const Plan& plan, const OutputOptions& options, const std::array<Outlet*, 2>& outlets, const Signals& signals);
  ~RemoteHosts();
  RemoteHosts(const RemoteHosts&) = delete;
  RemoteHosts& operator=(const RemoteHosts&) = delete;

  std::list<RemoteGroup>& groups() { return groups_; }

 private:
  /// Waits until `has_done` of all groups.
  template <typename HasDone>
  void wait_for(const HasDone& has_done, const char* what);
  void start_all(const Plan& plan, const OutputOptions& options);
  [[nodiscard]] MeetingCandidates candidates(const Plan& plan) const;

  const std::array<Outlet*, 2> outlets_;
  const Signals& signals_;
  std::list<RemoteGroup> groups_;
};

}  // namespace hvdrun
