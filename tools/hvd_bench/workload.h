#pragma once
/// The tensors of one measurement, and the Subject that works on them by hvd. They own their
/// memory. Collective: all ranks build the same workloads in the same order.

#include <hvd/hvd.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/hvd_bench/options.h"
#include "tools/hvd_bench/race.h"
#include "tools/hvd_bench/values.h"

namespace bench {

/// Where tensors are.
struct Place {
  bool in_arena = false;  ///< memory that the library works on in place
  bool on_gpu = false;
  hvd::AllreduceOptions use = {};  ///< what a GPU's arena is for
};

/// Tensors of one element type, one after the other in a block of memory, each aligned to 64 bytes.
class Tensors {
 public:
  /// Throws WrongOptions where the arena is asked for and there is none.
  Tensors(const std::vector<std::size_t>& counts, hvd::DataType dtype, const Place& place);
  [[nodiscard]] std::size_t size() const { return counts_.size(); }
  [[nodiscard]] std::size_t count(std::size_t tensor) const { return counts_[tensor]; }
  /// On the host: of tensors on a GPU a copy, which `push` writes there and `pull` reads back.
  [[nodiscard]] std::span<std::byte> operator[](std::size_t tensor) const;
  void push() const;
  void pull() const;
  [[nodiscard]] hvd::Buffer buffer(std::size_t tensor) const;
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] void* data() const { return block_.get(); }
  void zero() const;

 private:
  std::vector<std::size_t> counts_;
  std::vector<std::size_t> starts_;
  std::size_t bytes_ = 0;
  hvd::DataType dtype_;
  hvd::Device device_;
  std::shared_ptr<void> block_;
  std::shared_ptr<void> mirror_;  ///< of a block on a GPU; otherwise the block
};

/// Whether the ranks of every host work in memory that they share. Collective.
bool ranks_share_memory();

/// One row of the table: the library's collective on tensors in one kind of memory.
class Subject {
 public:
  Subject(const Options& options, const std::vector<std::size_t>& counts, bool in_arena,
          bool in_place, hvd::Compression wire = {}, bool persistent = false);
  [[nodiscard]] bool in_arena() const { return in_arena_; }
  [[nodiscard]] bool in_place() const { return in_place_; }
  [[nodiscard]] std::string memory() const { return in_arena_ ? "arena" : "ordinary"; }
  [[nodiscard]] std::string place() const {
    return persistent_ ? "again" : in_place_ ? "in" : writes_into() ? "into" : "out";
  }
  [[nodiscard]] std::string wire() const { return name_of(wire_); }
  /// Once, all tensors: as a burst, then waited for, where there are several or with --async.
  void run();
  /// Runs once on known values; the number of wrong elements on this rank.
  std::size_t count_wrong();
  [[nodiscard]] const Tensors& input() const { return input_; }
  /// Ready to be timed: zeros, which stay zeros however often they are reduced.
  void zero() const;

 private:
  [[nodiscard]] Place whereabouts() const {
    return {in_arena_, options_.on_gpu, {.op = options_.op}};
  }
  [[nodiscard]] bool writes_into() const {
    return options_.into && is_shared_out(options_.collective);
  }
  void run_into();
  void make_persistent();
  [[nodiscard]] const Tensors& output() const { return output_ ? *output_ : input_; }
  void run_allreduce();
  [[nodiscard]] Question question() const;
  [[nodiscard]] std::size_t count_wrong_shares() const;

  const Options& options_;
  bool in_arena_, in_place_, persistent_;
  hvd::Compression wire_;
  std::vector<int> hosts_;  ///< of each rank, where the result depends on it
  Tensors input_;
  std::optional<Tensors> output_;
  std::vector<hvd::Buffer> inputs_, outputs_;
  std::vector<hvd::AllreduceOptions> reduce_options_;
  hvd::BroadcastOptions broadcast_options_;
  hvd::AllgatherOptions gather_options_;
  hvd::AlltoallBufferOptions exchange_options_;
  hvd::ReducescatterOptions scatter_options_;
  std::vector<hvd::Handle<void>> handles_;
  std::vector<hvd::PersistentHandle<void>> again_;  ///< of persistent operations
  std::optional<hvd::PersistentHandle<std::vector<std::int64_t>>>
      exchange_again_;  ///< or this, of an alltoall
  hvd::Gathered gathered_;
  hvd::Exchanged exchanged_;
};

/// The GPU that this rank measures on. In a build without CUDA (gpu_none.cc) there is none. It
/// fails with WrongOptions where there is no GPU, and with std::runtime_error and CUDA's words.
namespace gpu {

/// This rank's, which hvd takes too: by its local rank.
hvd::Device device();
/// Uninitialised.
std::shared_ptr<void> allocate(std::size_t bytes);
/// Either way between host and GPU, or within one; returns when it is done.
void copy(void* to, const void* from, std::size_t bytes);

}  // namespace gpu

}  // namespace bench
