#include "torch_bindings/optimizer/parameters.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "hvd/base/log.h"
#include "hvd/base/text.h"
#include "hvd/negotiation/values/unit_names.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/files/archives.h"
#include "torch_bindings/optimizer/optimizer_state.h"
#include "torch_bindings/parameters/shared_parameters.h"
#include "torch_bindings/parameters/wrappers.h"

namespace hvd {

namespace {

/// A tensor with all the names that it has (tied weights have several), and where it is among the
/// devices of this rank.
struct Item {
  std::vector<std::string> names;
  at::Tensor tensor;
  std::string device;
  [[nodiscard]] std::string name() const { return joined(names, ", "); }
};

/// In the order of their names, each tensor once. Throws InvalidArgument if a name is there twice.
std::vector<Item> in_order(const NamedTensors& tensors) {
  std::map<std::string, at::Tensor> by_name;
  for (const auto& [name, tensor] : tensors)
    if (!by_name.emplace(name, tensor).second)
      throw InvalidArgument(
          formatted("broadcast_parameters: the name '{}' is given twice; the ranks' tensors go by "
                    "their names",
                    name));
  std::vector<Item> items;
  std::unordered_map<const void*, std::size_t> known;
  std::vector<std::string> devices;  // "cpu", "cuda:0"
  for (const auto& [name, tensor] : by_name) {
    if (tensor.defined()) {
      const auto [place, first] = known.emplace(tensor.unsafeGetTensorImpl(), items.size());
      if (!first) {
        items[place->second].names.push_back(name);
        continue;
      }
      if (tensor.layout() != at::kStrided || tensor.is_quantized())
        throw InvalidArgument(
            formatted("broadcast_parameters: '{}' is {}; only dense tensors can be broadcast", name,
                      tensor.is_quantized() ? "quantized" : "sparse"));
    }
    items.push_back({{name}, tensor, {}});
    if (!tensor.defined()) continue;
    const std::string device = tensor.device().str(), kind = device.substr(0, device.find(':'));
    auto found = std::find(devices.begin(), devices.end(), device);
    if (found == devices.end()) found = devices.insert(devices.end(), device);
    const auto before = std::count_if(devices.begin(), found,
                                      [&](const auto& other) { return other.starts_with(kind); });
    items.back().device = before == 0 ? kind : formatted("{}.{}", kind, before);
  }
  return items;
}

}  // namespace

void broadcast_parameters(const NamedTensors& tensors, int root_rank,
                          const ProcessSet& process_set) {
  detail::check_root("broadcast_parameters", root_rank, process_set);
  const auto items = in_order(tensors);
  detail::Statements statements{{"the root", formatted("rank {}", root_rank)}};
  for (const auto& item : items) {
    const bool plain = item.device.empty() || item.device.find('.') == std::string::npos;
    statements.emplace_back(
        formatted("tensor '{}'", item.name()),
        detail::describe(item.tensor) + (plain ? "" : formatted(" ({})", item.device)));
  }
  detail::agree_on("broadcast_parameters", statements, process_set);
  // One group per device: all or nothing.
  struct Group {
    std::vector<at::Tensor> tensors;
    std::vector<std::string> names;
  };
  std::map<std::string, Group> by_device;
  for (const auto& item : items) {
    if (!item.tensor.defined()) continue;
    Group& group = by_device[item.device];
    group.tensors.push_back(detail::carried(item.tensor.detach()));
    group.names.push_back(item.name());
  }
  std::vector<Handle<std::vector<at::Tensor>>> handles;
  for (auto& [device, group] : by_device)
    handles.push_back(
        detail::grouped_broadcast_async_(std::move(group.tensors), std::move(group.names),
                                         {.name = library_name("broadcast_parameters." + device),
                                          .root_rank = root_rank,
                                          .process_set = process_set}));
  for (const auto& handle : handles) handle.wait();
  SharedParameters::written_alike();
}

void broadcast_parameters(const torch::nn::Module& module, int root_rank,
                          const ProcessSet& process_set) {
  NamedTensors tensors;
  const auto parameters = module.named_parameters();
  for (const auto& item : parameters) tensors.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers())
    tensors.emplace_back(parameters.contains(item.key()) ? "buffer " + item.key() : item.key(),
                         item.value());
  broadcast_parameters(tensors, root_rank, process_set);
}

