#pragma once
/// TCP as the store needs it: who is meant by a name, a place to listen at, and connections that
/// block nobody for longer than is said. Plain sockets of the system: a library of its own would be
/// one more thing to install for three hundred lines. Any thread; each descriptor has one owner.
/// Fails with BackendError that has the system's words.
// Tested in tests/ops/rendezvous/meeting_test.cc

#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ops/shm/memory/shared_memory.h"

namespace hvd {

using Deadline = std::chrono::steady_clock::time_point;

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  /// The same address with another port.
  [[nodiscard]] SocketAddress with_port(int port) const;
};

/// Returns the addresses of a name, IPv4 first; empty if it has none, and then why in `problem`,
/// and in `may_pass` whether who was asked says that it may know later (EAI_AGAIN).
std::vector<SocketAddress> resolve(const std::string& host, std::string& problem,
                                   bool* may_pass = nullptr);

/// Returns where the host that is to be met as `host`, which is `address` here, listens. Debian's
/// /etc/hosts makes a host's own name loopback, where other hosts, to which the name is another
/// address, reach nobody: so those of its family are meant, all of them. Who says localhost, or an
/// address, means that.
SocketAddress address_to_listen_at(const std::string& host, const SocketAddress& address);
/// Returns a socket that listens at `address`; none if that is taken (`error` EADDRINUSE) or cannot
/// be (another error).
std::optional<FileDescriptor> listen_at(const SocketAddress& address, int& error);
/// Returns the port that a socket listens at.
int port_of(const FileDescriptor& listener);
/// Returns the next connection of a listener, which does not block; none if there is none (`errno`
/// EAGAIN) or it cannot be had.
std::optional<FileDescriptor> accept_from(const FileDescriptor& listener);
/// Returns a connection, which does not block; none if there is none until `deadline`.
std::optional<FileDescriptor> connect_to(const SocketAddress& address, Deadline deadline);

/// Sends what can be sent at once. Returns how much that is; none if the connection has ended.
std::optional<std::size_t> send_some(const FileDescriptor& connection,
                                     std::span<const std::byte> bytes);
/// Reads what has arrived into `buffer`. Returns how much that is, 0 for nothing yet; none if the
/// connection has ended.
std::optional<std::size_t> receive_some(const FileDescriptor& connection,
                                        std::span<std::byte> buffer);
/// Waits until the connection can be read (`POLLIN`) or written (`POLLOUT`), or the deadline.
/// Returns whether it can.
bool wait_for(const FileDescriptor& connection, short events, Deadline deadline);

}  // namespace hvd
