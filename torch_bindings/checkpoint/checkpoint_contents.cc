#include "torch_bindings/checkpoint/checkpoint_contents.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <unordered_map>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "hvd/types.h"
#include "torch_bindings/collectives/objects.h"
#include "torch_bindings/files/archives.h"
#include "torch_bindings/optimizer/optimizer.h"

namespace hvd::detail {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

void check_format(InputArchive& archive) {
  c10::IValue format;
  if (!archive.try_read("format", format) || !format.isString() || format.toStringRef() != kFormat)
    throw CheckpointError("it is no checkpoint of this library");
}

std::vector<at::Tensor> texts_of_ranks(InputArchive& archive) {
  return value_at(archive, "ranks").toTensorVector();
}

std::string pack(const OfRank& state) {
  OutputArchive archive;
  archive.write("random", c10::IValue(state.random));
  archive.write("memory", c10::IValue(state.memory));
  archive.write("names", c10::IValue(state.names));
  archive.write("buffers", c10::IValue(state.buffers));
  return text_of(archive);
}

OfRank unpack(const std::string& text,
              const std::vector<std::pair<std::string, at::Tensor>>& known) {
  InputArchive archive = archive_of(text);
  OfRank state{.random = value_at(archive, "random").toTensorVector(),
               .memory = value_at(archive, "memory").toTensorVector(),
               .names = {},
               .buffers = {}};
  if (c10::IValue value; archive.try_read("names", value)) {
    state.names = value.to<std::vector<std::string>>();
  } else if (archive.try_read("places", value)) {
    for (const auto place : value.toIntVector())
      state.names.push_back(known.at(static_cast<std::size_t>(place)).first);
  } else {
    return state;
  }
  state.buffers = value_at(archive, "buffers").toTensorVector();
  return state;
}

void match(torch::nn::Module& module, InputArchive& archive, const std::string& prefix,
           std::vector<Found>& found) {
  const auto one = [&](const std::string& key, const at::Tensor& tensor, bool is_buffer) {
    if (!tensor.defined()) return;
    at::Tensor stored;
    if (!archive.try_read(key, stored, is_buffer))
      throw CheckpointError(formatted("it has no '{}{}'", prefix, key));
    if (stored.sizes() != tensor.sizes())
      throw CheckpointError(formatted("'{}{}' has shape {}, the model's has {}", prefix, key,
                                      to_string(stored.sizes().vec()),
                                      to_string(tensor.sizes().vec())));
    found.push_back({prefix + key, tensor, stored});
  };
  for (const auto& item : module.named_parameters(false)) one(item.key(), item.value(), false);
  for (const auto& item : module.named_buffers(false)) one(item.key(), item.value(), true);
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    InputArchive below;
    if (!archive.try_read(child.key(), below))
      throw CheckpointError(formatted("it has no module '{}{}'", prefix, child.key()));
    match(*child.value(), below, prefix + child.key() + ".", found);
  }
  for (const auto& key : archive.keys())
    if (!module.named_parameters(false).contains(key) &&
        !module.named_buffers(false).contains(key) && !module.named_children().contains(key))
      throw CheckpointError(formatted("it has '{}{}', which the model has not", prefix, key));
}

namespace {

/// Calls `both` for each two that are one tensor in the model, and two in the file.
void for_each_tied(const std::vector<Found>& found,
                   const std::function<void(const Found&, const Found&)>& both) {
  std::unordered_map<const void*, const Found*> known;
  for (const auto& item : found) {
    const auto [first, is_new] = known.emplace(item.tensor.unsafeGetTensorImpl(), &item);
    if (!is_new && !item.stored.is_same(first->second->stored)) both(*first->second, item);
  }
}

}  // namespace

void check_tied(const std::vector<Found>& found) {
  for_each_tied(found, [](const Found& first, const Found& second) {
    if (torch::equal(first.stored, second.stored)) return;
    throw CheckpointError(
        formatted("'{}' and '{}' are one tensor in the model and two that differ in the file; load "
                  "it into a model in which they are not tied",
                  first.name, second.name));
  });
}

