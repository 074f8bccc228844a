#include "torch_bindings/checkpoint/checkpoint.h"

#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/checkpoint/checkpoint_contents.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/collectives/objects.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/files/archives.h"
#include "torch_bindings/files/checkpoint_reader.h"
#include "torch_bindings/files/file.h"
#include "torch_bindings/optimizer/optimizer.h"
#include "torch_bindings/optimizer/optimizer_state.h"
#include "torch_bindings/parameters/replica_guard.h"
#include "torch_bindings/parameters/shared_parameters.h"
#include "torch_bindings/parameters/wrappers.h"
#include "torch_bindings/platform/generators.h"
#include "torch_bindings/training/metrics.h"

namespace hvd {

/// The file's contents for this rank, and the places where they go.
struct Checkpoint::Contents {
  std::unique_ptr<detail::CheckpointReader> reader;
  torch::serialize::InputArchive optimizer;
  std::vector<torch::serialize::InputArchive> parts;
  std::vector<detail::Found> found;
  at::Tensor text_of_rank;  ///< undefined where other ranks have written the file
  detail::OfRank mine;
  std::map<std::string, at::Tensor> buffers;  ///< the module's, and those of parts
  Checkpoint::Extra extra;
  std::int64_t step = 0;
};

namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

using detail::Found, detail::OfRank;
using NamedBuffers = std::vector<std::pair<std::string, at::Tensor>>;

at::Device device_of(const torch::nn::Module& module) {
  const auto parameters = module.parameters();
  return parameters.empty() ? at::Device(at::kCPU) : parameters.front().device();
}

std::vector<at::Generator> generators(at::Device device) {
  std::vector<at::Generator> all{at::globalContext().defaultGenerator(at::kCPU)};
  if (device.is_cuda()) all.push_back(at::globalContext().defaultGenerator(device));
  return all;
}

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU, tensor.scalar_type(), false, /*copy=*/true);
}

/// Begins the names of what belongs to parts.
constexpr std::string_view kOfPart = "of part ";

/// Returns what may differ from rank to rank: the module's buffers, and after them that of parts.
NamedBuffers named_buffers(const torch::nn::Module& module, std::span<const CheckpointPart> parts) {
  NamedBuffers buffers;
  for (const auto& item : module.named_buffers())
    if (item.value().defined()) buffers.emplace_back(item.key(), item.value());
  for (std::size_t part = 0; part < parts.size(); ++part) {
    std::size_t place = 0;
    for (const auto& tensor : parts[part].of_rank())
      buffers.emplace_back(formatted("{}{}: {}", kOfPart, part, place++), tensor);
  }
  return buffers;
}

/// Returns whether `from` can be copied into `to`, one by one.
bool fits(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  return std::equal(to.begin(), to.end(), from.begin(), from.end(),
                    [](const auto& a, const auto& b) {
                      return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type();
                    });
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

/// Returns what has kept `call` from being done; empty if nothing has.
template <class Call>
std::string failure_of(const Call& call) {
  try {
    call();
    return {};
  } catch (...) {
    return failure_of_current_exception();
  }
}

Checkpoint::Extra extra_of(InputArchive& archive) {
  Checkpoint::Extra extra;
  const auto strings = detail::value_at(archive, "extra_strings").toGenericDict();
  for (const auto& item : strings)
    extra.strings[item.key().toStringRef()] = detail::text_of(item.value().toTensor());
  const auto tensors = detail::value_at(archive, "extra_tensors").toGenericDict();
  for (const auto& item : tensors)
    extra.tensors[item.key().toStringRef()] = item.value().toTensor().cpu();
  return extra;
}

/// Collective. Notes in `mine` the buffers that are not those which the first rank has after
/// `average()`, and so writes.
template <class Average>
void note_own_buffers(const NamedBuffers& named, const ProcessSet& set, OfRank& mine,
                      const Average& average) {
  std::vector<at::Tensor> own;
  for (const auto& [name, buffer] : named) own.push_back(on_host(buffer));
  average();
  if (set.size() == 1 || named.empty()) return;
  std::vector<at::Tensor> written;
  for (const auto& [name, buffer] : named) written.push_back(on_host(buffer));
  written = broadcast_object(written, set.ranks().front(), set);
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (torch::equal(own[i], written[i])) continue;
    mine.names.push_back(named[i].first);
    mine.buffers.push_back(own[i]);
  }
}

