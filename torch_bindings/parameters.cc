#include "torch_bindings/parameters.h"

#include <torch/torch.h>

#include <cstring>
#include <map>
#include <utility>

#include "torch_bindings/collectives.h"
#include "torch_bindings/optimizer.h"

namespace hvd {

void broadcast_parameters(const NamedTensors& tensors, int root_rank, const ProcessSet& process_set) {
  // One group per device: all or nothing, and one message of what differs if the models do.
  struct Group {
    std::vector<at::Tensor> tensors;
    std::vector<std::string> names;
  };
  std::map<std::string, Group> by_device;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined()) continue;
    Group& group = by_device[tensor.device().str()];
    group.tensors.push_back(tensor);
    group.names.push_back(name);
  }
  std::vector<Handle<std::vector<at::Tensor>>> handles;
  for (auto& [device, group] : by_device)
    handles.push_back(detail::grouped_broadcast_async_(
        std::move(group.tensors), std::move(group.names),
        {.name = "broadcast_parameters." + device.substr(0, device.find(':')), .root_rank = root_rank, .process_set = process_set}));
  for (const auto& handle : handles) handle.wait();
}

void broadcast_parameters(const torch::nn::Module& module, int root_rank, const ProcessSet& process_set) {
  NamedTensors tensors;
  for (const auto& item : module.named_parameters()) tensors.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) tensors.emplace_back(item.key(), item.value());
  broadcast_parameters(tensors, root_rank, process_set);
}

void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank, const ProcessSet& process_set) {
  auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer);
  const bool sharded = distributed != nullptr && distributed->is_sharded();
  torch::optim::Optimizer& target = distributed != nullptr && !sharded ? distributed->wrapped() : optimizer;
  std::pair<std::string, std::string> sent;  // the state, or why there is none
  if (rank() == root_rank || sharded) {      // the state of a sharded optimizer is on all ranks, which put it together
    try {
      detail::drop_scratch(target);
      std::ostringstream out;
      torch::save(target, out);
      sent.first = out.str();
    } catch (const c10::Error& error) {
      sent.second = error.what_without_backtrace();
    } catch (const InvalidArgument& error) {
      sent.second = error.what();
    }
  }
  const auto [state, failure] = broadcast_object(sent, root_rank, process_set);
  if (!failure.empty()) throw InvalidArgument("broadcast_optimizer_state: the root's optimizer cannot be saved: " + failure);
  if (rank() == root_rank) return;
  std::istringstream in(state);
  if (!sharded) target.state().clear();
  torch::serialize::InputArchive archive;
  archive.load_from(in);
  detail::load_state(optimizer, archive);
}

namespace detail {

std::string broadcast_text(std::string text, int root_rank, const ProcessSet& process_set) {
  at::Tensor size = torch::full({1}, static_cast<std::int64_t>(text.size()), torch::kInt64);
  broadcast_(size, {.root_rank = root_rank, .process_set = process_set});
  text.resize(static_cast<std::size_t>(size.item<std::int64_t>()));
  if (!text.empty())
    broadcast_(torch::from_blob(text.data(), {static_cast<std::int64_t>(text.size())}, torch::kUInt8),
               {.root_rank = root_rank, .process_set = process_set});
  return text;
}

std::vector<std::string> allgather_text(const std::string& text, const ProcessSet& process_set) {
  const auto bytes = static_cast<std::int64_t>(text.size());
  const at::Tensor sizes = allgather(torch::full({1}, bytes, torch::kInt64), {.process_set = process_set});
  at::Tensor mine = torch::empty({bytes}, torch::kUInt8);
  if (bytes > 0) std::memcpy(mine.mutable_data_ptr(), text.data(), text.size());
  const at::Tensor all = allgather(mine, {.process_set = process_set});
  const auto* from = static_cast<const char*>(all.const_data_ptr());
  std::vector<std::string> texts;
  for (std::int64_t i = 0; i < sizes.size(0); ++i) {
    const auto size = static_cast<std::size_t>(sizes[i].item<std::int64_t>());
    texts.emplace_back(from, size);
    from += size;
  }
  return texts;
}

}  // namespace detail

}  // namespace hvd
