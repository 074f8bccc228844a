#pragma once
/// LibTorch's archives, written and read again, and compared bit by bit. Functions only; any thread. Throw what LibTorch does.

#include <torch/serialize.h>

#include <string>

namespace hvd::detail {

/// Returns what was written, to be read on the CPU.
torch::serialize::InputArchive as_input(torch::serialize::OutputArchive& archive);
/// Returns whether both hold the same keys with the same bits.
bool same_archive(torch::serialize::InputArchive& a, torch::serialize::InputArchive& b);
/// Returns whether the archive `key` is in neither, or holds the same in both.
bool same_at(const std::string& key, torch::serialize::InputArchive& a, torch::serialize::InputArchive& b);

}  // namespace hvd::detail
