#include "torch_bindings/parameters/share_memory.h"

#include <torch/torch.h>

#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd {

std::size_t share_memory(torch::nn::Module& module) {
  const at::NoGradGuard no_gradient;
  std::vector<at::Tensor> tensors;
  std::size_t bytes = 0;
  const auto take = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !detail::has_memory_of_its_own(tensor)) return;
    for (const auto& other : tensors)
      if (other.is_same(tensor)) return;  // tied
    tensors.push_back(tensor);
    bytes += aligned_to_member(tensor.nbytes());
  };
  for (const auto& tensor : module.parameters()) take(tensor);
  for (const auto& tensor : module.buffers()) take(tensor);
  const auto memory = allocate_shared(bytes);
  if (!memory) return 0;
  std::size_t offset = 0;
  for (auto& tensor : tensors) {
    const at::Tensor moved = detail::view_of(memory, offset, tensor, tensor.scalar_type());
    offset += aligned_to_member(tensor.nbytes());
    moved.copy_(tensor);
    tensor.set_data(moved);
  }
  return tensors.size();
}

}  // namespace hvd
