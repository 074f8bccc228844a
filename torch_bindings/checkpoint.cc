#include "torch_bindings/checkpoint.h"

#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "hvd/signature.h"
#include "hvd/text.h"
#include "torch_bindings/file.h"
#include "torch_bindings/metrics.h"
#include "torch_bindings/optimizer.h"
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
  /// Buffers that are not those of the file's model, by their place among all.
  std::vector<std::int64_t> places;
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
  archive.write("places", c10::IValue(state.places));
  archive.write("buffers", c10::IValue(state.buffers));
  std::ostringstream out;
  archive.save_to(out);
  return out.str();
}

OfRank unpack(const std::string& text) {
  InputArchive archive;
  std::istringstream in(text);
  archive.load_from(in, at::Device(at::kCPU));
  c10::IValue random, memory, places, buffers;
  archive.read("random", random);
  archive.read("memory", memory);
  if (!archive.try_read("places", places)) return {random.toTensorVector(), memory.toTensorVector(), {}, {}};
  archive.read("buffers", buffers);
  return {random.toTensorVector(), memory.toTensorVector(), places.toIntVector(), buffers.toTensorVector()};
}

std::vector<at::Tensor> on_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.detach().to(at::kCPU, tensor.scalar_type(), false, /*copy=*/true));
  return copies;
}

/// A string as a tensor of bytes: archives keep tensors as they are, strings they pickle.
at::Tensor bytes_of(const std::string& text) {
  return torch::from_blob(const_cast<char*>(text.data()), {static_cast<std::int64_t>(text.size())}, torch::kUInt8).clone();
}
std::string text_of(const at::Tensor& bytes) {
  const at::Tensor here = bytes.cpu().contiguous();
  return {static_cast<const char*>(here.const_data_ptr()), here.nbytes()};
}

