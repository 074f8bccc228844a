// Instances whose ranks are threads.

#include "tests/contract/instances.h"
#include "tests/support/gpu/locked_gpu_api.h"
#include "tests/support/thread_world.h"

namespace hvd::contract {

namespace {

using gpu::test::LockedDevices;

/// Adds to what a rank's engine is made of.
using Dress =
    std::function<void(int rank, EngineParts& parts, const std::shared_ptr<Arena>& arena)>;

/// Where tensors can lie that backends work on in place: shared memory of the host or, for a GPU's
/// tensors, what their backend lends, if it does. The arena and the engine outlive what they gave.
std::shared_ptr<void> shared_memory(Arena& arena, Engine& engine, const Setting& setting, int rank,
                                    std::size_t bytes) {
  if (setting.device.kind == DeviceKind::Cuda) {
    Submission like;
    like.op = ReduceOp::Sum;
    like.device = {DeviceKind::Cuda, rank};
    if (auto lent = engine.allocate(like, DataType::Float32, bytes)) return lent;
  }
  return {arena.allocate(bytes), [&arena](void* block) { arena.free(block); }};
}

/// Runs the suite in both worlds of an instance. `make_dress`: afresh for each.
Report run_threads(Setting setting, const Choice& choice,
                   const std::function<Dress()>& make_dress) {
  Report report;
  std::vector<std::map<std::string, Block>> notebooks(static_cast<std::size_t>(setting.size));
  for (const bool fuses : {true, false}) {
    setting.fuses = fuses;
    const std::string where = setting.name + (fuses ? "" : ", threshold 0");
    const Setting own{where, setting.size,  setting.device, setting.any_order,
                      false, setting.arena, fuses};
    test::WorldOptions options;
    options.size = setting.size;
    options.limit = std::chrono::hours(1);  // the Watch knows more
    options.config.fusion_threshold_bytes = fuses ? kThreshold : 0;
    options.config.process_sets = {ranks_of(SetKind::Early, setting.size)};
    if (make_dress) options.add_backends = make_dress();
    test::ThreadWorld world(options);
    Watch watch(where, 0, setting.size);
    std::vector<Report> reports(static_cast<std::size_t>(setting.size));
    world.run(
        [&](int rank, Engine& engine) {
          Arena& arena = world.arena(rank);
          const auto endpoint = make_engine_door(engine, [&, rank](std::size_t bytes) {
            return shared_memory(arena, engine, own, rank, bytes);
          });
          const auto at = static_cast<std::size_t>(rank);
          reports[at] = run_rank(*endpoint, own, rank, notebooks[at], choice, watch);
        },
        false);
    for (std::size_t rank = 1; rank < reports.size(); ++rank) reports[0].merge_rank(reports[rank]);
    report.add(reports[0]);
  }
  return report;
}

std::string title(const char* backend, int ranks) {
  return std::string(backend) + ", " + std::to_string(ranks) + " thread" + (ranks == 1 ? "" : "s");
}

}  // namespace

Report run_shm_threads(int ranks, const Choice& choice) {
  return run_threads({.name = title("shm", ranks), .size = ranks, .device = {}}, choice, {});
}

Report run_gpu_threads(const GpuInstance& instance, int ranks, const Choice& choice) {
  // NCCL's sums are not made in rank order; those of the others are the host's.
  const Setting setting{.name = title(instance.name, ranks),
                        .size = ranks,
                        .device = {DeviceKind::Cuda, 0},
                        .any_order = instance.way == Route::Nccl};
  return run_threads(setting, choice, [ranks, instance]() -> Dress {
    const auto devices = std::make_shared<LockedDevices>(ranks);
    devices->registration = instance.registration;
    return [devices, way = instance.way](int rank, EngineParts& parts,
                                         const std::shared_ptr<Arena>& arena) {
      devices->add_backends(way, rank, parts, arena);
      parts.memory = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(
          devices, parts.memory);
    };
  });
}

}  // namespace hvd::contract
