#include "torch_bindings/checkpoint.h"

#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hvd/base/text.h"
#include "hvd/negotiation/signature.h"
#include "torch_bindings/agreement.h"
#include "torch_bindings/file.h"
#include "torch_bindings/metrics.h"
#include "torch_bindings/optimizer.h"
#include "torch_bindings/optimizer_state.h"
#include "torch_bindings/parameters.h"

namespace hvd {

namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr const char* kFormat = "hvd checkpoint 1";

/// What belongs to one rank alone.
struct OfRank {
  std::vector<at::Tensor> random;  ///< generators' states: CPU, and GPU
  std::vector<at::Tensor> memory;  ///< of compression
  /// Buffers that are not those of the file's model, by name.
  std::vector<std::string> names;
  std::vector<at::Tensor> buffers;
};

at::Device device_of(const torch::nn::Module& module) {
  const auto parameters = module.parameters();
  return parameters.empty() ? at::Device(at::kCPU) : parameters.front().device();
}

std::vector<at::Generator> generators(at::Device device) {
  std::vector<at::Generator> all{at::globalContext().defaultGenerator(at::kCPU)};
  if (device.is_cuda()) all.push_back(at::globalContext().defaultGenerator(device));
  return all;
}

std::string pack(const OfRank& state) {
  OutputArchive archive;
  archive.write("random", c10::IValue(state.random));
  archive.write("memory", c10::IValue(state.memory));
  archive.write("names", c10::IValue(state.names));
  archive.write("buffers", c10::IValue(state.buffers));
  std::ostringstream out;
  archive.save_to(out);
  return out.str();
}

/// `known`: the module's buffers; files had their places once.
OfRank unpack(const std::string& text, const std::vector<std::pair<std::string, at::Tensor>>& known) {
  InputArchive archive;
  std::istringstream in(text);
  archive.load_from(in, at::Device(at::kCPU));
  c10::IValue random, memory, names, places, buffers;
  archive.read("random", random);
  archive.read("memory", memory);
  OfRank state{random.toTensorVector(), memory.toTensorVector(), {}, {}};
  if (archive.try_read("names", names)) {
    for (const auto& name : names.toListRef()) state.names.push_back(name.toStringRef());
  } else if (archive.try_read("places", places)) {
    for (const auto place : places.toIntVector()) state.names.push_back(known.at(static_cast<std::size_t>(place)).first);
  } else {
    return state;
  }
  archive.read("buffers", buffers);
  state.buffers = buffers.toTensorVector();
  return state;
}

at::Tensor on_host(const at::Tensor& tensor) { return tensor.detach().to(at::kCPU, tensor.scalar_type(), false, /*copy=*/true); }

std::vector<std::pair<std::string, at::Tensor>> named_buffers(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  for (const auto& item : module.named_buffers())
    if (item.value().defined()) buffers.emplace_back(item.key(), item.value());
  return buffers;
}

/// Whether `from` can be copied into `to`, one by one.
bool fits(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  return std::equal(to.begin(), to.end(), from.begin(), from.end(),
                    [](const auto& a, const auto& b) { return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type(); });
}

/// A string as a tensor of bytes: archives keep tensors as they are, strings they pickle.
at::Tensor bytes_of(const std::string& text) {
  return torch::from_blob(const_cast<char*>(text.data()), {static_cast<std::int64_t>(text.size())}, torch::kUInt8).clone();
}
std::string text_of(const at::Tensor& bytes) {
  const at::Tensor here = bytes.cpu().contiguous();
  return {static_cast<const char*>(here.const_data_ptr()), here.nbytes()};
}

/// What a tensor of the module becomes.
struct Found {
  std::string name;
  at::Tensor tensor, stored;
};

/// Finds what each tensor of the module becomes, as Module::save nests them. Throws for what does not fit.
void match(torch::nn::Module& module, InputArchive& archive, const std::string& prefix, std::vector<Found>& found) {
  const auto one = [&](const std::string& key, const at::Tensor& tensor, bool is_buffer) {
    if (!tensor.defined()) return;
    at::Tensor stored;
    if (!archive.try_read(key, stored, is_buffer)) throw CheckpointError(formatted("it has no '{}{}'", prefix, key));
    if (stored.sizes() != tensor.sizes())
      throw CheckpointError(formatted("'{}{}' has shape {}, the model's has {}", prefix, key, to_string(stored.sizes().vec()),
                                      to_string(tensor.sizes().vec())));
    found.push_back({prefix + key, tensor, stored});
  };
  for (const auto& item : module.named_parameters(false)) one(item.key(), item.value(), false);
  for (const auto& item : module.named_buffers(false)) one(item.key(), item.value(), true);
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    InputArchive below;
    if (!archive.try_read(child.key(), below)) throw CheckpointError(formatted("it has no module '{}{}'", prefix, child.key()));
    match(*child.value(), below, prefix + child.key() + ".", found);
  }
}