namespace {

constexpr const char* kOfState = "broadcast_optimizer_state";

/// The root's optimizer as an archive, or why there is none.
std::pair<std::string, std::string> state_text(torch::optim::Optimizer& optimizer, bool root,
                                               bool alone) {
  using torch::serialize::OutputArchive;
  try {
    OutputArchive archive, own(archive.compilation_unit()), parts(archive.compilation_unit());
    const auto unsaved = detail::save_optimizer(optimizer, own, parts);
    auto missing = unsaved.states;
    missing.insert(missing.end(), unsaved.options.begin(), unsaved.options.end());
    if (!unsaved.own && !missing.empty() && !alone)
      return {"", formatted("{} overrides neither save nor load, and {}; override either",
                            unsaved.type, joined(missing, ", "))};
    if (root && !alone && !unsaved.own && !unsaved.rates.empty())
      log(LogLevel::Warning,
          "{}: of the options {} nothing but the learning rate is sent, as they do not override "
          "serialize",
          kOfState, joined(unsaved.rates, ", "));
    archive.write("own", own);
    archive.write("parts", parts);
    return {detail::text_of(archive), ""};
  } catch (const InvalidArgument& error) {
    return {"", error.what()};
  } catch (const Error&) {
    throw;  // of a collective: on all ranks
  } catch (...) {
    return {"", detail::words_of_current_exception()};
  }
}

}  // namespace

void broadcast_optimizer_state(torch::optim::Optimizer& given, int root_rank,
                               const ProcessSet& process_set) {
  using torch::serialize::InputArchive;
  torch::optim::Optimizer& optimizer = detail::Wrappers::outermost(given, kOfState);
  const at::NoGradGuard no_gradient;
  detail::check_root(kOfState, root_rank, process_set);
  auto outline = detail::outline_of(optimizer);
  outline.emplace_back("the root", formatted("rank {}", root_rank));
  detail::agree_on(kOfState, outline, process_set);
  const bool root = rank() == root_rank;
  std::pair<std::string, std::string> sent;
  // The state of a sharded optimizer is on all ranks, which put it together.
  if (root || detail::is_sharded(optimizer))
    sent = state_text(optimizer, root, process_set.size() == 1);
  const auto [state, failure] = broadcast_object(sent, root_rank, process_set);
  const auto names = broadcast_object(detail::names_of(optimizer), root_rank, process_set);
  if (!failure.empty())
    throw InvalidArgument(
        formatted("{}: the root's optimizer cannot be saved: {}", kOfState, failure));
  detail::OptimizerLoad load(optimizer);
  std::string refusal;
  if (!root) {
    try {
      const auto& groups = optimizer.param_groups();
      const bool empty = groups.empty() || groups.front().params().empty();
      InputArchive archive = detail::archive_of(
          state, empty ? at::Device(at::kCPU) : groups.front().params().front().device());
      InputArchive own, parts;
      archive.read("own", own);
      archive.read("parts", parts);
      load.load(own, parts.keys().empty() ? nullptr : &parts, /*with_options=*/true, names);
    } catch (const std::exception&) {
      refusal = detail::words_of_current_exception();
    }
  }
  const auto refusals = detail::allgather_text(refusal, process_set);
  const auto refused = std::find_if(refusals.begin(), refusals.end(),
                                    [](const auto& words) { return !words.empty(); });
  if (refused == refusals.end()) return;
  load.undo();
  throw InvalidArgument(
      formatted("{}: rank {} cannot load the state of rank {}: {}", kOfState,
                process_set.ranks()[static_cast<std::size_t>(refused - refusals.begin())],
                root_rank, *refused));
}

}  // namespace hvd