/// Writes `archive`, in which the optimizer is already, with the rest, beside the present file.
std::unique_ptr<detail::FreshFile> written(OutputArchive& archive, const std::string& path,
                                           const torch::nn::Module& module, std::int64_t step,
                                           const Checkpoint::Extra& extra) {
  OutputArchive of_model(archive.compilation_unit());
  module.save(of_model);
  c10::Dict<std::string, at::Tensor> strings, tensors;
  for (const auto& [name, text] : extra.strings) strings.insert(name, detail::bytes_of_text(text));
  for (const auto& [name, tensor] : extra.tensors) tensors.insert(name, tensor);
  archive.write("format", c10::IValue(detail::kFormat));
  archive.write("step", c10::IValue(step));
  archive.write("model", of_model);
  archive.write("extra_strings", c10::IValue(strings));
  archive.write("extra_tensors", c10::IValue(tensors));
  // LibTorch's writer is not told of a failure: its destructor would write on, and throw.
  auto fresh = std::make_unique<detail::FreshFile>(path);
  std::exception_ptr failure;
  archive.save_to([&](const void* data, std::size_t bytes) {
    try {
      if (!failure) fresh->write(data, bytes);
    } catch (const CheckpointError&) {
      failure = std::current_exception();
    }
    return bytes;
  });
  if (failure) std::rethrow_exception(failure);
  return fresh;
}

/// Calls what compares the ranks: its Mismatch names the file, and not what compares.
template <class Compare>
void with_path(const std::string& path, const Compare& compare) {
  try {
    compare();
  } catch (const Mismatch& error) {
    const std::string text = error.what();
    throw Mismatch(formatted("checkpoint {}: {}", path, text.substr(text.find(": ") + 2)));
  }
}

/// Throws Mismatch on all ranks unless all have the same parameters.
void check_replicas(const std::string& path, const torch::nn::Module& module,
                    const ProcessSet& set) {
  if (engine()->config().replica_guard == ReplicaGuard::Off) return;
  ReplicaComparer::Named named;
  for (const auto& item : module.named_parameters())
    if (item.value().defined()) named.emplace_back(item.key(), item.value());
  ReplicaComparer comparer("checkpoint", set);
  comparer.watch(named);
  with_path(path, [&] { comparer.check(); });  // it counts steps, and these are not the user's
}

}  // namespace

Checkpoint::Checkpoint(std::string path, CheckpointOptions options)
    : path_(std::move(path)), options_(std::move(options)) {
  if (path_.empty()) throw InvalidArgument("Checkpoint: the path is empty");
  if (options_.keep_last < 1)
    throw InvalidArgument(
        formatted("Checkpoint: keep_last is {}; it must be at least 1", options_.keep_last));
}

/// Throws on all ranks if any has a failure to tell; empty: none.
void Checkpoint::agree(const std::string& failure) const {
  const auto failures = allgather_object(failure, options_.process_set);
  const auto ranks = options_.process_set.ranks();
  for (std::size_t i = 0; i < failures.size(); ++i)
    if (!failures[i].empty())
      throw CheckpointError(formatted("checkpoint {}: rank {}: {}", path_, ranks[i], failures[i]));
}

/// Throws Mismatch on all ranks unless they have the same buffers, shard alike and want the same
/// done: what follows exchanges these.
void Checkpoint::check_alike(const torch::nn::Module& module,
                             const torch::optim::Optimizer& optimizer, std::int64_t step,
                             Parts parts) const {
  std::vector<std::string> types;
  for (const auto& part : parts) types.push_back(part.type());
  detail::Statements mine{
      {"the step", formatted("{}", step)},
      {"the list of parts", types.empty() ? "empty" : joined(types, ", ")},
      {"average_buffers", options_.average_buffers ? "true" : "false"},
      {"the optimizer", detail::is_sharded(optimizer) ? "sharded" : "not sharded"}};
  std::size_t place = 0;
  for (const auto& [name, buffer] : named_buffers(module, parts))
    mine.emplace_back(
        formatted("buffer {} '{}'", place++, name),
        formatted("{} {}", c10::toString(buffer.scalar_type()), to_string(buffer.sizes().vec())));
  with_path(path_, [&] { detail::agree_on("checkpoint", mine, options_.process_set); });
}

/// Returns the tensors that belong to this rank alone, as they are: to be saved, or to be filled.
std::vector<at::Tensor> Checkpoint::memory_of_rank(torch::optim::Optimizer& optimizer,
                                                   Parts parts) const {
  std::vector<at::Tensor> memory;
  const auto add = [&memory](const std::vector<at::Tensor>& more) {
    memory.insert(memory.end(), more.begin(), more.end());
  };
  if (auto* const distributed = dynamic_cast<DistributedOptimizer*>(&optimizer)) {
    add(distributed->compression_memory());
    add(distributed->state_of_rank());
  }
  if (options_.of_rank) add(options_.of_rank());
  for (const auto& part : parts)
    if (part.generator().defined()) memory.push_back(detail::generator_state(part.generator()));
  return memory;
}

