#include "torch_bindings/sharding/shared_buffers.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_set>

#include "hvd/base/digest.h"
#include "hvd/base/text.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/reducer/join_rounds.h"

namespace hvd::detail {

namespace {

/// Below it a buffer travels each time: that costs less than to be told of a change that no version
/// counter has seen.
constexpr std::size_t kLargeBytes = std::size_t{64} << 10;

/// Kernels write to running statistics past their version counters, and backward needs none.
bool is_statistic(std::string_view name) {
  const auto last = name.substr(name.rfind('.') + 1);
  return last == "running_mean" || last == "running_var" || last == "num_batches_tracked";
}

/// Returns what travels of a buffer: the same memory, with a version counter of its own.
at::Tensor elements_of(const at::Tensor& buffer) { return carried(buffer.variable_data()); }

/// Tells autograd that the buffer has other values now: a graph that has saved it is refused.
void tell_autograd(const at::Tensor& buffer) {
  if (buffer.defined() && !buffer.is_inference()) buffer.unsafeGetTensorImpl()->bump_version();
}

/// In the order of their names, each once.
SharedBuffers::Named buffers_of(const torch::nn::Module& module) {
  SharedBuffers::Named buffers;
  for (const auto& item : module.named_buffers())
    if (item.value().defined()) buffers.emplace_back(item.key(), item.value());
  std::sort(buffers.begin(), buffers.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::unordered_set<const void*> known;
  std::erase_if(buffers, [&known](const auto& buffer) {
    return !known.insert(buffer.second.unsafeGetTensorImpl()).second;
  });
  return buffers;
}

}  // namespace

/// Buffers of one type, and all of them one after the other.
struct PackedBuffers {
  std::vector<at::Tensor> buffers;
  std::vector<at::Tensor> told;  ///< of each the one whose version counts; or undefined
  at::Tensor all;

  [[nodiscard]] bool are_plain() const {
    return std::all_of(buffers.begin(), buffers.end(), [](const auto& buffer) {
      return buffer.is_cpu() && buffer.is_contiguous();
    });
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
      for (std::size_t i = 0; i < buffers.size(); from += buffers[i++].nbytes()) {
        const std::size_t bytes = buffers[i].nbytes();
        if (bytes == 0 || std::memcmp(buffers[i].const_data_ptr(), from, bytes) == 0) continue;
        std::memcpy(buffers[i].mutable_data_ptr(), from, bytes);
        tell_autograd(told[i]);
      }
      return;
    }
    std::vector<at::Tensor> pieces;
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < buffers.size(); begin += buffers[i++].numel()) {
      const at::Tensor& buffer = buffers[i];
      pieces.push_back(all.slice(0, begin, begin + buffer.numel()).view(buffer.sizes()));
      if (told[i].defined() && !at::equal(buffer, pieces.back().to(buffer.device())))
        tell_autograd(told[i]);
    }
    at::_foreach_copy_(buffers, pieces);
  }
};

class SharedBuffers::Sharing {
 public:
  Sharing(const SharedBuffers& of, Named buffers) : all(std::move(buffers)) {
    std::map<at::ScalarType, PackedBuffers> by_type;
    std::uint64_t digest = 0;
    for (const auto& [name, buffer] : all) {
      digest = digest_of(static_cast<std::uint64_t>(buffer.scalar_type()), digest_of(name, digest));
      for (const auto size : buffer.sizes())
        digest = digest_of(static_cast<std::uint64_t>(size), digest);
      if (buffer.nbytes() < kLargeBytes || is_statistic(name)) {
        const at::Tensor elements = elements_of(buffer);
        auto& packed = by_type[elements.scalar_type()];
        packed.buffers.push_back(elements);
        // What kernels write past version counters no graph compares, whatever it is called.
        const bool is_told = !is_statistic(name) && of.is_changed(buffer);
        packed.told.push_back(is_told ? buffer : at::Tensor());
      } else {
        large.emplace_back(name, buffer);
        changed.push_back(of.is_changed(buffer) ? 1 : 0);
      }
    }
    if (all.empty()) return;
    const at::Device device = all.front().second.device();
    for (auto& [type, packed] : by_type) {
      packed.pack(device);
      types.push_back(std::move(packed));
    }
    Shape shape = shape_of_digest(digest);
    shape.push_back(0);
    names = at::empty(shape, at::TensorOptions(at::kByte).device(device));
  }
  /// Returns what travels each time: the small ones, and what differs where the ranks' buffers do.
  [[nodiscard]] std::vector<at::Tensor> always() const {
    std::vector<at::Tensor> tensors{names};
    for (const auto& packed : types) tensors.push_back(packed.all);
    return tensors;
  }
  void unpack() {
    for (auto& packed : types) packed.unpack();
  }

  const Named all;
  std::vector<PackedBuffers> types;
  at::Tensor names;  ///< no elements; its shape digests names, types, shapes; or undefined
  Named large;
  std::vector<std::uint8_t> changed;  ///< which of them have, on this rank
  std::optional<Handle<std::vector<at::Tensor>>> handle;
  std::optional<Handle<at::Tensor>> telling;  ///< which have on some rank
};

bool SharedBuffers::is_changed(const at::Tensor& buffer) const {
  const auto found = seen_.find(buffer.unsafeGetTensorImpl());
  return found == seen_.end() || buffer.is_inference() ||
         found->second.version != version_of(buffer) ||
         found->second.memory != buffer.const_data_ptr();
}

void SharedBuffers::are_equal() { are_equal(buffers_of(*module_)); }

