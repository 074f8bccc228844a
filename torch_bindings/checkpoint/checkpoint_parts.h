#pragma once
/// The parts of a training run in the file of a Checkpoint: written, found, and filled. Local; one
/// thread at a time. Refer to the parts. Errors: CheckpointError for parts that do not fit; what a
/// part's own save() and load() throw.
// Tested in tests/torch_bindings/checkpoint/checkpoint_run_test.cc

#include <torch/serialize.h>

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "torch_bindings/checkpoint/checkpoint_part.h"

namespace hvd::detail {

/// Writes all parts but generators, whose states belong to single ranks.
void write_parts(torch::serialize::OutputArchive& archive, std::span<const CheckpointPart> parts);
/// Returns the state of each part; throws CheckpointError where the file has other ones.
std::vector<torch::serialize::InputArchive> find_parts(torch::serialize::InputArchive& archive,
                                                       std::span<const CheckpointPart> parts);

/// Fills parts, and gives them back what they had.
class PartsLoad {
 public:
  explicit PartsLoad(std::span<const CheckpointPart> parts) : parts_(parts) {}
  /// Returns why it cannot; empty if it could.
  std::string load(std::vector<torch::serialize::InputArchive>& states);
  void undo();

 private:
  std::span<const CheckpointPart> parts_;
  std::vector<std::pair<std::size_t, std::string>> before_;  ///< by place: what a part had
};

}  // namespace hvd::detail