/// Where each tensor of the module goes, and what it becomes, as Module::save nests them. Throws for what does not fit.
void match(torch::nn::Module& module, InputArchive& archive, const std::string& prefix,
           std::vector<std::pair<at::Tensor, at::Tensor>>& found) {
  const auto one = [&](const std::string& key, const at::Tensor& tensor, bool is_buffer) {
    if (!tensor.defined()) return;
    at::Tensor stored;
    if (!archive.try_read(key, stored, is_buffer)) throw CheckpointError(formatted("it has no '{}{}'", prefix, key));
    if (stored.sizes() != tensor.sizes())
      throw CheckpointError(formatted("'{}{}' has shape {}, the model's has {}", prefix, key, to_string(stored.sizes().vec()),
                                      to_string(tensor.sizes().vec())));
    found.emplace_back(tensor, stored);
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

void load_optimizer(torch::optim::Optimizer& optimizer, InputArchive& archive, bool with_options) {
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
  auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer);
  auto& groups = distributed != nullptr ? distributed->param_groups() : optimizer.param_groups();
  for (const auto& group : groups) options.push_back(group.options().clone());
  if (distributed == nullptr || !distributed->is_sharded())  // what the file does not have must not stay
    (distributed != nullptr ? distributed->state() : optimizer.state()).clear();
  detail::load_state(optimizer, archive);
  if (with_options) return;
  for (std::size_t i = 0; i < options.size(); ++i) groups[i].set_options(std::move(options[i]));
  if (distributed != nullptr) distributed->param_groups();  // takes them over
}

/// What is at the front of every checkpoint.
void check_format(InputArchive& archive) {
  c10::IValue format;
  if (!archive.try_read("format", format) || !format.isString() || format.toStringRef() != kFormat)
    throw CheckpointError("it is no checkpoint of this library");
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

std::string Checkpoint::failure_text(const std::exception& error) const {
  const auto* const of_torch = dynamic_cast<const c10::Error*>(&error);
  if (of_torch == nullptr) return error.what();
  std::string words = of_torch->what_without_backtrace();
  return formatted("it is damaged or no checkpoint ({})", words.substr(0, words.find('\n')));
}

/// Throws on all ranks if any has a failure to tell; empty: none.
void Checkpoint::agree(const std::string& failure) const {
  const auto failures = allgather_object(failure, options_.process_set);
  const auto ranks = options_.process_set.ranks();
  for (std::size_t i = 0; i < failures.size(); ++i)
    if (!failures[i].empty()) throw CheckpointError(formatted("checkpoint {}: rank {}: {}", path_, ranks[i], failures[i]));
}

/// Throws Mismatch, on all ranks, unless they have the same buffers and want the same done with them: what follows exchanges these.
void Checkpoint::check_buffers(const torch::nn::Module& module) const {
  std::vector<std::string> mine{options_.average_buffers ? "average_buffers" : "no average_buffers"};
  for (const auto& buffer : module.named_buffers()) {
    const at::Tensor& tensor = buffer.value();
    mine.push_back(formatted(
        "buffer '{}' is {}", buffer.key(),
        tensor.defined() ? formatted("{} {}", c10::toString(tensor.scalar_type()), to_string(tensor.sizes().vec())) : "undefined"));
  }
  const auto all = allgather_object(mine, options_.process_set);
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
  check_buffers(module);
  auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer);
  OfRank mine;
  if (options_.random_state)
    for (const auto& generator : generators(device_of(module))) mine.random.push_back(generator.get_state());
  mine.memory = memory_of_rank(optimizer);
  const auto buffers = module.buffers();
  const auto own = on_host(buffers);
  std::optional<AveragedBuffers> means;
  if (options_.average_buffers) means.emplace(module, set);
  if (set.size() > 1 && !buffers.empty()) {
    const auto written = broadcast_object(on_host(buffers), set.ranks().front(), set);
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (torch::equal(own[i], written[i])) continue;
      mine.places.push_back(static_cast<std::int64_t>(i));
      mine.buffers.push_back(own[i]);
    }
  }
  const auto of_ranks = detail::allgather_text(pack(mine), set);

  std::string failure;
  OutputArchive archive;
  try {
    detail::drop_scratch(distributed != nullptr ? distributed->wrapped() : optimizer);
    OutputArchive of_optimizer(archive.compilation_unit());
    optimizer.save(of_optimizer);  // of a sharded one: collective
    if (set.rank() == 0) {
      OutputArchive of_model(archive.compilation_unit());
      module.save(of_model);
      c10::Dict<std::string, at::Tensor> strings, tensors;
      for (const auto& [name, text] : extra.strings) strings.insert(name, bytes_of(text));
      for (const auto& [name, tensor] : extra.tensors) tensors.insert(name, tensor);
      std::vector<at::Tensor> states;
      for (const auto& text : of_ranks) states.push_back(bytes_of(text));
      archive.write("format", c10::IValue(kFormat));
      archive.write("step", c10::IValue(step));
      archive.write("model", of_model);
      archive.write("optimizer", of_optimizer);
      archive.write("ranks", c10::IValue(states));
      archive.write("extra_strings", c10::IValue(strings));
      archive.write("extra_tensors", c10::IValue(tensors));
      std::ostringstream out;
      archive.save_to(out);
      detail::replace_file(path_, out.str(), options_.keep_last);
    }
  } catch (const CheckpointError& error) {
    failure = error.what();
  } catch (const InvalidArgument& error) {
    failure = error.what();
  } catch (const c10::Error& error) {
    failure = formatted("the model or the optimizer cannot be saved ({})", error.what_without_backtrace());
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
  const at::Device device = device_of(module);
  InputArchive archive;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;
  std::istringstream in(read_file());
  std::string failure;
  std::int64_t step = 0;
  try {
    archive.load_from(in, device);
    check_format(archive);
    InputArchive of_model;
    archive.read("model", of_model);
    match(module, of_model, "", tensors);
    c10::IValue value;
    archive.read("step", value);
    step = value.toInt();
    extra = extra_of(archive);
  } catch (const std::exception& error) {
    failure = failure_text(error);
  }
  agree(failure);
  try {
    InputArchive of_optimizer;
    archive.read("optimizer", of_optimizer);
    load_optimizer(optimizer, of_optimizer, options_.load_options);
    for (auto& [to, from] : tensors) to.copy_(from);
    c10::IValue ranks;
    archive.read("ranks", ranks);
    const auto states = ranks.toTensorVector();
    const bool as_many = states.size() == static_cast<std::size_t>(options_.process_set.size());
    const OfRank mine = as_many ? unpack(text_of(states[static_cast<std::size_t>(options_.process_set.rank())])) : OfRank();
    auto all = generators(device);
    for (std::size_t i = 0; options_.random_state && i < std::min(all.size(), mine.random.size()); ++i) all[i].set_state(mine.random[i]);
    auto memory = memory_of_rank(optimizer);
    const auto fits = [&] {
      if (memory.size() != mine.memory.size()) return false;
      for (std::size_t i = 0; i < memory.size(); ++i)
        if (memory[i].sizes() != mine.memory[i].sizes() || memory[i].scalar_type() != mine.memory[i].scalar_type()) return false;
      return true;
    };
    const bool known = fits();
    for (std::size_t i = 0; i < memory.size() && known; ++i) memory[i].copy_(mine.memory[i]);
    auto buffers = module.buffers();
    for (std::size_t i = 0; i < mine.places.size(); ++i) buffers.at(static_cast<std::size_t>(mine.places[i])).copy_(mine.buffers[i]);
  } catch (const std::exception& error) {
    failure = failure_text(error);
  }
  agree(failure);
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
  } catch (const std::exception& error) {
    failure = failure_text(error);
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