void SharedBuffers::are_equal(const Named& buffers) {
  seen_.clear();
  for (const auto& [name, buffer] : buffers)
    seen_.emplace(buffer.unsafeGetTensorImpl(),
                  Seen{buffer, version_of(buffer), buffer.const_data_ptr()});
}

/// Begins to tell which of the large buffers have changed on some rank.
Handle<at::Tensor> SharedBuffers::tell(const std::vector<std::uint8_t>& changed) const {
  const at::Tensor marks = at::empty({static_cast<std::int64_t>(changed.size())}, at::kByte);
  if (!changed.empty()) std::memcpy(marks.mutable_data_ptr(), changed.data(), changed.size());
  return allreduce_async_(
      marks, {.name = name_ + "/changed", .op = ReduceOp::Max, .process_set = process_set_});
}

std::shared_ptr<SharedBuffers::Sharing> SharedBuffers::start() {
  const at::NoGradGuard no_gradient;
  auto sharing = std::make_shared<Sharing>(*this, buffers_of(*module_));
  if (sharing->all.empty()) return sharing;
  std::vector<std::string> names{"names, types and shapes of all buffers"};
  for (const auto& packed : sharing->types)
    names.push_back(
        formatted("all small buffers of type {}", at::toString(packed.all.scalar_type())));
  sharing->handle = grouped_broadcast_async_(
      sharing->always(), std::move(names),
      {.name = name_, .root_rank = process_set_.ranks().front(), .process_set = process_set_});
  if (!sharing->large.empty()) sharing->telling = tell(sharing->changed);
  return sharing;
}

void SharedBuffers::finish(Sharing& sharing) {
  if (!sharing.handle) return;
  const at::NoGradGuard no_gradient;
  const bool is_root = process_set_.rank() == 0;
  try {
    static_cast<void>(sharing.handle->wait());
  } catch (const Deadlock&) {  // the others are somewhere else
    throw;
  } catch (const Mismatch&) {
    tell_differences(sharing);
    throw;
  }
  if (!is_root) sharing.unpack();
  share_what_has_changed(sharing, nullptr, is_root);
  are_equal(sharing.all);
}

/// Collective over the ranks that have got a Mismatch. Throws one that says which buffers each has.
void SharedBuffers::tell_differences(const Sharing& sharing) const {
  try {  // some ranks have told, as they have large buffers, and the others have not yet
    static_cast<void>((sharing.telling ? *sharing.telling : tell({})).wait());
  } catch (const Mismatch&) {
  }
  Statements statements;
  for (const auto& [name, buffer] : sharing.all)
    statements.emplace_back(formatted("buffer '{}'", name), describe(buffer));
  agree_on(name_, statements, process_set_);
}

void SharedBuffers::share_what_has_changed(Sharing& sharing, const JoinRounds* rounds,
                                           bool is_root) {
  kept_.clear();
  if (!sharing.telling) return;
  const at::Tensor changed = sharing.telling->wait();
  std::map<std::string, std::pair<std::vector<at::Tensor>, std::vector<std::string>>> by_device;
  std::vector<std::pair<at::Tensor, at::Tensor>> before;  // and what was in it
  for (std::size_t i = 0; i < sharing.large.size(); ++i) {
    const auto& [name, buffer] = sharing.large[i];
    if (changed.const_data_ptr<std::uint8_t>()[i] == 0) {
      kept_.push_back(sharing.large[i]);
      continue;
    }
    auto& [tensors, names] = by_device[buffer.device().str()];
    tensors.push_back(elements_of(buffer));
    names.push_back(name);
    if (!is_root && sharing.changed[i] != 0) before.emplace_back(buffer, tensors.back().clone());
  }
  std::size_t number = 0;
  for (auto& [device, both] : by_device) {
    const std::string name = formatted("{}/large.{}", name_, number++);
    if (rounds != nullptr) {
      sum_of_training(both.first, name, is_root);
    } else {
      static_cast<void>(grouped_broadcast_async_(std::move(both.first), std::move(both.second),
                                                 {.name = name,
                                                  .root_rank = process_set_.ranks().front(),
                                                  .process_set = process_set_})
                            .wait());
    }
  }
  for (const auto& [buffer, values] : before)
    if (!at::equal(values, elements_of(buffer))) tell_autograd(buffer);
}

/// A sum of bytes, all but the root's zero: a broadcast would need the ranks that have joined, too.
void SharedBuffers::sum_of_training(const std::vector<at::Tensor>& tensors, const std::string& name,
                                    bool is_root) const {
  std::vector<at::Tensor> bytes;
  for (const auto& tensor : tensors) {
    // whose shape tells something
    bytes.push_back(tensor.numel() == 0 ? tensor : tensor.contiguous().view({-1}).view(at::kByte));
    if (!is_root) bytes.back() = at::zeros_like(bytes.back());
  }
  const auto sums =
      grouped_allreduce(bytes, {.name = name, .op = ReduceOp::Sum, .process_set = process_set_});
  if (is_root) return;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].numel() > 0)
      tensors[i].copy_(sums[i].view(tensors[i].scalar_type()).view(tensors[i].sizes()));
}

void SharedBuffers::share(const JoinRounds* rounds) {
  const at::NoGradGuard no_gradient;
  if (rounds == nullptr) return finish(*start());
  Sharing sharing(*this, buffers_of(*module_));
  if (sharing.all.empty()) return;
  const bool is_root = rounds->first_training() == hvd::rank();
  sum_of_training(sharing.always(), name_ + " of ranks that train", is_root);
  if (!is_root) sharing.unpack();
  if (!sharing.large.empty()) sharing.telling = tell(sharing.changed);
  share_what_has_changed(sharing, rounds, is_root);
  are_equal(sharing.all);
}

}  // namespace hvd::detail
