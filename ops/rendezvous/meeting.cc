#include "ops/rendezvous/meeting.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <utility>

#include "hvd/base/process.h"
#include "hvd/base/text.h"

namespace hvd {

std::string name_of_host() {
  return formatted("{} {}", host_name(), Peers::name_of_process_space());
}

std::vector<int> Meeting::find_hosts() {
  std::map<std::string, int> first;
  std::vector<int> hosts;
  for (const Bytes& name : allgather(Writer().put_string(name_of_host()).take()))
    hosts.push_back(
        first.emplace(Reader(name).get_string(), static_cast<int>(hosts.size())).first->second);
  return hosts;
}

std::string words_of_dead(int rank) {
  return formatted("rank {} has ended while others wait for it in hvd::init() or hvd::shutdown()",
                   rank);
}

std::string Peers::name_of_process_space() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat space {};
  if (::stat("/proc/self/ns/pid", &space) != 0) return {};
  return boot.empty() ? boot : boot + ':' + std::to_string(space.st_ino);
}

Bytes Peers::introduce() {
  return Writer()
      .put(static_cast<std::int64_t>(::getpid()))
      .put_string(name_of_process_space())
      .take();
}

void Peers::watch(const std::vector<Bytes>& all, int self) {
  peers_.clear();
  const std::string here = name_of_process_space();
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    Reader reader(all[rank]);
    const auto process = static_cast<pid_t>(reader.get<std::int64_t>());
    if (static_cast<int>(rank) == self || here.empty() || reader.get_string() != here) continue;
    FileDescriptor opened(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
    if (opened.get() >= 0) peers_.push_back({static_cast<int>(rank), std::move(opened)});
  }
}

bool Peers::has_ended(const Peer& peer) {
  pollfd ended{peer.process.get(), POLLIN, 0};
  return ::poll(&ended, 1, 0) == 1 && (ended.revents & POLLIN) != 0;
}

std::optional<int> Peers::find_dead() const {
  for (const Peer& peer : peers_)
    if (has_ended(peer)) return peer.rank;
  return std::nullopt;
}

bool Peers::is_dead(int rank) const {
  return std::ranges::any_of(
      peers_, [rank](const Peer& peer) { return peer.rank == rank && has_ended(peer); });
}

Bytes KeyedMeeting::give_from_first(const std::vector<int>& ranks, const Bytes& mine, int tag,
                                    const std::function<bool()>& give_up) {
  if (ranks.size() < 2) return mine;
  const std::lock_guard lock(one_at_a_time_);
  if (!broken_.empty()) throw BackendError(broken_);
  int& count = gifts_[{ranks, tag}];
  const std::string key = formatted("{} {} {}", joined(ranks, ","), tag, count);
  std::optional<Bytes> gift;
  if (rank() == ranks.front()) {
    put(key, static_cast<std::uint32_t>(ranks.size() - 1), mine);
    gift = mine;
  }
  while (!gift && !(gift = try_take(key)))
    if (give_up())
      throw BackendError(
          formatted("rank {} waited in vain for what rank {} has to give", rank(), ranks.front()));
  ++count;
  return std::move(*gift);
}

void KeyedMeeting::fail(const Status& status) {
  broken_ = status.text();
  status.raise();
  throw BackendError(broken_);
}

}  // namespace hvd
