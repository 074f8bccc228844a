#pragma once
/// Relay lets the owner of memory that another rank reads where it is (Staging::show) do half of the work: it copies pieces ahead of the
/// reader into a ring that both see, small enough for the second-level cache, and the reader takes those from there, and the others where
/// they are. Neither waits for the other: without the owner the reader is as fast as without a relay.
/// A Relay lies in shared memory and is read by one rank; the owner and the reader use it at once, each from one thread.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace hvd {

class Relay {
 public:
  /// Copies pieces of `memory` into the ring while there is space, and for some microseconds waits for space; returns then, or where the
  /// reader needs no more. Returns false if the reader has not begun. Owner.
  bool give(std::span<const std::byte> memory);

  /// Copies what the owner shows to `to`. `read(skipped, to, bytes)` copies bytes of it from where they are, and returns false if that
  /// cannot be done any more; so does this. Reader.
  template <class Read>
  bool take(std::span<std::byte> to, const Read& read) {
    const std::uint64_t pieces = pieces_of(to.size());
    for (std::uint64_t piece = 0; piece < pieces; ++piece) {
      const auto part = part_of(to, piece);
      if (!take_given(piece, part) && !read(static_cast<std::size_t>(piece) * kPieceBytes, part.data(), part.size())) return false;
      taken_.store(piece + 1, std::memory_order_release);
    }
    return true;
  }

 private:
  static constexpr std::size_t kPieceBytes = 64 << 10;
  static constexpr std::size_t kPlaces = 8;
  [[nodiscard]] static std::uint64_t pieces_of(std::size_t bytes) { return (bytes + kPieceBytes - 1) / kPieceBytes; }
  template <class Byte>
  [[nodiscard]] static std::span<Byte> part_of(std::span<Byte> whole, std::uint64_t piece) {
    const auto rest = whole.subspan(static_cast<std::size_t>(piece) * kPieceBytes);
    return rest.first(rest.size() < kPieceBytes ? rest.size() : kPieceBytes);
  }
  /// Returns false if the owner has not given the piece.
  bool take_given(std::uint64_t piece, std::span<std::byte> to) const;

  struct alignas(64) Place {
    std::atomic<std::uint64_t> given{0};  ///< number of the piece, from 1
    alignas(64) std::array<std::byte, kPieceBytes> bytes;
  };
  alignas(64) std::atomic<std::uint64_t> taken_{0};  // pieces that the reader has, in order
  std::array<Place, kPlaces> places_;
};

}  // namespace hvd
