#pragma once
/// What only some ranks do, or can fail at, all ranks learn of through these functions: no rank
/// goes on alone into a collective that never

/// comes. Collective: all ranks call them at the same place.

#include <functional>
#include <stdexcept>
#include <string>

namespace examples {

/// Raised on every rank when `together` failed on any. The text is empty but on the first rank that
/// failed, so that it is printed once.
class Refused : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Does `work` on this rank and waits for the verdict of all. Throws Refused on all ranks if `work`
/// threw on any.
void collectively(const std::function<void()>& work);
/// Does collective work that fails on all ranks alike, if it fails. Throws Refused with the text on
/// rank 0.
void fail_on_all(const std::function<void()>& work);
/// The same as `together` with work for rank 0 alone.
void on_rank_zero(const std::function<void()>& work);

/// The text of an exception without LibTorch's stack of addresses; of one that a data loader's
/// worker threw, what it was there.
std::string words_of(const std::exception& error);

}  // namespace examples
