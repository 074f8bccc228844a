#include "ops/rendezvous/sockets.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

namespace hvd {

namespace {

constexpr int kBacklog = 1024;

bool would_block(int error) { return error == EAGAIN || error == EINTR; }

/// Small messages leave at once; a host that has lost its power is noticed some time.
void tune(const FileDescriptor& connection) {
  const int on = 1;
  ::setsockopt(connection.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(connection.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

const sockaddr* raw(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr*>(&address.storage);
}

}  // namespace

SocketAddress SocketAddress::with_port(int port) const {
  SocketAddress other = *this;
  const auto number = htons(static_cast<std::uint16_t>(port));
  if (storage.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&other.storage)->sin6_port = number;
  } else {
    reinterpret_cast<sockaddr_in*>(&other.storage)->sin_port = number;
  }
  return other;
}

std::vector<SocketAddress> resolve(const std::string& host, std::string& problem, bool* may_pass) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (const int error = ::getaddrinfo(host.c_str(), nullptr, &wanted, &list); error != 0) {
    if (may_pass != nullptr) *may_pass = error == EAI_AGAIN;
    problem = error == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(error);
    return {};
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, ::freeaddrinfo);
  std::vector<SocketAddress> found;
  for (const addrinfo* one = list; one != nullptr; one = one->ai_next) {
    if (one->ai_family != AF_INET && one->ai_family != AF_INET6) continue;
    SocketAddress address;
    std::memcpy(&address.storage, one->ai_addr, one->ai_addrlen);
    address.length = one->ai_addrlen;
    found.push_back(address);
  }
  std::stable_partition(found.begin(), found.end(),
                        [](const auto& address) { return address.storage.ss_family == AF_INET; });
  if (found.empty()) problem = "it has no address";
  return found;
}

SocketAddress address_to_listen_at(const std::string& host, const SocketAddress& address) {
  const bool is_number =
      host.find(':') != std::string::npos || host.find_first_not_of("0123456789.") == host.npos;
  const bool is_of_host_alone =
      host.find("localhost") != std::string::npos || host.find("loopback") != std::string::npos;
  if (is_number || is_of_host_alone) return address;
  SocketAddress all = address;
  if (address.storage.ss_family == AF_INET6) {
    auto& inside = reinterpret_cast<sockaddr_in6*>(&all.storage)->sin6_addr;
    if (IN6_IS_ADDR_LOOPBACK(&inside)) inside = in6addr_any;
  } else {
    auto& inside = reinterpret_cast<sockaddr_in*>(&all.storage)->sin_addr;
    if (ntohl(inside.s_addr) >> 24 == IN_LOOPBACKNET) inside.s_addr = htonl(INADDR_ANY);
  }
  return all;
}

std::optional<FileDescriptor> listen_at(const SocketAddress& address, int& error) {
  FileDescriptor listener(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int on = 1;  // connections of a process that has ended do not keep the port
  if (listener.get() >= 0 &&
      ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
      ::bind(listener.get(), raw(address), address.length) == 0 &&
      ::listen(listener.get(), kBacklog) == 0)
    return listener;
  error = errno;
  return std::nullopt;
}

int port_of(const FileDescriptor& listener) {
  SocketAddress address;
  address.length = sizeof address.storage;
  if (::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address.storage),
                    &address.length) != 0)
    return 0;
  return ntohs(address.storage.ss_family == AF_INET6
                   ? reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_port
                   : reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port);
}

std::optional<FileDescriptor> accept_from(const FileDescriptor& listener) {
  FileDescriptor connection(
      ::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (connection.get() < 0) return std::nullopt;
  tune(connection);
  return connection;
}

std::optional<FileDescriptor> connect_to(const SocketAddress& address, Deadline deadline) {
  FileDescriptor connection(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (connection.get() < 0) return std::nullopt;
  if (::connect(connection.get(), raw(address), address.length) != 0) {
    if (errno != EINPROGRESS || !wait_for(connection, POLLOUT, deadline)) return std::nullopt;
    int error = 0;
    socklen_t length = sizeof error;
    if (::getsockopt(connection.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0)
      return std::nullopt;
  }
  // A port of this host that nobody listens at may be given to this very socket, which then is
  // connected to itself.
  SocketAddress own;
  own.length = sizeof own.storage;
  if (::getsockname(connection.get(), reinterpret_cast<sockaddr*>(&own.storage), &own.length) ==
          0 &&
      own.length == address.length && std::memcmp(&own.storage, &address.storage, own.length) == 0)
    return std::nullopt;
  tune(connection);
  return connection;
}

std::optional<std::size_t> send_some(const FileDescriptor& connection,
                                     std::span<const std::byte> bytes) {
  const auto sent = ::send(connection.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (sent >= 0) return static_cast<std::size_t>(sent);
  if (would_block(errno)) return 0;
  return std::nullopt;
}

std::optional<std::size_t> receive_some(const FileDescriptor& connection,
                                        std::span<std::byte> buffer) {
  const auto received = ::recv(connection.get(), buffer.data(), buffer.size(), 0);
  if (received > 0) return static_cast<std::size_t>(received);
  if (received < 0 && would_block(errno)) return 0;
  return std::nullopt;
}

bool wait_for(const FileDescriptor& connection, short events, Deadline deadline) {
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now())
            .count();
    pollfd one{connection.get(), events, 0};
    const int ready = ::poll(&one, 1, static_cast<int>(std::clamp<long long>(left, 0, 60'000)));
    if (ready > 0) return true;
    if (ready == 0 && std::chrono::steady_clock::now() >= deadline) return false;
    if (ready < 0 && errno != EINTR) return false;
  }
}

}  // namespace hvd