std::vector<at::Tensor> to_be_equal(const std::vector<Found>& found) {
  std::vector<at::Tensor> all;
  for_each_tied(found, [&all](const Found& first, const Found& second) {
    all.insert(all.end(), {first.stored, second.stored});
  });
  return all;
}

NamesInOrder names_in_order(const torch::nn::Module& module, torch::optim::Optimizer& optimizer) {
  std::unordered_map<const void*, std::vector<std::string>> known;
  for (const auto& item : module.named_parameters())
    known[item.value().unsafeGetTensorImpl()].push_back(item.key());
  auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer);
  NamesInOrder names;
  for (const auto& group :
       distributed != nullptr ? distributed->param_groups() : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      const auto found = known.find(parameter.unsafeGetTensorImpl());
      names.push_back(found == known.end() ? std::vector<std::string>() : found->second);
    }
  return names;
}

void check_order(InputArchive& archive, const NamesInOrder& here) {
  c10::IValue value;
  if (!archive.try_read("optimizer_names", value)) return;
  const auto stored = value.to<NamesInOrder>();
  if (stored.size() != here.size()) return;  // it does not fit anyway, as its load says
  for (std::size_t i = 0; i < here.size(); ++i) {
    const auto is_also_here = [&](const std::string& name) {
      return std::ranges::find(here[i], name) != here[i].end();
    };
    if (stored[i].empty() || here[i].empty() || std::ranges::any_of(stored[i], is_also_here))
      continue;
    throw CheckpointError(
        formatted("parameter {} of its optimizer is '{}', of the one here '{}': the state goes by "
                  "their order, so give the optimizer the same",
                  i, stored[i].front(), here[i].front()));
  }
}

void write_parts(OutputArchive& archive, std::span<const CheckpointPart> parts) {
  if (parts.empty()) return;
  OutputArchive all(archive.compilation_unit());
  all.write("size", c10::IValue(static_cast<std::int64_t>(parts.size())));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    all.write(formatted("type.{}", i), c10::IValue(parts[i].type()));
    OutputArchive one(archive.compilation_unit());
    if (!parts[i].generator().defined()) parts[i].save(one);
    all.write(formatted("state.{}", i), one);
  }
  archive.write("parts", all);
}

std::vector<InputArchive> find_parts(InputArchive& archive, std::span<const CheckpointPart> parts) {
  std::vector<InputArchive> found(parts.size());
  if (parts.empty()) return found;
  InputArchive all;
  if (!archive.try_read("parts", all))
    throw CheckpointError(
        formatted("it was saved without parts, and the program has {}", parts.size()));
  const std::int64_t size = value_at(all, "size").toInt();
  if (size != static_cast<std::int64_t>(parts.size()))
    throw CheckpointError(formatted("it has {} parts, and the program {}", size, parts.size()));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const c10::IValue type = value_at(all, formatted("type.{}", i));
    if (type.toStringRef() != parts[i].type())
      throw CheckpointError(formatted("its part {} is a {}, that of the program a {}", i,
                                      type.toStringRef(), parts[i].type()));
    all.read(formatted("state.{}", i), found[i]);
  }
  return found;
}

std::string PartsLoad::load(std::vector<InputArchive>& states) {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i].generator().defined()) continue;
    try {
      OutputArchive before;
      parts_[i].save(before);
      before_.emplace_back(i, text_of(before));
      parts_[i].load(states[i]);
    } catch (...) {
      return formatted("its part {}, a {}, does not fit the one here: {}", i, parts_[i].type(),
                       words_of_current_exception());
    }
  }
  return "";
}

void PartsLoad::undo() {
  for (const auto& [i, text] : std::exchange(before_, {})) {
    InputArchive archive = archive_of(text);
    parts_[i].load(archive);
  }
}

}  // namespace hvd::detail
