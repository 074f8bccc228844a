#include "tools/hvdrun/meeting_port.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>

namespace hvdrun {

namespace {

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  [[nodiscard]] bool is_v6() const { return storage.ss_family == AF_INET6; }
  [[nodiscard]] const sockaddr_in6& v6() const { return reinterpret_cast<const sockaddr_in6&>(storage); }
  [[nodiscard]] const sockaddr_in& v4() const { return reinterpret_cast<const sockaddr_in&>(storage); }
  [[nodiscard]] bool is_loopback() const {
    return is_v6() ? IN6_IS_ADDR_LOOPBACK(&v6().sin6_addr) : ntohl(v4().sin_addr.s_addr) >> 24 == 127;
  }
  /// Only with the name of an interface does it mean anything.
  [[nodiscard]] bool is_link_local() const { return is_v6() && IN6_IS_ADDR_LINKLOCAL(&v6().sin6_addr); }
};

Address copy(const sockaddr* address, socklen_t length) {
  Address copied;
  std::memcpy(&copied.storage, address, length);
  copied.length = length;
  return copied;
}

std::vector<Address> resolve(const std::string& name) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (::getaddrinfo(name.c_str(), nullptr, &wanted, &list) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, ::freeaddrinfo);
  std::vector<Address> found;
  for (const addrinfo* one = list; one != nullptr; one = one->ai_next)
    if (one->ai_family == AF_INET || one->ai_family == AF_INET6) found.push_back(copy(one->ai_addr, one->ai_addrlen));
  return found;
}

/// Those of the interfaces that are named; of all that are up and no loopback, if none is.
std::vector<Address> of_interfaces(const std::string& names) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, ::freeifaddrs);
  std::vector<Address> found;
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const bool is_wanted = names.empty() ? (one->ifa_flags & IFF_LOOPBACK) == 0
                                         : fmt::format(",{},", names).find(fmt::format(",{},", one->ifa_name)) != std::string::npos;
    if (is_wanted) found.push_back(copy(one->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6)));
  }
  std::stable_partition(found.begin(), found.end(), [](const Address& address) { return !address.is_v6(); });
  return found;
}

/// Port 0: one that is free.
int bind_to(const Address& address) {
  const int made = ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;  // as rank 0 sets it: only then may both have the port
  if (made >= 0 && ::setsockopt(made, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
      ::bind(made, reinterpret_cast<const sockaddr*>(&address.storage), address.length) == 0)
    return made;
  if (made >= 0) ::close(made);
  return -1;
}

std::string text_of(int bound) {
  Address address;
  address.length = sizeof address.storage;
  ::getsockname(bound, reinterpret_cast<sockaddr*>(&address.storage), &address.length);
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address.is_v6()) {
    ::inet_ntop(AF_INET6, &address.v6().sin6_addr, text.data(), text.size());
    return fmt::format("tcp://[{}]:{}", text.data(), ntohs(address.v6().sin6_port));
  }
  ::inet_ntop(AF_INET, &address.v4().sin_addr, text.data(), text.size());
  return fmt::format("tcp://{}:{}", text.data(), ntohs(address.v4().sin_port));
}

}  // namespace

MeetingPort::~MeetingPort() {
  if (socket_ >= 0) ::close(socket_);
}

std::string MeetingPort::reserve(const MeetingCandidates& candidates) {
  std::vector<Address> all;
  if (candidates.interfaces.empty()) {
    for (const auto& name : candidates.addresses)
      for (const auto& address : resolve(name)) all.push_back(address);
    if (!candidates.is_said)
      for (const auto& address : of_interfaces("")) all.push_back(address);
  } else {
    all = of_interfaces(candidates.interfaces);
  }
  for (const auto& address : all) {
    if (address.is_link_local() || (address.is_loopback() && !candidates.allows_loopback)) continue;
    socket_ = bind_to(address);
    if (socket_ >= 0) return text_of(socket_);
  }
  if (candidates.is_said) throw std::runtime_error(fmt::format("--master-addr {}: it has no such address", candidates.addresses.front()));
  if (!candidates.interfaces.empty())
    throw std::runtime_error(fmt::format("--network-interfaces {}: it has none of these, with an address", candidates.interfaces));
  throw std::runtime_error("it has no address at which the other hosts could reach it; --master-addr names one");
}

}  // namespace hvdrun
