#include "torch_bindings/parameters/replica_guard.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>

#include "hvd/api/request.h"
#include "hvd/base/digest.h"
#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/collectives/tensors.h"
#include "torch_bindings/parameters/shared_parameters.h"

namespace hvd {

namespace {

/// Bytes of the values that are compared in each round: 50 us, and a model of 100 MB in 400 rounds.
constexpr std::size_t kSliceBytes = std::size_t{256} << 10;

/// Returns whether ranks compare it. They do not where all are on one host and have one copy of it:
/// SharedParameters looks after that.
bool is_compared(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.nbytes() > 0 &&
         !(hvd::local_size() == hvd::size() && SharedParameters::contains(tensor));
}

/// The values in the order of memory where they are dense.
at::Tensor as_bytes(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach();
  return detail::in_memory_order(values.is_non_overlapping_and_dense() ? values
                                                                       : values.contiguous())
      .view(at::kByte);
}

/// Returns the digest of bytes of a tensor that is anywhere; waits for its device.
std::uint64_t digest_of_part(const at::Tensor& tensor, std::size_t first, std::size_t bytes,
                             std::uint64_t before) {
  if (tensor.is_cpu() && tensor.is_non_overlapping_and_dense())
    return digest_of_memory(static_cast<const std::byte*>(tensor.const_data_ptr()) + first, bytes,
                            before);
  const at::Tensor part =
      as_bytes(tensor)
          .narrow(0, static_cast<std::int64_t>(first), static_cast<std::int64_t>(bytes))
          .cpu();
  return digest_of_memory(part.const_data_ptr(), bytes, before);
}

using Words = std::vector<std::pair<std::string, std::string>>;

/// "rank 3 differs from the others"; where no group of ranks is the largest, all groups.
std::string describe_groups(const std::map<std::int64_t, std::vector<int>>& groups) {
  std::vector<const std::vector<int>*> by_size;
  for (const auto& [said, ranks] : groups) by_size.push_back(&ranks);
  std::sort(by_size.begin(), by_size.end(),
            [](const auto* a, const auto* b) { return a->front() < b->front(); });
  std::stable_sort(by_size.begin(), by_size.end(),
                   [](const auto* a, const auto* b) { return a->size() > b->size(); });
  const auto name = [](const std::vector<int>& ranks) {
    return formatted("rank{} {}", ranks.size() == 1 ? "" : "s", rank_list(ranks));
  };
  const bool has_majority = by_size.size() == 1 || by_size[0]->size() > by_size[1]->size();
  std::vector<std::string> named;
  for (const auto* ranks : by_size) named.push_back(name(*ranks));
  if (!has_majority) return formatted("{} differ", joined(named, " and "));
  named.erase(named.begin());
  const bool is_one = by_size.size() == 2 && by_size[1]->size() == 1;
  return formatted("{} differ{} from the others", joined(named, " and "), is_one ? "s" : "");
}

}  // namespace

ReplicaComparer::ReplicaComparer(std::string name, ProcessSet process_set, std::string kind)
    : name_(std::move(name)), process_set_(std::move(process_set)), kind_(std::move(kind)) {}

void ReplicaComparer::watch(const Named& tensors) {
  const auto is_same = [](const auto& a, const auto& b) {
    return a.first == b.first && a.second.is_same(b.second);
  };
  if (std::equal(tensors.begin(), tensors.end(), tensors_.begin(), tensors_.end(), is_same)) return;
  tensors_ = tensors;
  names_.clear();
  for (const auto& [name, tensor] : tensors_) names_.push_back(digest_of(name));
  staged_.clear();
  all_next_ = true;
}

std::uint64_t ReplicaComparer::digest_of_layout() const {
  std::uint64_t digest = 0;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const at::Tensor& tensor = tensors_[i].second;
    digest =
        digest_of(static_cast<std::uint64_t>(tensor.scalar_type()), digest_of(names_[i], digest));
    if (tensor.layout() != at::kStrided) continue;
    for (const auto numbers : {tensor.sizes(), tensor.strides()})
      digest = digest_of_memory(numbers.data(), numbers.size() * sizeof(std::int64_t), digest);
  }
  return digest;
}

