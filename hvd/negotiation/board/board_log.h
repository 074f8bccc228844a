#pragma once
/// The log of a board: records that all ranks of the domain read in the same order. A ring of
/// bytes; who appends holds the board's lock. Nothing here blocks or throws.
// Tested in tests/hvd/negotiation/board_test.cc

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "hvd/base/wire.h"
#include "hvd/negotiation/board/board_view.h"

namespace hvd {

class BoardLog {
 public:
  static constexpr std::size_t kBytes = board_layout::kLogBytes;

  explicit BoardLog(const BoardView& board) : board_(board) {}

  /// Bytes appended so far.
  [[nodiscard]] std::uint64_t tail() const;
  /// Returns whether a record of `bytes` can be appended; false while a living rank has not read
  /// far enough to make room. Needs the lock.
  [[nodiscard]] bool has_room(std::size_t bytes);
  /// Returns whether a living rank has left more than so many bytes unread. One thread of this rank
  /// at a time, as `has_room`.
  [[nodiscard]] bool is_unread(std::uint64_t bytes);
  /// Appends one record. Needs the lock, and room: `has_room`, or for a record of a few bytes the
  /// reserve that it keeps. The appender has read the whole log and acted on the record already:
  /// its own position moves past it.
  void append(std::span<const std::byte> record);
  /// The next record this rank has not read, copied out; none when it has read all. One thread of
  /// the rank at a time. To the other ranks a record counts as read only when this is called again:
  /// until then its reader still acts on it, and needs the slots' words of its round.
  std::optional<Bytes> read_next();
  [[nodiscard]] std::uint64_t read_position() const { return position_; }
  /// Returns up to where `rank` has read.
  [[nodiscard]] std::uint64_t read_position(int rank) const;
  /// Returns up to where every rank that has not left has read.
  [[nodiscard]] std::uint64_t slowest_reader() const { return find_slowest().position; }
  /// The SlowestReader is the rank at that position; kNobody where all have read the whole log.
  struct SlowestReader {
    int rank;
    std::uint64_t position;
    bool operator==(const SlowestReader&) const = default;
  };
  [[nodiscard]] SlowestReader find_slowest() const;

 private:
  void copy_in(std::uint64_t at, std::span<const std::byte> bytes);
  void copy_out(std::uint64_t at, std::span<std::byte> bytes) const;

  const BoardView board_;
  std::uint64_t position_ = 0;
  std::uint64_t read_by_all_ = 0;  ///< at least up to there, when that was last looked for
};

}  // namespace hvd
