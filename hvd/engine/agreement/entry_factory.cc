#include "hvd/engine/agreement/entry_factory.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "hvd/base/text.h"
#include "hvd/engine/agreement/controller.h"
#include "hvd/engine/core/repeated_op.h"

namespace hvd {

namespace {

// which a clock can still add
constexpr std::chrono::nanoseconds kLongestDeadline = std::chrono::hours(24 * 365 * 100);

void check_splits(const TensorArgument& tensor, std::size_t ranks, const std::string& what) {
  const auto& splits = tensor.splits;
  if (splits.size() != ranks)
    throw InvalidArgument(
        formatted("{}: {} splits for {} ranks; one number of rows for each rank is needed", what,
                  splits.size(), ranks));
  std::int64_t sum = 0;
  for (const auto rows : splits) {
    if (rows < 0 || rows > tensor.shape.front() - sum)
      throw InvalidArgument(formatted("{}: the splits {} do not fit into the {} rows of the tensor",
                                      what, to_string(splits), tensor.shape.front()));
    sum += rows;
  }
}

void check_elements(const TensorArgument& tensor, std::size_t ranks, const std::string& what) {
  if (!has_possible_sizes(tensor.shape)) return;  // `make` refuses it
  const auto& splits = tensor.splits;
  std::int64_t left = element_count(tensor.shape);
  for (const auto elements : splits) left = elements < 0 || elements > left ? -1 : left - elements;
  if (splits.size() == ranks && left == 0) return;
  throw InvalidArgument(
      formatted("{}: the splits {} are not all {} elements of the tensor, dealt to {} ranks", what,
                to_string(splits), element_count(tensor.shape), ranks));
}

void check_memory(const Submission& submission) {
  if (submission.kind == OpKind::Control) return;  // its shape is a list of ranks
  const bool needs_output =
      submission.kind == OpKind::Allreduce || submission.kind == OpKind::Broadcast;
  for (std::size_t i = 0; i < submission.tensors.size(); ++i) {
    const auto& tensor = submission.tensors[i];
    if (tensor.input != nullptr && (tensor.output != nullptr || !needs_output)) continue;
    if (element_count(tensor.shape) > 0)
      throw InvalidArgument(
          formatted("{} '{}': tensor {} of shape {} has no memory: its {} is a null pointer",
                    name_of(submission.kind), display_name(submission.name), i,
                    to_string(tensor.shape), tensor.input == nullptr ? "input" : "output"));
  }
}

TensorMemory memory_of(const TensorArgument& tensor) {
  return {tensor.input, tensor.output,
          static_cast<std::size_t>(element_count(tensor.shape)) * element_bytes(tensor.dtype)};
}

void check_overlaps(const Submission& submission) {
  if (submission.kind != OpKind::Allreduce || submission.tensors.size() < 2) return;
  std::vector<TensorMemory> group(submission.tensors.size());
  std::ranges::transform(submission.tensors, group.begin(), memory_of);
  if (const auto overlap = find_overlap(group))
    throw InvalidArgument(formatted(
        "{} '{}': the result of tensor {} of the group is to lie where tensor {} does; "
        "give it memory of its own, or that of its input",
        name_of(submission.kind), display_name(submission.name), overlap->written, overlap->other));
}

/// Moves the input of an allreduce on the host to its output where they overlap in part: backends
/// write some of an output while they still read the rest of its input.
void make_one_of_overlapping(Submission& submission) {
  if (submission.kind != OpKind::Allreduce || submission.device.kind != DeviceKind::Cpu) return;
  for (auto& tensor : submission.tensors) {
    const TensorMemory memory = memory_of(tensor);
    if (!memory.overlaps_in_part()) continue;
    std::memmove(tensor.output, tensor.input, memory.bytes);
    tensor.input = tensor.output;
  }
}

}  // namespace

void EntryFactory::check(const Submission& submission, const ProcessSetInfo& set) const {
  const auto what = [&] {
    return formatted("{} '{}'", name_of(submission.kind), display_name(submission.name));
  };
  if (set.rank < 0)
    throw InvalidArgument(formatted("{}: rank {} is not in process set {} (ranks {})", what(),
                                    parts_.topology.rank, submission.process_set,
                                    rank_list(set.ranks)));
  if (submission.kind == OpKind::Broadcast &&
      std::find(set.ranks.begin(), set.ranks.end(), submission.root) == set.ranks.end())
    throw InvalidArgument(formatted("{}: root rank {} is not in process set {} (ranks {})", what(),
                                    submission.root, submission.process_set, rank_list(set.ranks)));
  if (submission.deadline < std::chrono::nanoseconds(0))
    throw InvalidArgument(formatted("{}: a deadline of {} ns; it must be positive, or 0 for none",
                                    what(), submission.deadline.count()));
  if (submission.op > ReduceOp::BitXor || submission.device.kind > DeviceKind::Cuda ||
      std::any_of(submission.tensors.begin(), submission.tensors.end(),
                  [](const auto& tensor) { return static_cast<int>(tensor.dtype) >= kDataTypes; }))
    throw InvalidArgument(
        formatted("{}: an element type, operation or kind of device that does not exist", what()));
  if (submission.device.kind == DeviceKind::Cuda && parts_.device == EngineParts::kNoGpu)
    throw InvalidArgument(
        formatted("{}: the tensor is said to be on cuda:{}, and rank {} has no GPU", what(),
                  submission.device.index, parts_.topology.rank));
  if (submission.tensors.size() > parts_.board->slots())
    throw InvalidArgument(
        formatted("{}: a group of {} tensors is larger than HVD_CACHE_CAPACITY ({})", what(),
                  submission.tensors.size(), parts_.board->slots()));
  if (submission.device.kind == DeviceKind::Cuda && parts_.device >= 0 &&
      submission.device.index != parts_.device && parts_.topology.size > 1)
    throw InvalidArgument(
        formatted("{}: the tensor is on cuda:{}, and the GPU of rank {} is cuda:{} "
                  "(hvd::local_device()); make it there, or move it. hvd::init() makes that GPU "
                  "current in its thread; other threads begin with cuda:0",
                  what(), submission.device.index, parts_.topology.rank, parts_.device));
  const bool by_rows = submission.kind == OpKind::Allgather ||
                       submission.kind == OpKind::Alltoall ||
                       submission.kind == OpKind::Reducescatter;
  if (!by_rows) return;
  for (const auto& tensor : submission.tensors) {
    if (tensor.shape.empty())
      throw InvalidArgument(formatted("{}: a scalar has no first dimension to {} along", what(),
                                      submission.kind == OpKind::Allgather ? "gather" : "scatter"));
    if (submission.kind == OpKind::Alltoall) check_splits(tensor, set.ranks.size(), what());
    if (submission.kind == OpKind::Reducescatter && !tensor.splits.empty())
      check_elements(tensor, set.ranks.size(), what());
  }
}

Signature EntryFactory::signature_of(const Submission& submission) {
  Signature signature;
  static_cast<OperationTerms&>(signature) = submission;
  signature.device = submission.device.kind;
  if (!reduces(submission.kind)) signature.op = ReduceOp::Sum;
  if (submission.kind != OpKind::Broadcast && submission.kind != OpKind::Control)
    signature.root = 0;
  for (const auto& tensor : submission.tensors)
    signature.tensors.push_back({tensor.dtype, tensor.shape, tensor.splits, tensor.output_rows});
  return signature;
}

std::unique_ptr<Entry> EntryFactory::make(Submission submission) const {
  const auto set = table_.sets().share(submission.process_set);
  if (!set)
    throw InvalidArgument(formatted("{} '{}': there is no process set {}", name_of(submission.kind),
                                    display_name(submission.name), submission.process_set));
  check(submission, *set);
  auto entry = std::make_unique<Entry>();
  entry->signature = signature_of(submission);
  for (const auto& tensor : submission.tensors) {
    if (submission.kind == OpKind::Control) continue;
    const auto traits = traits_of(entry->signature, tensor.dtype, submission.device, *set);
    Backend* const backend = parts_.backend_for(traits);
    if (backend == nullptr)
      throw InvalidArgument(
          formatted("{} '{}': {} of {} on {} is not supported", name_of(submission.kind),
                    display_name(submission.name),
                    reduces(submission.kind) ? name_of(submission.op) : name_of(submission.kind),
                    name_of(tensor.dtype), name_of(submission.device.kind)));
    entry->backends.push_back(backend);
  }
  entry->key = {submission.process_set, submission.kind, submission.name};
  if (!is_plausible(entry->signature, set->ranks.size()))
    throw InvalidArgument(formatted("{} '{}': a shape with negative or impossible sizes",
                                    name_of(entry->key.kind), display_name(entry->key.name)));
  check_memory(submission);
  check_overlaps(submission);
  if (introduction_bytes(entry->key, entry->signature) > BoardLog::kBytes / 4)
    throw InvalidArgument(
        formatted("{} '{}...': {} tensors with a name of {} characters are more than the ranks can "
                  "tell each other of",
                  name_of(submission.kind), display_name(submission.name).substr(0, 40),
                  submission.tensors.size(), submission.name.size()));
  if (submission.deadline > std::chrono::nanoseconds(0))
    entry->deadline =
        entry->since + std::min<std::chrono::nanoseconds>(submission.deadline, kLongestDeadline);
  entry->submission = std::move(submission);
  return entry;
}

std::shared_ptr<void> EntryFactory::allocate(const Submission& like, DataType dtype,
                                             std::size_t bytes) const {
  const auto shared_set = table_.sets().share(like.process_set);
  if (!shared_set || shared_set->rank < 0) return nullptr;
  const auto& set = *shared_set;
  const BatchTraits traits{like, dtype, like.device, &set};
  Backend* const backend = parts_.backend_for(traits);
  return backend != nullptr ? backend->allocate(traits, bytes) : nullptr;
}

void EntryFactory::prepare(Entry& entry) const {
  const auto& set = table_.sets().info(entry.key.process_set);
  const bool timed = parts_.timeline->on();
  const TraceTime from = timed ? Timeline::now() : 0;
  make_one_of_overlapping(entry.submission);
  for (std::size_t i = 0; i < entry.backends.size(); ++i) {
    const auto& tensor = entry.submission.tensors[i];
    BatchMember member;
    member.name = entry.key.name;
    member.input = tensor.input;
    member.output = tensor.output;
    member.count = element_count(tensor.shape);
    member.ready_event = tensor.ready_event;
    const auto location = entry.backends[i]->prepare(
        traits_of(entry.signature, tensor.dtype, entry.submission.device, set), member);
    entry.locations.push_back(tensor.present ? location : location | kAbsent);
    entry.prepared.push_back(true);
    if (timed && member.copied) entry.copied = {from, Timeline::now()};
  }
}

void EntryFactory::release(Entry& entry) const noexcept {
  const auto& set = table_.sets().info(entry.key.process_set);
  for (std::size_t i = 0; i < entry.prepared.size(); ++i) {
    if (!entry.prepared[i]) continue;
    entry.prepared[i] = false;
    entry.backends[i]->release(
        traits_of(entry.signature, entry.submission.tensors[i].dtype, entry.submission.device, set),
        entry.locations[i] & ~kAbsent);
  }
}

}  // namespace hvd
