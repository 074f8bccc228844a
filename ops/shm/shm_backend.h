#pragma once
/// ShmBackend has the collectives among ranks that share memory. Everything happens in the ranks'
/// arenas: a tensor that lives there is worked on in place, another is staged there when it is
/// submitted (while it is still in the submitter's cache) and copied back when the batch is done.
/// Allreduces are cut into chunks that any rank claims, so that a rank that is not scheduled holds
/// nobody up, and a small batch is done whole by the rank that completes its agreement. Every
/// element is reduced in rank order, whoever does it and whatever batch it travels in. Where a rank
/// only takes from the others (ops/shm/pull_execution.cc), large tensors elsewhere are not staged
/// but read where they are. It owns the staging blocks between `prepare` and the end of the batch.
/// It throws BackendError when there is no more memory to share.
// Tested in tests/contract/suite.cc, tests/hvd/engine/pulled_rounds_test.cc

#include "hvd/backend.h"
#include "hvd/exposed_memory.h"
#include "hvd/fast_path_memory.h"
#include "hvd/routes.h"
#include "hvd/stats.h"
#include "ops/host_ops.h"
#include "ops/shm/context.h"
#include "ops/shm/pulled_blocks.h"

namespace hvd {

/// Returns the arena of the rank with this index. `memory`, whose board has been formatted, must
/// stay mapped.
std::shared_ptr<Arena> make_arena(const DomainMemory& memory, int index);

class ShmBackend final : public Backend, private SlotMemory, private ExposedMemory {
 public:
  ShmBackend(DomainMemory memory, std::shared_ptr<Arena> arena, Board& board, Topology topology,
             std::shared_ptr<StatsCounters> stats);

  std::string_view name() const override { return "shm"; }
  /// CPU tensors, process sets within this domain.
  bool supports(const BatchTraits& traits) const override;
  std::uint64_t prepare(const BatchTraits& traits, BatchMember& member) override;
  void release(const BatchTraits& traits, std::uint64_t location) noexcept override;
  std::unique_ptr<Execution> launch(Batch batch) override;
  SlotMemory* slot_memory() override { return this; }
  ExposedMemory* exposed_memory() override { return this; }
  bool notifies() const override { return true; }

 private:
  std::optional<std::uint64_t> keep(const BatchTraits& traits, std::size_t bytes) override;
  void drop(std::uint64_t location) noexcept override;
  bool is_free(std::uint64_t location) override;
  std::byte* kept(int index, std::uint64_t location) override;
  void run_for_all(const BatchTraits& traits, std::int64_t count,
                   std::span<std::byte* const> blocks,
                   std::span<const std::int64_t> parts) override;
  std::optional<std::uint64_t> lend(std::size_t bytes) override;
  bool is_lent(std::uint64_t location) override;
  void take_back(std::uint64_t location, std::uint32_t readers) noexcept override;
  void trim() noexcept override { pulled_blocks_.trim(); }
  void pull(const BatchTraits& traits, std::int64_t count, std::span<const std::byte* const> blocks,
            std::span<const std::int64_t> parts, void* output) override;
  void finish_reading(std::span<const std::byte* const> blocks) noexcept override;
  std::optional<std::uint64_t> expose(const void* memory, std::size_t bytes, bool fed) override;
  void withdraw(std::uint64_t location) noexcept override { staging_.release(location); }
  bool get(int index, std::uint64_t location, std::size_t skipped, void* to,
           std::size_t bytes) override {
    return staging_.read(index, location, skipped, to, bytes);
  }

  const RouteMachine machine_;
  ShmContext context_;
  Board& board_;  // of the context, as are the next two
  const Topology& topology_;
  Staging& staging_;
  PulledBlocks pulled_blocks_;
  std::shared_ptr<StatsCounters> stats_;
  std::vector<void*> outputs_;  // of `run_for_all`, as are the next two
  std::vector<const void*> inputs_;
  std::vector<std::byte> gathered_;
};

}  // namespace hvd
