#pragma once
/// MeetingPort keeps a port of this host for the store by which the ranks of a job meet: it is bound and does not listen, so that the
/// system gives it to nobody else while rank 0, which has the same user and binds it too, is on its way. It owns the socket. For one
/// thread.

#include <string>
#include <vector>

namespace hvdrun {

/// How the ranks of several hosts could reach this one.
struct MeetingCandidates {
  std::vector<std::string> addresses;  ///< numbers or names, the best first
  std::string interfaces;              ///< with commas; an address of one of these, if there are any
  bool is_said = false;                ///< by the user: none but these
  bool allows_loopback = false;        ///< all ranks are on this host
};

class MeetingPort {
 public:
  MeetingPort() = default;
  ~MeetingPort();
  MeetingPort(const MeetingPort&) = delete;
  MeetingPort& operator=(const MeetingPort&) = delete;

  /// Takes a port at the first of the candidates that is an address of this host. Returns it as HVD_INIT has it. Throws std::runtime_error
  /// if there is none.
  std::string reserve(const MeetingCandidates& candidates);

 private:
  int socket_ = -1;
};

}  // namespace hvdrun