/// Throws if tensors that are one here (tied weights) are several in the file, with other values.
void check_tied(const std::vector<Found>& found) {
  std::unordered_map<const void*, const Found*> known;
  for (const auto& item : found) {
    const auto [first, is_new] = known.emplace(item.tensor.unsafeGetTensorImpl(), &item);
    if (is_new || item.stored.is_same(first->second->stored) || torch::equal(item.stored, first->second->stored)) continue;
    throw CheckpointError(
        formatted("'{}' and '{}' are one tensor in the model and two that differ in the file; load it into a model in "
                  "which they are not tied",
                  first->second->name, item.name));
  }
}

/// What is at the front of every checkpoint.
void check_format(InputArchive& archive) {
  c10::IValue format;
  if (!archive.try_read("format", format) || !format.isString() || format.toStringRef() != kFormat)
    throw CheckpointError("it is no checkpoint of this library");
}

/// The text of the exception now being handled. Errors of collectives, which all ranks have, go on.
std::string failure_of_current_exception() {
  try {
    throw;
  } catch (const CheckpointError& error) {
    return error.what();
  } catch (const InvalidArgument& error) {
    return error.what();
  } catch (const Error&) {
    throw;
  } catch (const c10::Error&) {
    return formatted("it is damaged or no checkpoint ({})", detail::words_of_current_exception());
  } catch (...) {
    return detail::words_of_current_exception();
  }
}

Checkpoint::Extra extra_of(InputArchive& archive) {
  Checkpoint::Extra extra;
  c10::IValue values;
  archive.read("extra_strings", values);
  for (const auto& item : values.toGenericDict()) extra.strings[item.key().toStringRef()] = text_of(item.value().toTensor());
  archive.read("extra_tensors", values);
  for (const auto& item : values.toGenericDict()) extra.tensors[item.key().toStringRef()] = item.value().toTensor().cpu();
  return extra;
}

}  // namespace

Checkpoint::Checkpoint(std::string path, CheckpointOptions options) : path_(std::move(path)), options_(std::move(options)) {
  if (path_.empty()) throw InvalidArgument("Checkpoint: the path is empty");
  if (options_.keep_last < 1) throw InvalidArgument(formatted("Checkpoint: keep_last is {}; it must be at least 1", options_.keep_last));
}

/// Throws on all ranks if any has a failure to tell; empty: none.
void Checkpoint::agree(const std::string& failure) const { tell(allgather_object(failure, options_.process_set)); }

void Checkpoint::tell(const std::vector<std::string>& failures) const {
  const auto ranks = options_.process_set.ranks();
  for (std::size_t i = 0; i < failures.size(); ++i)
    if (!failures[i].empty()) throw CheckpointError(formatted("checkpoint {}: rank {}: {}", path_, ranks[i], failures[i]));
}

/// Throws on all ranks: CheckpointError if any has a failure to tell, Mismatch unless they have the same buffers, shard alike and want
/// the same done: what follows exchanges these.
void Checkpoint::check_alike(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer, const std::string& failure) const {
  std::vector<std::string> mine{options_.average_buffers ? "average_buffers" : "no average_buffers",
                                detail::is_sharded(optimizer) ? "a sharded optimizer" : "an optimizer that is not sharded"};
  for (const auto& buffer : module.named_buffers()) {
    const at::Tensor& tensor = buffer.value();
    mine.push_back(formatted(
        "buffer '{}' is {}", buffer.key(),
        tensor.defined() ? formatted("{} {}", c10::toString(tensor.scalar_type()), to_string(tensor.sizes().vec())) : "undefined"));
  }
  std::vector<std::string> failures;
  std::vector<std::vector<std::string>> all;
  for (auto& [why, what] : allgather_object(std::pair(failure, mine), options_.process_set)) {
    failures.push_back(std::move(why));
    all.push_back(std::move(what));
  }
  tell(failures);
  std::size_t same = all.front().size();
  for (const auto& theirs : all)
    same = std::min(same, static_cast<std::size_t>(
                              std::mismatch(theirs.begin(), theirs.end(), all.front().begin(), all.front().end()).first - theirs.begin()));
  std::vector<std::string> said;
  for (const auto& theirs : all) said.push_back(same < theirs.size() ? theirs[same] : "no further buffer");
  if (std::all_of(said.begin(), said.end(), [&](const auto& words) { return words == said.front(); })) return;
  throw Mismatch(formatted("checkpoint {}: what the ranks save differs: {}", path_, grouped_by_rank(options_.process_set.ranks(), said)));
}

