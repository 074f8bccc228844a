#pragma once
/// Room card: well-formed values for the fuzz targets to start from.

#include <string>

#include "hvd/negotiation/negotiator.h"
#include "tests/support/dice.h"

namespace hvd::fuzz {

inline Signature signature(test::Dice& dice, OpKind kind, std::size_t ranks) {
  Signature signature;
  signature.kind = kind;
  signature.op = static_cast<ReduceOp>(dice.below(6));
  signature.prescale_factor = dice.below(3);
  signature.root = dice.below(3);
  if (kind == OpKind::Barrier || kind == OpKind::Join) return signature;
  for (int t = kind == OpKind::Control ? 1 : dice.between(1, 3); t > 0; --t) {
    TensorSignature tensor;
    tensor.dtype = static_cast<DataType>(dice.below(kDataTypes));
    tensor.shape = kind == OpKind::Control ? Shape{0, 2} : Shape{dice.between(4, 9), dice.below(4)};
    if (kind == OpKind::Alltoall) tensor.splits.assign(ranks, 1);
    signature.tensors.push_back(std::move(tensor));
  }
  return signature;
}

inline UnitKey key(test::Dice& dice, int sets) {
  const auto kind = static_cast<OpKind>(dice.below(8));
  if (kind == OpKind::Control) return {0, kind, std::string(dice.one_in(2) ? kAddProcessSet : kRemoveProcessSet)};
  if (kind == OpKind::Join) return {dice.below(sets), kind, std::string(kJoin)};
  return {dice.below(sets), kind, dice.one_in(4) ? unnamed(kind, 0, 0) : std::string(1, static_cast<char>('a' + dice.below(4)))};
}

inline Agreement agreement(test::Dice& dice) {
  Agreement what;
  for (int i = dice.below(4); i > 0; --i) what.present.push_back(dice.one_in(2));
  if (dice.one_in(4)) what.absent.push_back(dice.below(4));
  what.last = dice.below(4);
  return what;
}

}  // namespace hvd::fuzz
