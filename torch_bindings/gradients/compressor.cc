#include "torch_bindings/gradients/compressor.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <set>

#include "hvd/base/text.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/encodings.h"

namespace hvd {

struct GradientCompressor::Living {
  std::mutex mutex;
  std::set<GradientCompressor*> all;

  /// Calls for each compressor of any of these parameters, with the set of them.
  template <class Call>
  void each_of(const Tensors& parameters, const Call& call) {
    const std::lock_guard lock(mutex);
    if (all.empty()) return;
    std::unordered_set<const void*> theirs;
    for (const auto& parameter : parameters) theirs.insert(parameter.unsafeGetTensorImpl());
    const at::NoGradGuard no_gradient;
    for (auto* const compressor : all) {
      const auto& mine = compressor->parameters_;
      if (std::any_of(mine.begin(), mine.end(), [&](const auto& named) {
            return theirs.contains(named.second.unsafeGetTensorImpl());
          }))
        call(*compressor, theirs);
    }
  }
};

GradientCompressor::Living& GradientCompressor::living() {
  static auto* const made = new Living;  // an optimizer may end after main()
  return *made;
}

GradientCompressor::GradientCompressor(Terms terms, Parameters parameters)
    : terms_(std::move(terms)),
      parameters_(std::move(parameters)),
      ranks_(terms_.process_set.size()),
      self_(terms_.process_set.rank()) {
  for (const auto& [name, parameter] : parameters_)
    residuals_.push_back(at::zeros_like(parameter, parameter.options().requires_grad(false).dtype(
                                                       detail::encoded_type(parameter))));
  const std::lock_guard lock(living().mutex);
  living().all.insert(this);
}

GradientCompressor::~GradientCompressor() {
  const std::lock_guard lock(living().mutex);
  living().all.erase(this);
}

// ------------------------------------------------------------------------------------ loss scaling

void GradientCompressor::follow_scale(const Tensors& parameters,
                                      const std::shared_ptr<const float>& scale) {
  living().each_of(parameters,
                   [&](GradientCompressor& compressor, const auto&) { compressor.scale_ = scale; });
}
void GradientCompressor::correct_scale(const Tensors& parameters) {
  living().each_of(parameters,
                   [](GradientCompressor& compressor, const auto&) { compressor.correct_scale(); });
}
void GradientCompressor::end_step(const Tensors& parameters, bool left_out) {
  living().each_of(parameters, [&](GradientCompressor& compressor, const auto& theirs) {
    compressor.end_step(theirs, left_out);
  });
}

/// 1 where there is none.
double GradientCompressor::scale() const {
  if (!scale_) return 1;
  const auto held = scale_->lock();
  if (held == nullptr) return 1;
  const double scale{*held};
  return scale > 0 && std::isfinite(scale) ? scale : 1;
}

void GradientCompressor::keep_memory() {
  const bool first = open_.empty();
  open_.assign(parameters_.size(), true);
  if (!scale_ && !first) return before_.clear();
  const auto now = memory();
  before_.resize(now.size());
  for (std::size_t i = 0; i < now.size(); ++i)
    before_[i].defined() ? before_[i].copy_(now[i]) : before_[i] = now[i].clone();
}

/// Gradients came as g * scale and were taken for g: of what was remembered before, r, too little
/// was sent, r / scale.
void GradientCompressor::correct_scale() {
  const double scale = this->scale();
  if (scale == unit_ || std::find(open_.begin(), open_.end(), true) == open_.end()) return;
  const auto now = memory();
  for (std::size_t i = 0; i < remainders(); ++i) {
    now[i].mul_(unit_ / scale);
    if (!before_.empty()) now[i].add_(before_[i], 1 - unit_ / scale);
  }
  unit_ = scale;
}

void GradientCompressor::end_step(const std::unordered_set<const void*>& theirs, bool left_out) {
  std::vector<std::size_t> ended;
  for (std::size_t i = 0; i < open_.size(); ++i)
    if (open_[i] && theirs.contains(parameters_[i].second.unsafeGetTensorImpl()))
      ended.push_back(i);
  for (const auto i : ended) open_[i] = false;
  if (!left_out || before_.empty()) return;
  const auto now = memory();
  if (ended.size() == parameters_.size()) {
    for (std::size_t i = 0; i < now.size(); ++i) now[i].copy_(before_[i]);
  } else {
    for (const auto i : ended) residuals_[i].copy_(before_[i]);
  }
}

// --------------------------------------------------------------------------------------- reduction

void GradientCompressor::count_allreduce(std::uint64_t bytes) {
  const auto ranks = static_cast<std::uint64_t>(ranks_);
  bytes_sent_ += 2 * bytes * (ranks - 1) / ranks;  // Patarasuk and Yuan 2009
}
void GradientCompressor::count_allgather(std::uint64_t own_bytes) {
  bytes_sent_ += own_bytes * static_cast<std::uint64_t>(ranks_ - 1);
}
void GradientCompressor::count_alltoall(std::uint64_t own_bytes) {
  const auto ranks = static_cast<std::uint64_t>(ranks_);
  bytes_sent_ += own_bytes * (ranks - 1) / ranks;
}

at::Tensor GradientCompressor::finish(at::Tensor sum) const {
  if (terms_.predivide_factor != 1)
    return sum.mul_(terms_.predivide_factor / static_cast<double>(ranks_));
  return terms_.op == ReduceOp::Average ? sum.div_(ranks_) : sum;
}

/// Once: a tensor of another size, or compressed in another way, on another rank would make
/// nonsense of everything after it.
void GradientCompressor::check_alike() {
  if (checked_) return;
  const std::string way = detail::words_of(terms_.compression);
  detail::Statements statements;
  for (const auto& [name, parameter] : parameters_)
    statements.emplace_back(formatted("gradient {} '{}'", statements.size(), name),
                            formatted("{} by {}", detail::describe(parameter), way));
  detail::agree_on(terms_.name, statements, terms_.process_set);
  checked_ = true;
}

/// The parameters that have a gradient on any rank. `also_compared` travels as the shape of a
/// tensor that is empty.
std::vector<std::size_t> GradientCompressor::agree_on_present(const Shape& also_compared) {
  at::Tensor present = at::zeros({static_cast<std::int64_t>(parameters_.size())}, at::kByte);
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (parameters_[i].second.grad().defined()) present[static_cast<std::int64_t>(i)] = 1;
  const AllreduceOptions options{
      .name = name("present"), .op = ReduceOp::Max, .process_set = terms_.process_set};
  if (also_compared.empty()) {
    allreduce_(present, options);
  } else {
    Shape shape = also_compared;
    shape.push_back(0);
    grouped_allreduce_({present, at::empty(shape, at::kByte)}, options);
  }
  count_allreduce(present.nbytes());
  std::vector<std::size_t> active;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (present.const_data_ptr<std::uint8_t>()[i] != 0) active.push_back(i);
  return active;
}

void GradientCompressor::compare(const Shape& shape) {
  if (parameters_.empty()) return;
  check_alike();  // as a rank that reduces does
  Shape empty = shape;
  empty.push_back(0);
  allreduce_(at::empty(empty, at::kByte),
             {.name = name("present"), .op = ReduceOp::Max, .process_set = terms_.process_set});
}

void GradientCompressor::reduce(const Shape& also_compared, const std::function<double()>& factor) {
  if (parameters_.empty()) return;
  const at::NoGradGuard no_gradient;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  check_alike();
  const auto active = agree_on_present(also_compared);
  if (active.empty()) return;
  const double weight = factor ? factor() : 1;
  keep_memory();
  unit_ = scale();
  for (const auto i : active) {
    const at::Tensor& gradient = parameters_[i].second.grad();
    if (!gradient.defined() || weight == 0) continue;
    const at::Tensor dense =
        (gradient.is_sparse() ? gradient.to_dense() : gradient).to(residuals_[i].scalar_type());
    residuals_[i].add_(dense, gradient_factor() * weight);
  }
  auto reduced = exchange(active);
  for (std::size_t a = 0; a < active.size(); ++a) {
    const at::Tensor& parameter = parameters_[active[a]].second;
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined() || gradient.is_sparse())
      gradient = at::empty_like(parameter, parameter.options().requires_grad(false));
    if (unit_ != 1) reduced[a].mul_(unit_);
    gradient.copy_(
        reduced[a].as_strided(residuals_[active[a]].sizes(), residuals_[active[a]].strides()));
  }
}

}  // namespace hvd
