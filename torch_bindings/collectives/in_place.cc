#include "torch_bindings/collectives/in_place.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <cstdint>

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

}  // namespace hvd::detail
