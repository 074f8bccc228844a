#pragma once
/// This header has what goes over a connection of the store: frames of a length, a kind and a
/// payload, and the steps by which both sides prove that they know the job's key. Nobody shows the
/// key: each makes an HMAC over both sides' nonces. What is read here may come from a stranger: it
/// is bounded before memory is taken for it, and what is malformed throws WireError. Values and
/// pure functions; any thread.
// Tested in tests/ops/rendezvous/store_test.cc, tests/fuzz/store_fuzz.cc

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "hvd/base/wire.h"

namespace hvd {

enum class FrameKind : std::uint8_t {
  Greeting,  ///< the server's first word: its nonce
  Hello,     ///< who connects, with its proof
  Refused,   ///< why that one is no rank, as Refusal; the connection ends. Before Welcome it proves
             ///< nothing
  Welcome,   ///< the server's proof
  Here,      ///< who connects has heard that, and stays; from now on it is missed if it goes
  Taken,     ///< it is a rank now
  Complete,  ///< all ranks are here
  Gather,    ///< a rank's part of an allgather
  Gathered,  ///< every rank's
  Put,       ///< a value for so many others
  Get,       ///< asks for a value
  Value,     ///< the answer, as soon as there is one
  Failed,    ///< a Status: what ends the meeting for all
};

struct Frame {
  FrameKind kind = FrameKind::Greeting;
  Bytes payload;
};

/// Appends a frame to `out`.
void put_frame(Bytes& out, FrameKind kind, std::span<const std::byte> payload);

/// FrameReader turns what arrives, in whatever pieces, into frames.
class FrameReader {
 public:
  static constexpr std::size_t kMostOfStrangers = 1024;
  static constexpr std::size_t kMostOfRanks = std::size_t{256} << 20;

  void add(std::span<const std::byte> bytes);
  /// Returns the next whole frame; none if it has not arrived yet. Throws WireError for one that is
  /// longer than allowed, or of no kind.
  std::optional<Frame> next();
  /// From now on the other side is a rank, whose frames may be large.
  void trust() { most_ = kMostOfRanks; }

 private:
  Bytes bytes_;
  std::size_t most_ = kMostOfStrangers;
};

using Digest = std::array<std::byte, 32>;
/// HMAC (RFC 2104) with SHA-256, as libcrypto computes it. Throws WireError where that refuses.
Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message);
/// Compares in a time that does not depend on where they differ.
bool is_same(const Digest& a, const Digest& b);

using Nonce = std::array<std::byte, 16>;
/// Returns what nobody can foresee.
Nonce make_nonce();
/// Returns the key of a job: of its token, which may be empty, and what else tells it from others.
Digest make_key(std::string_view token, std::string_view job);

Bytes make_greeting(const Nonce& nonce);
/// Throws WireError if it is none of this protocol.
Nonce read_greeting(const Frame& frame);

/// The one who connects.
struct Hello {
  int rank = 0, size = 0;
  std::string who;  ///< "process 17 on node3"
};
Bytes make_hello(const Hello& hello, const Digest& key, const Nonce& server, const Nonce& client);
struct Caller {
  Hello hello;
  Digest proof{};  ///< what the server answers; that it can is its own proof
};
/// Returns who it is; none if the key is another. Throws WireError if it is no Hello.
std::optional<Caller> read_hello(const Frame& frame, const Digest& key, const Nonce& server);
/// Returns what the server must answer to a Hello of `client`.
Digest proof_of_server(const Digest& key, const Nonce& server, const Nonce& client);

/// The reason why a server does not take somebody.
enum class Refusal : std::uint8_t { WrongKey, Complete, Wrong };

}  // namespace hvd
