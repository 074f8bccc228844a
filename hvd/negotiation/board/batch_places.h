#pragma once
/// The batches under way on a board: a place for each, which all ranks of the domain see. Any
/// thread of the rank; the functions that want the board's lock say so.
// Tested in tests/hvd/negotiation/board_test.cc

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hvd/negotiation/board/board_view.h"
#include "hvd/negotiation/values/capabilities.h"

namespace hvd {

class BatchPlaces {
 public:
  static constexpr std::size_t kPlaces = board_layout::kBatchPlaces;
  static constexpr std::size_t kOpenCounts = board_layout::kOpenCounts;

  explicit BatchPlaces(const BoardView& board) : board_(board) {}

  [[nodiscard]] BatchState& state(std::uint64_t sequence) const;
  /// Returns sequence numbers for `count` batches, whose places are free; none if there are not so
  /// many. Needs the lock, until they are opened.
  [[nodiscard]] std::vector<std::uint64_t> find_places(std::size_t count) const
      HVD_REQUIRES(board_lock);
  /// Prepares a batch's place. `group`: the batch counts among those of this number, as far as
  /// kOpenCounts tells numbers apart.
  void open(std::uint64_t sequence, std::uint32_t group) HVD_REQUIRES(board_lock);
  /// Returns how many batches of the group have been opened and not yet retired.
  [[nodiscard]] std::uint32_t open_count(std::uint32_t group) const HVD_REQUIRES(board_lock);
  /// Marks the batch as over for whoever cuts the next one; the first rank to say so counts. False
  /// if already said.
  bool retire(std::uint64_t sequence, std::uint32_t group) HVD_REQUIRES(board_lock);
  /// Returns whether every rank of the domain that takes part has departed.
  [[nodiscard]] bool is_over(std::uint64_t sequence) const;
  /// This rank needs the batch's state no more; `members` ranks take part here.
  void depart(std::uint64_t sequence, std::uint32_t members);

 private:
  const BoardView board_;
};

}  // namespace hvd
