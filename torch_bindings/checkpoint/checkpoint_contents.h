#pragma once
/// The contents of a Checkpoint's file: its head, the states that belong to single ranks, the
/// values for a module's tensors, and the parts of the run. Local; one thread at a time. Errors:
/// CheckpointError for what does not fit; LibTorch's c10::Error for what is damaged; what a part's
/// own save() and load() throw. Owns what it reads, and refers to the parts.
// Tested in tests/torch_bindings/checkpoint/checkpoint_test.cc,
// tests/torch_bindings/checkpoint/checkpoint_run_test.cc

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "torch_bindings/checkpoint/checkpoint_part.h"

namespace hvd::detail {

/// The format, at the front of every checkpoint.
constexpr const char* kFormat = "hvd checkpoint 1";
/// Throws CheckpointError unless it is there.
void check_format(torch::serialize::InputArchive& archive);
/// Returns what `pack` has made of the states of all ranks, each a tensor.
std::vector<at::Tensor> texts_of_ranks(torch::serialize::InputArchive& archive);

/// The state that belongs to one rank alone.
struct OfRank {
  std::vector<at::Tensor> random;  ///< generators' states: CPU, and GPU
  std::vector<at::Tensor> memory;  ///< of compression
  /// Buffers that are not those of the file's model, by name.
  std::vector<std::string> names;
  std::vector<at::Tensor> buffers;
};

/// Returns it as a text for the file.
std::string pack(const OfRank& state);
/// Returns what `pack` has written. `known`: the module's buffers; files had their places once, and
/// before that none of them.
OfRank unpack(const std::string& text,
              const std::vector<std::pair<std::string, at::Tensor>>& known);

/// A tensor of the module, and the one in the file that it becomes.
struct Found {
  std::string name;
  at::Tensor tensor, stored;
};

/// Finds what each module tensor becomes, as Module::save nests them. Throws for what does not fit.
void match(torch::nn::Module& module, torch::serialize::InputArchive& archive,
           const std::string& prefix, std::vector<Found>& found);
/// Throws if tensors that are one here (tied weights) are several in the file, with other values.
void check_tied(const std::vector<Found>& found);
/// Returns the tensors in the file whose values that looks at.
std::vector<at::Tensor> to_be_equal(const std::vector<Found>& found);

/// The names that a module has for each of an optimizer's parameters: several where it is tied,
/// none where it is not the module's.
using NamesInOrder = std::vector<std::vector<std::string>>;
/// Returns them in the order in which the parameters' state is written.
NamesInOrder names_in_order(const torch::nn::Module& module, torch::optim::Optimizer& optimizer);
/// Throws CheckpointError where the state in the file would go to other parameters than its own.
void check_order(torch::serialize::InputArchive& archive, const NamesInOrder& here);

/// Writes all parts but generators, whose states belong to single ranks.
void write_parts(torch::serialize::OutputArchive& archive, std::span<const CheckpointPart> parts);
/// Returns the state of each part; throws CheckpointError where the file has other ones.
std::vector<torch::serialize::InputArchive> find_parts(torch::serialize::InputArchive& archive,
                                                       std::span<const CheckpointPart> parts);

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