/// As it is, to be saved or filled.
std::vector<at::Tensor> Checkpoint::memory_of_rank(torch::optim::Optimizer& optimizer) const {
  std::vector<at::Tensor> memory;
  if (auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer)) memory = distributed->compression_memory();
  if (!options_.of_rank) return memory;
  const auto more = options_.of_rank();
  memory.insert(memory.end(), more.begin(), more.end());
  return memory;
}

void Checkpoint::save(const torch::nn::Module& module, torch::optim::Optimizer& optimizer, std::int64_t step, const Extra& extra) const {
  const at::NoGradGuard no_gradient;
  const ProcessSet& set = options_.process_set;
  OfRank mine;
  std::string failure;
  try {
    if (options_.random_state)
      for (const auto& generator : generators(device_of(module))) mine.random.push_back(generator.get_state());
    mine.memory = memory_of_rank(optimizer);
  } catch (...) {
    failure = detail::words_of_current_exception();
  }
  check_alike(module, optimizer, failure);
  const auto named = named_buffers(module);
  std::optional<AveragedBuffers> means;
  std::vector<at::Tensor> own;
  for (const auto& [name, buffer] : named) own.push_back(on_host(buffer));
  if (options_.average_buffers) means.emplace(module, set);
  if (set.size() > 1 && !named.empty()) {
    std::vector<at::Tensor> written;
    for (const auto& [name, buffer] : named) written.push_back(on_host(buffer));
    written = broadcast_object(written, set.ranks().front(), set);
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (torch::equal(own[i], written[i])) continue;
      mine.names.push_back(named[i].first);
      mine.buffers.push_back(own[i]);
    }
  }
  const auto of_ranks = detail::gather_text(pack(mine), set);  // to the one that writes: all have as much as the model

  std::string file;
  try {
    OutputArchive archive;
    OutputArchive of_optimizer(archive.compilation_unit()), parts(archive.compilation_unit());
    const auto unsaved = detail::save_optimizer(optimizer, of_optimizer, parts);  // of a sharded one: collective
    if (!unsaved.own && !unsaved.states.empty())
      throw CheckpointError(
          formatted("{} overrides neither save nor load, and {}; override either", unsaved.type, joined(unsaved.states, ", ")));
    if (set.rank() == 0) {
      OutputArchive of_model(archive.compilation_unit());
      module.save(of_model);
      c10::Dict<std::string, at::Tensor> strings, tensors;
      for (const auto& [name, text] : extra.strings) strings.insert(name, bytes_of(text));
      for (const auto& [name, tensor] : extra.tensors) tensors.insert(name, tensor);
      archive.write("format", c10::IValue(kFormat));
      archive.write("step", c10::IValue(step));
      archive.write("model", of_model);
      archive.write("optimizer", of_optimizer);
      archive.write("optimizer_parts", parts);
      archive.write("ranks", c10::IValue(of_ranks));
      archive.write("extra_strings", c10::IValue(strings));
      archive.write("extra_tensors", c10::IValue(tensors));
      std::ostringstream out;
      archive.save_to(out);
      file = out.str();
    }
  } catch (const c10::Error& error) {
    failure = formatted("the model or the optimizer cannot be saved ({})", error.what_without_backtrace());
  } catch (...) {
    failure = failure_of_current_exception();
  }
  agree(failure);  // before the old file goes
  try {
    if (set.rank() == 0) detail::replace_file(path_, file, options_.keep_last);
  } catch (...) {
    failure = failure_of_current_exception();
  }
  agree(failure);
}

