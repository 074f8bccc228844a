#pragma once
/// CheckpointReader reads the archive of a checkpoint on all ranks of a set, from a file that the
/// first rank has. Large tensors stay in the file until the archive has been looked at: they have
/// memory that nothing has touched, and no values. Each rank says which of them it wants, and
/// where: then their bytes travel in portions, so that no rank needs memory for what it does not
/// keep. What is not large is there at once. CPU tensors only. Thread: one at a time. Errors:
/// LibTorch's c10::Error for a file that is damaged, CheckpointError for one that cannot be read.
/// Owns the archive and its tensors.

#include <torch/serialize.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/files/file.h"

namespace hvd::detail {

/// The file of a checkpoint, on the rank that has it.
class CheckpointFile {
 public:
  /// Opens it and reads it through once, so that one that cannot be read is found before anything
  /// changes. `all_at_once`: no tensor is left in the file.
  CheckpointFile(const std::string& path, bool all_at_once);
  /// Returns all but the large tensors, for CheckpointReader: here or, sent there, on others.
  [[nodiscard]] std::string outline() const;
  void read(std::uint64_t from, void* to, std::size_t bytes) const { file_.read(from, to, bytes); }

 private:
  File file_;
  std::uint64_t size_;
  std::vector<std::uint64_t> extents_;  ///< of large tensors: place, bytes, place, bytes...
};

class CheckpointReader {
 public:
  /// Local. `device`: where tensors are to be, the CPU unless the outline holds all.
  CheckpointReader(const std::string& outline, at::Device device);
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  [[nodiscard]] torch::serialize::InputArchive& archive() { return archive_; }
  /// Returns whether the values of an archive's tensor, or of a view of one, are still in the file.
  [[nodiscard]] bool is_unread(const at::Tensor& tensor) const { return unread(tensor) != nullptr; }
  /// From the next read() on `tensor`, of an archive, has its values. Nothing where it has them.
  void want(const at::Tensor& tensor);
  /// The next read() gives `to` the values of `from`, which an archive has or which is a view of
  /// what one has; at once where these are there. Another type or layout costs memory for the whole
  /// tensor that `from` is a view of.
  void want(const at::Tensor& to, const at::Tensor& from);
  /// Wants all that is in the file still, but for tensors in these.
  void want_all_but(const std::vector<at::Tensor>& tensors);
  /// Reads what this rank wants. With a set: collective over it, for what any of its ranks wants;
  /// `file`: on its first rank, null on the others. Returns why this rank has not all of it; empty
  /// if it has. What it wants is not complete then.
  [[nodiscard]] std::string read(const CheckpointFile* file, const ProcessSet* set);

 private:
  struct Want {
    at::Tensor to, from;
  };
  /// A tensor's bytes in the file.
  struct Extent {
    std::uint64_t place = 0;
    std::size_t bytes = 0;
    void* memory = nullptr;  ///< of the tensor
    bool in_place = false;   ///< wanted where the tensor is
    bool is_read = false;
    std::vector<Want> wants;
  };
  [[nodiscard]] const Extent* unread(const at::Tensor& tensor) const;
  void read_extent(Extent& extent, const CheckpointFile* file, const ProcessSet* set,
                   std::string& failure);

  std::vector<Extent> extents_;
  std::unordered_map<const void*, std::size_t> by_memory_;
  torch::serialize::InputArchive archive_;
};

}  // namespace hvd::detail
