#pragma once
/// LibTorch's archives: as texts, read again, and compared bit by bit. Functions only; any thread.
/// Throw what LibTorch does.
// Tested in tests/torch_bindings/checkpoint/checkpoint_test.cc,
// tests/torch_bindings/what_if/what_if_state_test.cc

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/serialize.h>

#include <optional>
#include <string>
#include <vector>

namespace hvd::detail {

/// Returns what was written, as the bytes that a file would have.
std::string text_of(torch::serialize::OutputArchive& archive);
/// Returns what `text_of` wrote as an archive to read, tensors on the device; none: as they were.
torch::serialize::InputArchive archive_of(const std::string& text,
                                          std::optional<at::Device> device = at::kCPU);
/// Returns what was written, to be read on the CPU.
torch::serialize::InputArchive as_input(torch::serialize::OutputArchive& archive);
/// Returns the value that is written there.
c10::IValue value_at(torch::serialize::InputArchive& archive, const std::string& key);

/// Returns all tensors of an archive and of those within it.
std::vector<at::Tensor> tensors_of(torch::serialize::InputArchive& archive);
/// Returns whether both hold the same keys with the same bits.
bool same_archive(torch::serialize::InputArchive& a, torch::serialize::InputArchive& b);
/// Returns whether the archive `key` is in neither, or holds the same in both.
bool same_at(const std::string& key, torch::serialize::InputArchive& a,
             torch::serialize::InputArchive& b);

}  // namespace hvd::detail