/// On all ranks, what the first one reads.
std::string Checkpoint::read_file() const {
  std::pair<std::string, std::string> found;  // the file, or why not
  if (options_.process_set.rank() == 0) {
    try {
      found.first = detail::read_whole_file(path_);
      if (found.first.empty()) found.second = "it is empty";
    } catch (const CheckpointError& error) {
      found.second = error.what();
    }
  }
  agree(found.second);
  return detail::broadcast_text(std::move(found.first), options_.process_set.ranks().front(), options_.process_set);
}

std::int64_t Checkpoint::load(torch::nn::Module& module, torch::optim::Optimizer& optimizer) const {
  Extra extra;
  return load(module, optimizer, extra);
}

std::int64_t Checkpoint::load(torch::nn::Module& module, torch::optim::Optimizer& optimizer, Extra& extra) const {
  const at::NoGradGuard no_gradient;
  const ProcessSet& set = options_.process_set;
  const at::Device device = device_of(module);
  std::istringstream in(read_file());
  std::string failure;
  InputArchive archive;
  std::vector<Found> found;
  std::vector<at::Tensor> memory;
  std::map<std::string, at::Tensor> buffers;
  OfRank mine;
  Extra its_extra;
  std::int64_t step = 0;
  try {  // what can fail on one rank alone comes before anything changes
    archive.load_from(in, device);
    check_format(archive);
    InputArchive of_model;
    archive.read("model", of_model);
    match(module, of_model, "", found);
    check_tied(found);
    c10::IValue value;
    archive.read("step", value);
    step = value.toInt();
    its_extra = extra_of(archive);
    const auto named = named_buffers(module);
    buffers.insert(named.begin(), named.end());
    archive.read("ranks", value);
    const auto states = value.toTensorVector();
    if (states.size() == static_cast<std::size_t>(set.size())) mine = unpack(text_of(states[static_cast<std::size_t>(set.rank())]), named);
    for (const auto& name : mine.names)
      if (!buffers.contains(name)) throw CheckpointError(formatted("it has a buffer '{}' of this rank, and the model has none", name));
    memory = memory_of_rank(optimizer);
  } catch (...) {
    failure = failure_of_current_exception();
  }
  agree(failure);
  detail::OptimizerLoad of_optimizer(optimizer);
  try {
    InputArchive own, parts;
    archive.read("optimizer", own);
    const bool in_parts = archive.try_read("optimizer_parts", parts) && !parts.keys().empty();
    of_optimizer.load(own, in_parts ? &parts : nullptr, options_.load_options);
  } catch (...) {
    failure = formatted("the state of its optimizer does not fit the one here: {}", detail::words_of_current_exception());
  }
  try {
    agree(failure);
  } catch (...) {
    of_optimizer.undo();
    throw;
  }
  try {
    for (auto& item : found) item.tensor.copy_(item.stored);
    auto all = generators(device);
    for (std::size_t i = 0; options_.random_state && i < std::min(all.size(), mine.random.size()); ++i) all[i].set_state(mine.random[i]);
    if (fits(memory, mine.memory))
      for (std::size_t i = 0; i < memory.size(); ++i) memory[i].copy_(mine.memory[i]);
    for (std::size_t i = 0; i < mine.names.size(); ++i) buffers.at(mine.names[i]).copy_(mine.buffers[i]);
  } catch (...) {
    failure = failure_of_current_exception();
  }
  agree(failure);
  extra = std::move(its_extra);
  return step;
}

Checkpoint::Extra Checkpoint::read_extra() const {
  std::string failure;
  Extra extra;
  try {
    if (options_.process_set.rank() == 0) {
      InputArchive archive;
      std::istringstream in(detail::read_whole_file(path_));
      archive.load_from(in, at::Device(at::kCPU));
      check_format(archive);
      extra = extra_of(archive);
    }
  } catch (...) {
    failure = failure_of_current_exception();
  }
  agree(failure);
  const int root = options_.process_set.ranks().front();
  return {broadcast_object(extra.strings, root, options_.process_set), broadcast_object(extra.tensors, root, options_.process_set)};
}

bool Checkpoint::exists() const {
  const int found = options_.process_set.rank() == 0 && ::access(path_.c_str(), F_OK) == 0 ? 1 : 0;
  return broadcast_object(found, options_.process_set.ranks().front(), options_.process_set) != 0;
}

}  // namespace hvd
