#pragma once
/// This header has SHA-256 (FIPS 180-4) and HMAC (RFC 2104), by which ranks prove to each other that they know the token of their job
/// without showing it. Pure functions, for a few hundred bytes; any thread.
// Tested in tests/ops/rendezvous/store_test.cc

#include <array>
#include <cstddef>
#include <span>

namespace hvd {

using Digest = std::array<std::byte, 32>;

Digest sha256(std::span<const std::byte> message);
Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message);
/// Compares in a time that does not depend on where they differ.
bool is_same(const Digest& a, const Digest& b);

}  // namespace hvd
