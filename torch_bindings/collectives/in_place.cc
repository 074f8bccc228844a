#include "torch_bindings/collectives/in_place.h"

#include <ATen/MemoryOverlap.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>

#include "hvd/api/request.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd::detail {

namespace {

using Tensors = std::vector<at::Tensor>;

/// Returns which of the tensors share memory with another that begins before them, or that is
/// before them in the group and begins there too. They are sent from a copy, so that all are read
/// before any is changed. `dense`: without gaps.
std::vector<bool> sharing_memory(const Tensors& dense) {
  std::vector<bool> shares(dense.size(), false);
  if (dense.size() < 2) return shares;
  std::vector<std::pair<std::uintptr_t, std::size_t>> places;
  for (std::size_t i = 0; i < dense.size(); ++i)
    if (dense[i].numel() > 0)
      places.emplace_back(reinterpret_cast<std::uintptr_t>(dense[i].const_data_ptr()), i);
  std::sort(places.begin(), places.end());
  std::uintptr_t end = 0;
  for (const auto& [begin, i] : places) {
    shares[i] = begin < end;
    end = std::max(end, begin + dense[i].nbytes());
  }
  return shares;
}

std::string into(OpKind kind) { return std::string(name_of(kind)) + "_into"; }

bool is_contiguous_memory(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

Tensors dense_in_place(const Tensors& tensors) {
  Tensors dense;
  for (const auto& tensor : tensors) dense.push_back(dense_of(tensor));
  const auto shares = sharing_memory(dense);
  for (std::size_t i = 0; i < dense.size(); ++i)
    if (shares[i]) dense[i] = dense[i].clone();
  return dense;
}

Histories::Histories(const Tensors& tensors, std::string_view what, const std::string& name)
    : group_(tensors.size() > 1) {
  require_running();
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (changes_history(tensors[i], what, name) &&
        is_another(tensors[i], title(what, name, tensors, i)))
      changed_.emplace_back(i, tensors[i]);
}

bool Histories::is_another(const at::Tensor& tensor, const std::string& which) const {
  for (const auto& [number, other] : changed_) {
    if (tensor.is_same(other)) return false;
    if (tensor.is_alias_of(other) &&
        at::get_overlap_status(tensor, other) != at::MemOverlapStatus::No)
      throw InvalidArgument(
          formatted("{}: in place together with tensor {}, whose memory it may share, where "
                    "gradients are required; give them one after the other",
                    which, number));
  }
  return true;
}

void add_given(Operation& operation, const Compression& compression) {
  const at::NoGradGuard no_gradient;
  const std::string_view what = name_of(operation.submission.kind);
  const Tensors all_dense = operation.in_place ? dense_in_place(operation.given) : Tensors();
  for (std::size_t i = 0; i < operation.given.size(); ++i) {
    const at::Tensor& tensor = operation.given[i];
    const DataType dtype = data_type_of(tensor, what);
    const DataType wire = compression.wire_type(dtype);
    const at::Tensor dense = operation.in_place ? all_dense[i] : dense_of(tensor);
    if (wire != dtype) {
      const at::Tensor packed =
          empty_shared(tensor.sizes(), dense.options().dtype(scalar_type_of(wire)));
      packed.copy_(dense);
      operation.add(packed, packed, what);
      operation.results.push_back(operation.in_place ? tensor
                                                     : at::empty(tensor.sizes(), dense.options()));
    } else if (operation.in_place) {
      operation.add(dense, dense, what);
      operation.results.push_back(dense.is_alias_of(tensor) ? dense : tensor);
    } else {
      const at::Tensor output = empty_shared(tensor.sizes(), dense.options());
      operation.add(dense, output, what);
      operation.results.push_back(output);
    }
  }
}

Buffer buffer_of(const at::Tensor& dense, const std::string& what) {
  return {const_cast<void*>(dense.const_data_ptr()), data_type_of(dense, what), shape_of(dense),
          detail::device_of(dense)};
}

Target::Target(at::Tensor output, const at::Tensor& input, OpKind kind, const std::string& name)
    : output_(std::move(output)), input_(input), kind_(kind), name_(name) {
  const std::string what = into(kind);
  check_group({input_}, what, name, Form::Fresh);
  if (!output_.defined())
    throw InvalidArgument(formatted("{} '{}': the output is an undefined tensor", what, name));
  check_group({output_}, what + " (output)", name, Form::InPlace);
  connects_ = needs_gradient({input_, output_});
  if (!connects_) return;
  if (output_.requires_grad() &&
      (output_.is_leaf() || (output_.is_view() && output_._base().is_leaf())))
    throw InvalidArgument(
        formatted("{} '{}': the output is a leaf that requires a gradient, or a view of one; call "
                  "it under torch::NoGradGuard to write to it as data",
                  what, name));
  refuse_several_views(output_, what, name);
}

bool Target::fits_small_calls() const {
  if (!is_plain(input_) || !is_plain(output_) || !is_small(input_, kind_) || input_.dim() == 0 ||
      input_.dim() != output_.dim())
    return false;
  if (input_.scalar_type() != output_.scalar_type() ||
      input_.sizes().slice(1) != output_.sizes().slice(1))
    return false;
  return !overlap(buffer_of(output_, into(kind_)), buffer_of(input_, into(kind_)));
}

std::shared_ptr<Operation> Target::operation(Submission submission, const ProcessSet& set,
                                             const std::vector<std::int64_t>& splits) const {
  const std::string what = into(kind_);
  const at::NoGradGuard no_gradient;
  at::Tensor from = dense_of(input_);
  const at::Tensor to = is_contiguous_memory(output_)
                            ? output_.detach()
                            : at::empty(output_.sizes(), output_.options().requires_grad(false));
  check_output(kind_, name_, buffer_of(to, what), buffer_of(from, what), set, splits);
  if (overlap(buffer_of(to, what), buffer_of(from, what))) from = from.clone();
  auto operation = std::make_shared<Operation>();
  operation->given = {output_};
  operation->in_place = true;
  operation->submission = std::move(submission);
  operation->add(from, {}, what);
  operation->submission.tensors.front().splits = splits;
  if (kind_ != OpKind::Reducescatter && to.dim() > 0)
    operation->submission.tensors.front().output_rows = to.size(0);
  operation->submission.allocate =
      [data = to.mutable_data_ptr()](std::size_t /*index*/, std::int64_t /*rows*/) { return data; };
  operation->received.front() = to;
  operation->results = {is_contiguous_memory(output_) ? to : output_};
  return operation;
}

Handle<Tensors> Target::start(const std::shared_ptr<Operation>& operation, After after,
                              GradientRule rule) const {
  auto handle = detail::start(operation, after);
  if (after == After::Wait) handle.wait();
  if (connects_) write_history(output_, input_, std::move(rule));
  return handle;
}

}  // namespace hvd::detail
