#pragma once
/// A Relay is the ring through which the owner of memory that other ranks read where it is
/// (Staging::show) does half of the work: it copies pieces ahead of the readers into the ring,
/// which all see, small enough for the second-level cache. A reader takes those from there, and may
/// read a piece that has not been given where it is instead: nobody has to wait for anybody. It
/// lies in shared memory; the owner and each reader use it at once, each from one thread. Nothing
/// fails.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "hvd/routes.h"

namespace hvd {

class Relay {
 public:
  static constexpr std::size_t kPieceBytes = limit(Limit::RelayPieceBytes);
  static constexpr std::size_t kMostReaders = 63;
  /// Requires at least one reader, and kMostReaders at most.
  explicit Relay(std::size_t readers) : readers_(readers) {}

  static constexpr std::uint64_t pieces_of(std::size_t bytes) {
    return (bytes + kPieceBytes - 1) / kPieceBytes;
  }
  /// Returns where piece number `piece` of the memory lies.
  template <class Byte>
  [[nodiscard]] static std::span<Byte> part_of(std::span<Byte> whole, std::uint64_t piece) {
    const auto rest = whole.subspan(static_cast<std::size_t>(piece) * kPieceBytes);
    return rest.first(rest.size() < kPieceBytes ? rest.size() : kPieceBytes);
  }

  /// Copies the next piece of `memory` that a reader still needs into the ring, if there is space.
  /// `next`, from 0, is the owner's to keep. Returns whether it has. Owner.
  bool give(std::span<const std::byte> memory, std::uint64_t& next);
  /// Returns how many pieces all readers have.
  [[nodiscard]] std::uint64_t taken_by_all() const;
  /// Returns how many pieces the readers have together: it grows while any of them is at work.
  [[nodiscard]] std::uint64_t taken() const;

  /// Returns how many pieces this reader has, in order. Any thread.
  [[nodiscard]] std::uint64_t taken_by(std::size_t reader) const {
    return taken_[reader].pieces.load(std::memory_order_acquire);
  }
  /// Copies the next piece to its part of `to`, if it has been given. `past_caches`: so that it
  /// does not stay there. Returns whether it has. The reader with this number.
  bool take(std::size_t reader, std::span<std::byte> to, bool past_caches = false);
  /// The reader with this number has got its next piece elsewhere.
  void skip(std::size_t reader) {
    taken_[reader].pieces.store(taken_by(reader) + 1, std::memory_order_release);
  }

 private:
  static constexpr std::size_t kPlaces = 8;
  struct alignas(64) Place {
    std::atomic<std::uint64_t> given{0};  ///< number of the piece, from 1
    alignas(64) std::array<std::byte, kPieceBytes> bytes;
  };
  struct alignas(64) Taken {
    std::atomic<std::uint64_t> pieces{0};
  };
  const std::size_t readers_;
  std::array<Taken, kMostReaders> taken_;
  std::array<Place, kPlaces> places_;
};

/// The source of a reader's pieces: a ring, in which it has a number. None: it reads the memory
/// where it is.
struct RelayEnd {
  Relay* relay = nullptr;
  std::size_t reader = 0;
};

}  // namespace hvd