void Checkpoint::write(const torch::nn::Module& module, torch::optim::Optimizer& given,
                       std::int64_t step, const Extra& extra, Parts parts) const {
  torch::optim::Optimizer& optimizer = detail::Wrappers::outermost(given, "Checkpoint::save()");
  const at::NoGradGuard no_gradient;
  const ProcessSet& set = options_.process_set;
  check_alike(module, optimizer, step, parts);
  check_replicas(path_, module, set);
  std::optional<AveragedBuffers> means;
  OfRank mine;
  note_own_buffers(named_buffers(module, parts), set, mine, [&] {
    if (options_.average_buffers) means.emplace(module, set);
  });
  std::string failure, packed;
  try {  // where it fails, this rank takes part in the rest, up to where all hear of it
    if (options_.random_state)
      for (const auto& generator : generators(device_of(module)))
        mine.random.push_back(detail::generator_state(generator));
    mine.memory = memory_of_rank(optimizer, parts);
    packed = detail::pack(mine);
  } catch (...) {
    failure = detail::words_of_current_exception();
  }
  // to the one that writes: all have as much as the model
  const auto of_ranks = detail::gather_text(packed, set);

  std::unique_ptr<detail::FreshFile> file;
  try {
    OutputArchive archive;
    OutputArchive of_optimizer(archive.compilation_unit()), pieces(archive.compilation_unit());
    const auto unsaved =
        detail::save_optimizer(optimizer, of_optimizer, pieces, set.ranks().front());
    if (!unsaved.own && !unsaved.states.empty())
      throw CheckpointError(formatted("{} overrides neither save nor load, and {}; override either",
                                      unsaved.type, joined(unsaved.states, ", ")));
    if (set.rank() == 0) {
      archive.write("optimizer", of_optimizer);
      archive.write("optimizer_parts", pieces);
      archive.write("optimizer_names", c10::IValue(detail::names_in_order(module, optimizer)));
      detail::write_parts(archive, parts);
      archive.write("ranks", c10::IValue(of_ranks));
      file = written(archive, path_, module, step, extra);
    }
  } catch (const c10::Error& error) {
    failure = formatted("the model or the optimizer cannot be saved ({})",
                        error.what_without_backtrace());
  } catch (...) {
    failure = failure_of_current_exception();
  }
  agree(failure);  // before the old file goes
  agree(failure_of([&] {
    if (file) file->replace(options_.keep_last);
  }));
}

/// Finds what there is, and wants all that has to be looked at. Throws for what does not fit,
/// before anything changes.
void Checkpoint::find_contents(const std::string& outline, torch::nn::Module& module,
                               const detail::OptimizerLoad& load, Contents& contents) const {
  contents.reader = std::make_unique<detail::CheckpointReader>(outline, device_of(module));
  InputArchive& archive = contents.reader->archive();
  detail::check_format(archive);
  InputArchive of_model;
  archive.read("model", of_model);
  archive.read("optimizer", contents.optimizer);
  detail::match(module, of_model, "", contents.found);
  std::vector<at::Tensor> later = detail::texts_of_ranks(archive);
  if (later.size() == static_cast<std::size_t>(options_.process_set.size())) {
    const at::Tensor& mine = later[static_cast<std::size_t>(options_.process_set.rank())];
    contents.text_of_rank = torch::empty_like(mine);
    contents.reader->want(contents.text_of_rank, mine);
  }
  for (const auto& item : contents.found) later.push_back(item.stored);
  if (load.takes_unread())
    for (auto& tensor : detail::tensors_of(contents.optimizer)) later.push_back(std::move(tensor));
  contents.reader->want_all_but(later);
  for (const auto& tensor : detail::to_be_equal(contents.found)) contents.reader->want(tensor);
}

/// Looks at what is there now. Throws for what does not fit, before anything changes.
void Checkpoint::read_contents(torch::nn::Module& module, Parts parts, Contents& contents) {
  InputArchive& archive = contents.reader->archive();
  detail::check_tied(contents.found);
  contents.step = detail::value_at(archive, "step").toInt();
  contents.extra = extra_of(archive);
  contents.parts = detail::find_parts(archive, parts);
  const auto named = named_buffers(module, parts);
  contents.buffers.insert(named.begin(), named.end());
  if (contents.text_of_rank.defined())
    contents.mine = detail::unpack(detail::text_of(contents.text_of_rank), named);
  for (const auto& name : contents.mine.names)
    if (!contents.buffers.contains(name) && !(parts.empty() && name.starts_with(kOfPart)))
      throw CheckpointError(
          formatted("it has a buffer '{}' of this rank, and the model has none", name));
}

