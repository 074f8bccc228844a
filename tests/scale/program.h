#pragma once
/// A Program is what the simulated ranks submit in every step: the same submissions on all of them,
/// as the optimizer wrapper makes them from a network's gradients. It is a value.

#include <cstdint>
#include <string>
#include <vector>

#include "hvd/negotiation/table/negotiator.h"

namespace scale {

/// One submission: a tensor, or a bucket of gradients that becomes ready together.
struct Unit {
  hvd::UnitKey key;
  hvd::SharedSignature signature;
};

struct Program {
  std::vector<Unit> units;
  /// True: each is waited for before the next is submitted. False: all are submitted at once, as at
  /// the end of a backward pass.
  bool one_by_one = false;
};

/// The gradients of one of the bench's models, fp32, dealt to buckets of at most `bucket_bytes`
/// (the optimizer wrapper's rule; 0: every gradient alone). Shapes are flat: the bench's models
/// know numbers of elements only.
Program gradients_of(const std::string& model,
                     std::uint64_t bucket_bytes = std::uint64_t{25} << 20);

}  // namespace scale