/// The next slice of all values, or all of them.
std::vector<ReplicaComparer::Piece> ReplicaComparer::pieces(Extent extent) const {
  std::size_t all = 0;
  for (const auto& [name, tensor] : tensors_) all += is_compared(tensor) ? tensor.nbytes() : 0;
  if (extent == Extent::Layout) return {};
  std::size_t begin = 0, end = all;
  if (extent == Extent::Slice && all > 0) {
    begin = slices_ % ((all + kSliceBytes - 1) / kSliceBytes) * kSliceBytes;
    end = std::min(all, begin + kSliceBytes);
  }
  std::vector<Piece> found;
  std::size_t at = 0;
  for (std::size_t i = 0; i < tensors_.size() && at < end; ++i) {
    if (!is_compared(tensors_[i].second)) continue;
    const std::size_t bytes = tensors_[i].second.nbytes();
    const std::size_t from = std::max(begin, at), to = std::min(end, at + bytes);
    if (from < to) found.push_back({.tensor = i, .first_byte = from - at, .bytes = to - from});
    at += bytes;
  }
  return found;
}

/// Starts the copy, on the stream that is current: what is there now, not what a step makes of it.
void ReplicaComparer::stage(const Piece& piece) {
  const at::Tensor bytes = as_bytes(tensors_[piece.tensor].second)
                               .narrow(0, static_cast<std::int64_t>(piece.first_byte),
                                       static_cast<std::int64_t>(piece.bytes));
  at::Tensor on_host =
      at::empty(bytes.sizes(), bytes.options().device(at::kCPU).pinned_memory(true));
  on_host.copy_(bytes, /*non_blocking=*/true);
  detail::StreamEvent copied(bytes.device());
  copied.record(c10::impl::VirtualGuardImpl(bytes.device().type()).getStream(bytes.device()));
  staged_.push_back({.piece = piece, .bytes = std::move(on_host), .copied = std::move(copied)});
}

/// Leaves in `compared_` which pieces it is the digest of.
std::uint64_t ReplicaComparer::digest_of_values(Extent extent) {
  std::uint64_t digest = 0;
  compared_.clear();
  for (const auto& staged : std::exchange(staged_, {})) {
    staged.copied.synchronize();
    if (extent != Extent::Slice) continue;
    digest = digest_of_memory(staged.bytes.const_data_ptr(), staged.bytes.nbytes(), digest);
    compared_.push_back(staged.piece);
  }
  for (const auto& piece : pieces(extent)) {
    const at::Tensor& tensor = tensors_[piece.tensor].second;
    if (extent == Extent::Slice && !tensor.is_cpu()) {
      stage(piece);
      continue;
    }
    digest = digest_of_part(tensor, piece.first_byte, piece.bytes, digest);
    compared_.push_back(piece);
  }
  return digest;
}

void ReplicaComparer::submit(const std::string& name, Extent extent) {
  // a round has failed before it ended
  if (const auto left_over = std::exchange(pending_, nullptr)) {
    try {
      engine()->wait(*left_over);
    } catch (const Error&) {  // as that round said
    }
  }
  const at::NoGradGuard no_gradient;
  const int size = process_set_.size();
  const Said said{.round = extent == Extent::Slice ? static_cast<std::int64_t>(slices_) + 2 : 1,
                  .layout = static_cast<std::int64_t>(digest_of_layout()),
                  .terms = terms_.digest && extent != Extent::Layout
                               ? static_cast<std::int64_t>(terms_.digest())
                               : 0,
                  .values = static_cast<std::int64_t>(digest_of_values(extent))};
  said_ = std::make_shared<std::vector<Said>>(size);
  said_->at(static_cast<std::size_t>(process_set_.rank())) = said;
  static_assert(sizeof(Said) == 4 * sizeof(std::int64_t));
  Submission submission =
      request(OpKind::Allreduce,
              AllreduceOptions{.name = name, .op = ReduceOp::Sum, .process_set = process_set_});
  submission.tensors.push_back({.input = said_->data(),
                                .output = said_->data(),
                                .dtype = DataType::Int64,
                                .shape = {size, 4}});
  submission.keep_alive = said_;
  submission.internal = true;
  pending_ = engine()->submit(std::move(submission), After::Return);
}

void ReplicaComparer::begin_round() {
  const auto guard = engine()->config().replica_guard;
  if (process_set_.size() == 1 || tensors_.empty() || (guard == ReplicaGuard::Off && !all_next_))
    return;
  const Extent whole = guard == ReplicaGuard::Off ? Extent::Layout : Extent::All;
  submit(name_ + "/replicas", all_next_ || guard == ReplicaGuard::Full ? whole : Extent::Slice);
}

