#include "torch_bindings/parameters/share_memory.h"

#include <torch/torch.h>

#include <unordered_set>

#include "hvd/hvd.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd {

std::size_t detail::move_to_shared_memory(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_gradient;
  std::vector<at::Tensor> moving;
  std::unordered_set<const void*> known;
  std::size_t bytes = 0;
  for (const auto& tensor : tensors) {
    if (!tensor.defined() || !has_memory_of_its_own(tensor) ||
        !known.insert(tensor.unsafeGetTensorImpl()).second)
      continue;
    moving.push_back(tensor);
    bytes += aligned_to_member(tensor.nbytes());
  }
  const auto memory = allocate_shared(bytes);
  if (!memory) return 0;
  std::size_t offset = 0;
  for (auto& tensor : moving) {
    const at::Tensor moved = view_of(memory, offset, tensor, tensor.scalar_type());
    offset += aligned_to_member(tensor.nbytes());
    moved.copy_(tensor);
    tensor.set_data(moved);
  }
  return moving.size();
}

std::size_t share_memory(torch::nn::Module& module) {
  std::vector<at::Tensor> tensors = module.parameters();
  const auto buffers = module.buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  return detail::move_to_shared_memory(tensors);
}

}  // namespace hvd
