#include "hvd/engine/fast_path.h"

#include <algorithm>
#include <utility>

namespace hvd {

bool Lane::fits(const Immediate& call) const {
  if (signature->kind != call.kind || signature->tensors.empty()) return signature->kind == call.kind && signature->tensors.empty();
  const TensorSignature& tensor = signature->tensors.front();
  const bool reduces = call.kind == OpKind::Allreduce || call.kind == OpKind::Reducescatter;
  return tensor.dtype == call.dtype && std::equal(tensor.shape.begin(), tensor.shape.end(), call.shape.begin(), call.shape.end()) &&
         (!reduces || (signature->op == call.op && signature->prescale_factor == call.prescale_factor &&
                       signature->postscale_factor == call.postscale_factor)) &&
         (call.kind != OpKind::Broadcast || signature->root == call.root);
}

std::shared_ptr<Lane> Lanes::find(int process_set, OpKind kind, std::string_view name) const {
  const auto found = lanes_.find(View(process_set, kind, name));
  return found == lanes_.end() ? nullptr : found->second;
}

void Lanes::add(const UnitKey& key, std::shared_ptr<Lane> lane) { lanes_[key] = std::move(lane); }

std::shared_ptr<Lane> Lanes::remove(const UnitKey& key) {
  auto node = lanes_.extract(key);
  return node.empty() ? nullptr : std::move(node.mapped());
}

}  // namespace hvd
