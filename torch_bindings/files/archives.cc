#include "torch_bindings/files/archives.h"

#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <sstream>

namespace hvd::detail {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

std::string text_of(OutputArchive& archive) {
  std::ostringstream out;
  archive.save_to(out);
  return out.str();
}

InputArchive archive_of(const std::string& text, std::optional<at::Device> device) {
  std::istringstream in(text);
  InputArchive archive;
  archive.load_from(in, device);
  return archive;
}

InputArchive as_input(OutputArchive& archive) { return archive_of(text_of(archive)); }

c10::IValue value_at(InputArchive& archive, const std::string& key) {
  c10::IValue value;
  archive.read(key, value);
  return value;
}

std::vector<at::Tensor> tensors_of(InputArchive& archive) {
  std::vector<at::Tensor> all;
  for (const auto& key : archive.keys()) {
    at::Tensor tensor;
    InputArchive below;
    if (archive.try_read(key, tensor)) {
      all.push_back(tensor);
    } else if (archive.try_read(key, below)) {
      const auto more = tensors_of(below);
      all.insert(all.end(), more.begin(), more.end());
    }
  }
  return all;
}

namespace {

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (a.layout() != at::kStrided || b.layout() != at::kStrided)
    return a.layout() == b.layout() && torch::equal(a.to_dense(), b.to_dense());
  const at::Tensor left = a.detach().cpu().contiguous(), right = b.detach().cpu().contiguous();
  return std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

bool same_value(const c10::IValue& a, const c10::IValue& b) {
  std::vector<at::Tensor> left, right;
  if (torch::jit::pickle(a, &left) != torch::jit::pickle(b, &right) || left.size() != right.size())
    return false;
  return std::equal(left.begin(), left.end(), right.begin(), same_bits);
}

}  // namespace

bool same_archive(InputArchive& a, InputArchive& b) {
  auto names = a.keys(), others = b.keys();
  std::sort(names.begin(), names.end());
  std::sort(others.begin(), others.end());
  if (names != others) return false;
  return std::all_of(names.begin(), names.end(), [&](const std::string& name) {
    InputArchive left, right;
    const bool nested = a.try_read(name, left);
    if (nested != b.try_read(name, right)) return false;
    if (nested) return same_archive(left, right);
    return same_value(value_at(a, name), value_at(b, name));
  });
}

bool same_at(const std::string& key, InputArchive& a, InputArchive& b) {
  InputArchive left, right;
  const bool here = a.try_read(key, left), there = b.try_read(key, right);
  return here == there && (!here || same_archive(left, right));
}

}  // namespace hvd::detail
