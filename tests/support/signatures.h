#pragma once
/// Signatures for tests of the negotiation.

#include <memory>
#include <utility>

#include "hvd/negotiation/values/signature.h"

namespace hvd::test {

/// Of one tensor.
inline Signature signature_of(DataType dtype, Shape shape, OpKind kind = OpKind::Allreduce) {
  Signature signature;
  signature.kind = kind;
  signature.tensors.push_back({dtype, std::move(shape)});
  return signature;
}

inline SharedSignature shared(Signature signature) {
  return std::make_shared<const Signature>(std::move(signature));
}

}  // namespace hvd::test
