#pragma once
/// Well-formed values for the fuzz targets to start from.

#include <string>

#include "hvd/negotiation/table/negotiator.h"
#include "tests/support/random.h"

namespace hvd::fuzz {

inline Signature signature(test::Random& random, OpKind kind, std::size_t ranks) {
  Signature signature;
  signature.kind = kind;
  signature.op = static_cast<ReduceOp>(random.below(6));
  signature.prescale_factor = random.below(3);
  signature.root = random.below(3);
  if (kind == OpKind::Barrier || kind == OpKind::Join) return signature;
  for (int t = kind == OpKind::Control ? 1 : random.between(1, 3); t > 0; --t) {
    TensorSignature tensor;
    tensor.dtype = static_cast<DataType>(random.below(kDataTypes));
    tensor.shape =
        kind == OpKind::Control ? Shape{0, 2} : Shape{random.between(4, 9), random.below(4)};
    if (kind == OpKind::Alltoall) tensor.splits.assign(ranks, 1);
    signature.tensors.push_back(std::move(tensor));
  }
  return signature;
}

inline UnitKey key(test::Random& random, int sets) {
  const auto kind = static_cast<OpKind>(random.below(8));
  if (kind == OpKind::Control)
    return {0, kind, std::string(random.one_in(2) ? kAddProcessSet : kRemoveProcessSet)};
  if (kind == OpKind::Join) return {random.below(sets), kind, std::string(kJoin)};
  return {random.below(sets), kind,
          random.one_in(4) ? unnamed(kind, 0, 0)
                           : std::string(1, static_cast<char>('a' + random.below(4)))};
}

inline Agreement agreement(test::Random& random) {
  Agreement what;
  for (int i = random.below(4); i > 0; --i) what.present.push_back(random.one_in(2));
  if (random.one_in(4)) what.absent.push_back(random.below(4));
  what.last = random.below(4);
  return what;
}

}  // namespace hvd::fuzz
