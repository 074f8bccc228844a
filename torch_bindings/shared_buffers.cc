#include "torch_bindings/shared_buffers.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "torch_bindings/collectives.h"
#include "torch_bindings/join_rounds.h"

namespace hvd::detail {

/// Buffers of one type, and all of them one after the other.
struct PackedBuffers {
  std::vector<at::Tensor> buffers;
  at::Tensor all;

  [[nodiscard]] bool are_plain() const {
    return std::all_of(buffers.begin(), buffers.end(), [](const auto& buffer) { return buffer.is_cpu() && buffer.is_contiguous(); });
  }
  void pack(at::Device device) {
    if (!are_plain()) {
      std::vector<at::Tensor> flat;
      for (const auto& buffer : buffers) flat.push_back(buffer.to(device).reshape({-1}));
      all = at::cat(flat);
      return;
    }
    std::int64_t elements = 0;
    for (const auto& buffer : buffers) elements += buffer.numel();
    all = at::empty({elements}, buffers.front().options());
    auto* to = static_cast<std::byte*>(all.mutable_data_ptr());
    for (const auto& buffer : buffers) {
      if (buffer.nbytes() > 0) std::memcpy(to, buffer.const_data_ptr(), buffer.nbytes());
      to += buffer.nbytes();
    }
  }
  void unpack() {
    if (are_plain()) {
      const auto* from = static_cast<const std::byte*>(all.const_data_ptr());
      for (const auto& buffer : buffers) {
        if (buffer.nbytes() > 0) std::memcpy(buffer.mutable_data_ptr(), from, buffer.nbytes());
        from += buffer.nbytes();
      }
      return;
    }
    std::vector<at::Tensor> pieces;
    std::int64_t begin = 0;
    for (const auto& buffer : buffers) {
      pieces.push_back(all.slice(0, begin, begin + buffer.numel()).view(buffer.sizes()));
      begin += buffer.numel();
    }
    at::_foreach_copy_(buffers, pieces);
  }
};

class SharedBuffers::Sharing {
 public:
  explicit Sharing(const torch::nn::Module& module) {
    std::map<at::ScalarType, PackedBuffers> by_type;
    std::optional<at::Device> device;
    for (const auto& buffer : module.buffers()) {
      if (!buffer.defined()) continue;
      if (!device) device = buffer.device();
      by_type[buffer.scalar_type()].buffers.push_back(buffer.variable_data());  // the same memory, a version counter of its own
    }
    for (auto& [type, packed] : by_type) {
      packed.pack(*device);
      types.push_back(std::move(packed));
    }
  }
  void unpack() {
    for (auto& packed : types) packed.unpack();
  }

  std::vector<PackedBuffers> types;
  std::optional<Handle<std::vector<at::Tensor>>> handle;
};

std::shared_ptr<SharedBuffers::Sharing> SharedBuffers::start() const {
  const at::NoGradGuard no_gradient;
  auto sharing = std::make_shared<Sharing>(*module_);
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
  for (const auto& packed : sharing->types) {
    tensors.push_back(packed.all);
    names.push_back(std::string("all buffers of type ") + at::toString(packed.all.scalar_type()));
  }
  if (!tensors.empty())
    sharing->handle = grouped_broadcast_async_(std::move(tensors), std::move(names),
                                               {.name = name_, .root_rank = process_set_.ranks().front(), .process_set = process_set_});
  return sharing;
}

void SharedBuffers::finish(Sharing& sharing) const {
  if (!sharing.handle) return;
  const at::NoGradGuard no_gradient;
  static_cast<void>(sharing.handle->wait());
  if (process_set_.rank() != 0) sharing.unpack();
}

/// A sum of bytes, all but the root's zero: a broadcast would need the ranks that have joined, too.
void SharedBuffers::share_of_training(Sharing& sharing, const JoinRounds& rounds) const {
  if (sharing.types.empty()) return;
  const bool is_root = rounds.first_training() == hvd::rank();
  std::vector<at::Tensor> bytes;
  for (const auto& packed : sharing.types) {
    bytes.push_back(packed.all.view(at::kByte));
    if (!is_root) bytes.back().zero_();
  }
  grouped_allreduce_(bytes, {.name = name_ + " of ranks that train", .op = ReduceOp::Sum, .process_set = process_set_});
  if (!is_root) sharing.unpack();
}

void SharedBuffers::share(const JoinRounds* rounds) const {
  const at::NoGradGuard no_gradient;
  if (rounds == nullptr) return finish(*start());
  Sharing sharing(*module_);
  share_of_training(sharing, *rounds);
}

}  // namespace hvd::detail