void ReplicaComparer::end_round() {
  if (pending_) compare();
}

void ReplicaComparer::check() {
  if (process_set_.size() == 1 || tensors_.empty()) return;
  submit(name_ + "/check of replicas", Extent::All);
  compare();
}

void ReplicaComparer::compare() {
  engine()->wait(*std::exchange(pending_, nullptr));
  const std::vector<Said>& all = *said_;
  const auto differs = [&all](std::int64_t Said::*what) {
    const Said* first = nullptr;
    for (const auto& one : all) {
      if (one.round == 0) continue;  // it has joined
      if (first == nullptr) first = &one;
      if (one.*what != first->*what) return true;
    }
    return false;
  };
  all_next_ = true;  // until it is known that nothing differs
  if (differs(&Said::layout)) tell(all, &Said::layout);
  if (differs(&Said::terms)) tell(all, &Said::terms);
  // a rank has failed in between; what they have said are digests of different things
  if (differs(&Said::round)) {
    std::int64_t last = 0;
    for (const auto& one : all) last = std::max(last, one.round);
    slices_ = static_cast<std::uint64_t>(last);
    return;
  }
  if (differs(&Said::values)) tell(all, &Said::values);
  all_next_ = false;
  ++slices_;
}

/// Collective. Returns what each rank has where they differ.
std::string ReplicaComparer::ask_all(const Words& words) const {
  std::string details;
  try {
    detail::agree_on(name_ + ": replicas", words, process_set_);
  } catch (const Mismatch& error) {
    const std::string text = error.what();
    constexpr std::string_view kBefore = "the ranks differ: ";
    const auto found = text.find(kBefore);
    details = found == std::string::npos ? text : text.substr(found + kBefore.size());
  }
  return details.empty() ? "they have been changed since" : details;
}

/// Collective over the ranks that have not joined; all have the same table.
void ReplicaComparer::tell(const std::vector<Said>& all, std::int64_t Said::*what) const {
  std::map<std::int64_t, std::vector<int>> groups;
  bool joined_ranks = false;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].round == 0) {
      joined_ranks = true;
    } else {
      groups[all[i].*what].push_back(process_set_.ranks()[i]);
    }
  }
  Words words;
  std::string subject, advice;
  if (what == &Said::layout) {
    subject = kind_ + "s are not the same ones";
    advice = "register the same ones under the same names, in the same order, on all ranks";
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const at::Tensor& tensor = tensors_[i].second;
      const std::string strides =
          tensor.layout() == at::kStrided && !tensor.is_contiguous()
              ? formatted(" with strides {}", to_string(Shape(tensor.strides().vec())))
              : "";
      words.emplace_back(formatted("{} '{}'", kind_, tensors_[i].first),
                         formatted("number {} of {}, {}{}", i + 1, tensors_.size(),
                                   detail::describe(tensor), strides));
    }
  } else if (what == &Said::terms) {
    subject = "options are not equal";
    advice =
        "give all ranks the same: what one rank has measured is no reason to change them before "
        "the ranks have agreed on it";
    words = terms_.words();
  } else {
    subject = kind_ + std::string(detail::kAreNotEqual);
    advice =
        "call broadcast_parameters() once they are made or loaded, and change them by the "
        "wrapper's step(), or on all ranks alike; a closure of an optimizer that decides by the "
        "loss must return the mean of all ranks' losses";
    for (std::size_t i = 0; i < compared_.size(); ++i) {
      const auto& [name, tensor] = tensors_[compared_[i].tensor];
      words.emplace_back(
          formatted("{} '{}'", kind_, name),
          formatted("{} with digest {:016x}", detail::describe(tensor),
                    digest_of_part(tensor, compared_[i].first_byte, compared_[i].bytes, 0)));
    }
  }
  const std::string name = formatted("{}, step {}", name_, steps_ + 1);
  std::string details;
  if (joined_ranks) {
    for (const auto& [thing, is] : words) details += (details.empty() ? "one of " : ", ") + thing;
  } else {
    details = ask_all(words);
  }
  const std::string text =
      formatted("{}: {}: {}. {} ({})", name, subject, describe_groups(groups), details, advice);
  if (what == &Said::layout) throw detail::OtherTensors(text);
  throw Mismatch(text);
}

}  // namespace hvd