/// Returns on all ranks what CheckpointReader takes, of the file that the first one opens.
std::string Checkpoint::open(std::unique_ptr<detail::CheckpointFile>& file,
                             bool all_at_once) const {
  std::string outline;
  agree(failure_of([&] {
    if (options_.process_set.rank() != 0) return;
    file = std::make_unique<detail::CheckpointFile>(path_, all_at_once);
    outline = file->outline();
  }));
  return detail::broadcast_text(std::move(outline), options_.process_set.ranks().front(),
                                options_.process_set);
}

std::int64_t Checkpoint::read(torch::nn::Module& module, torch::optim::Optimizer& given,
                              Extra& extra, Parts parts) const {
  torch::optim::Optimizer& optimizer = detail::Wrappers::outermost(given, "Checkpoint::load()");
  const at::NoGradGuard no_gradient;
  const ProcessSet& set = options_.process_set;
  std::unique_ptr<detail::CheckpointFile> file;
  const std::string outline = open(file, any(!device_of(module).is_cpu(), set));
  std::optional<detail::OptimizerLoad> of_optimizer;
  detail::PartsLoad of_parts(parts);
  Contents contents;
  agree(failure_of([&] {
    of_optimizer.emplace(optimizer);
    find_contents(outline, module, *of_optimizer, contents);
    detail::check_order(contents.reader->archive(), detail::names_in_order(module, optimizer));
  }));
  const auto read_values = [&] { agree(contents.reader->read(file.get(), &set)); };
  read_values();
  agree(failure_of([&] {  // what can fail on one rank alone comes before anything changes
    read_contents(module, parts, contents);
    static_cast<void>(memory_of_rank(optimizer, parts));
  }));
  std::string failure;
  try {
    InputArchive pieces;
    const bool in_pieces =
        contents.reader->archive().try_read("optimizer_parts", pieces) && !pieces.keys().empty();
    of_optimizer->load(contents.optimizer, in_pieces ? &pieces : nullptr, options_.load_options, {},
                       contents.reader.get());
  } catch (...) {
    failure = formatted("the state of its optimizer does not fit the one here: {}",
                        detail::words_of_current_exception());
  }
  if (failure.empty()) failure = of_parts.load(contents.parts);
  try {
    agree(failure);
    agree(failure_of([&] {
      for (auto& item : contents.found) contents.reader->want(item.tensor, item.stored);
    }));
    read_values();
  } catch (...) {
    of_parts.undo();
    of_optimizer->undo();
    throw;
  }
  agree(failure_of([&] { fill_own(module, optimizer, parts, contents); }));
  extra = std::move(contents.extra);
  return contents.step;
}

void Checkpoint::fill_own(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                          Parts parts, const Contents& contents) const {
  const OfRank& mine = contents.mine;
  SharedParameters::written_alike();
  const auto all = generators(device_of(module));
  for (std::size_t i = 0; options_.random_state && i < std::min(all.size(), mine.random.size());
       ++i)
    detail::set_generator_state(all[i], mine.random[i]);
  // with the state that the optimizer has now
  const auto memory = memory_of_rank(optimizer, parts);
  if (fits(memory, mine.memory)) {
    for (std::size_t i = 0; i < memory.size(); ++i) memory[i].copy_(mine.memory[i]);
    auto generator = memory.end();
    for (auto part = parts.rbegin(); part != parts.rend(); ++part)
      if (part->generator().defined()) detail::set_generator_state(part->generator(), *--generator);
  }
  for (std::size_t i = 0; i < mine.names.size(); ++i)
    if (const auto found = contents.buffers.find(mine.names[i]); found != contents.buffers.end())
      at::Tensor(found->second).copy_(mine.buffers[i]);
}

Checkpoint::Extra Checkpoint::read_extra() const {
  Extra extra;
  agree(failure_of([&] {
    if (options_.process_set.rank() != 0) return;
    const detail::CheckpointFile file(path_, false);
    detail::CheckpointReader reader(file.outline(), at::Device(at::kCPU));
    detail::check_format(reader.archive());
    for (const char* const key : {"extra_strings", "extra_tensors"}) {
      const auto values = detail::value_at(reader.archive(), key).toGenericDict();
      for (const auto& item : values) reader.want(item.value().toTensor());
    }
    if (const std::string failure = reader.read(&file, nullptr); !failure.empty())
      throw CheckpointError(failure);
    extra = extra_of(reader.archive());
  }));
  const int root = options_.process_set.ranks().front();
  return {broadcast_object(extra.strings, root, options_.process_set),
          broadcast_object(extra.tensors, root, options_.process_set)};
}

bool Checkpoint::exists() const {
  const int found = options_.process_set.rank() == 0 && ::access(path_.c_str(), F_OK) == 0 ? 1 : 0;
  return broadcast_object(found, options_.process_set.ranks().front(), options_.process_set) != 0;
}

}  // namespace hvd
