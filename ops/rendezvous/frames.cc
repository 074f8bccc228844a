#include "ops/rendezvous/frames.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <algorithm>
#include <random>

#include "hvd/errors.h"

namespace hvd {

namespace {

// another version of it is another number
constexpr std::uint64_t kProtocol = 0x3376'7a64'6e65'7268U;
constexpr std::size_t kHeader = sizeof(std::uint32_t) + 1;

Digest prove(const Digest& key, std::string_view side, const Nonce& server, const Nonce& client,
             std::span<const std::byte> said) {
  Writer writer;
  writer.put_string(side).put(kProtocol).put(server).put(client).put_bytes(said);
  return hmac_sha256(key, writer.bytes());
}

Bytes words_of(const Hello& hello) {
  return Writer()
      .put(static_cast<std::int32_t>(hello.rank))
      .put(static_cast<std::int32_t>(hello.size))
      .put_string(std::string_view(hello.who).substr(0, 200))
      .take();
}

}  // namespace

void put_frame(Bytes& out, FrameKind kind, std::span<const std::byte> payload) {
  const Bytes header = Writer().put(static_cast<std::uint32_t>(payload.size())).put(kind).take();
  out.insert(out.end(), header.begin(), header.end());
  out.insert(out.end(), payload.begin(), payload.end());
}

void FrameReader::add(std::span<const std::byte> bytes) {
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
}

std::optional<Frame> FrameReader::next() {
  if (bytes_.size() < kHeader) return std::nullopt;
  Reader reader(bytes_);
  const auto length = reader.get<std::uint32_t>();
  const auto kind = reader.get<std::uint8_t>();
  if (length > most_) throw WireError("a frame is longer than allowed");
  if (kind > static_cast<std::uint8_t>(FrameKind::Failed)) throw WireError("a frame is of no kind");
  if (bytes_.size() - kHeader < length) return std::nullopt;
  const auto first = bytes_.begin() + kHeader;
  Frame frame{static_cast<FrameKind>(kind), Bytes(first, first + length)};
  bytes_.erase(bytes_.begin(), first + length);
  return frame;
}

Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message) {
  // The store's thread may come here while the process ends: libcrypto must not be gone by then.
  [[maybe_unused]] static const int stays = ::OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  Digest digest{};
  const auto* text = reinterpret_cast<const unsigned char*>(message.data());
  auto* made = reinterpret_cast<unsigned char*>(digest.data());
  if (::HMAC(::EVP_sha256(), key.data(), static_cast<int>(key.size()), text, message.size(), made,
             nullptr) == nullptr)
    throw BackendError(
        "hvd::init(): libcrypto computes no HMAC-SHA256 (see OPENSSL_CONF, and whether a FIPS "
        "module is missing)");
  return digest;
}

bool is_same(const Digest& a, const Digest& b) {
  return ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

Nonce make_nonce() {
  Nonce nonce{};
  if (::getrandom(nonce.data(), nonce.size(), 0) == static_cast<ssize_t>(nonce.size()))
    return nonce;
  std::random_device device;
  for (std::byte& byte : nonce) byte = static_cast<std::byte>(device());
  return nonce;
}

Digest make_key(std::string_view token, std::string_view job) {
  return hmac_sha256(Writer().put_string("hvd rendezvous").bytes(),
                     Writer().put_string(token).put_string(job).bytes());
}

Bytes make_greeting(const Nonce& nonce) { return Writer().put(kProtocol).put(nonce).take(); }

Nonce read_greeting(const Frame& frame) {
  Reader reader(frame.payload);
  if (frame.kind != FrameKind::Greeting || reader.get<std::uint64_t>() != kProtocol)
    throw WireError("no greeting of this protocol");
  return reader.get<Nonce>();
}

Bytes make_hello(const Hello& hello, const Digest& key, const Nonce& server, const Nonce& client) {
  const Bytes words = words_of(hello);
  return Writer()
      .put(kProtocol)
      .put(client)
      .put_bytes(words)
      .put(prove(key, "client", server, client, words))
      .take();
}

std::optional<Caller> read_hello(const Frame& frame, const Digest& key, const Nonce& server) {
  Reader reader(frame.payload);
  if (frame.kind != FrameKind::Hello || reader.get<std::uint64_t>() != kProtocol)
    throw WireError("no hello of this protocol");
  const auto client = reader.get<Nonce>();
  const auto words = reader.get_bytes();
  if (!is_same(reader.get<Digest>(), prove(key, "client", server, client, words)))
    return std::nullopt;
  Reader said(words);
  Caller found;
  found.hello.rank = said.get<std::int32_t>();
  found.hello.size = said.get<std::int32_t>();
  found.hello.who = said.get_string();
  found.proof = proof_of_server(key, server, client);
  return found;
}

Digest proof_of_server(const Digest& key, const Nonce& server, const Nonce& client) {
  return prove(key, "server", server, client, {});
}

}  // namespace hvd
