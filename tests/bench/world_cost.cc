// What a world costs: mpirun -np N world_cost [COUNT]. Makes COUNT worlds of all ranks (default 8)
// through a store of files, one after the other, and keeps them. Rank 0 prints the median of the
// milliseconds until each could be used, what each takes while it is idle, by /proc, and 4 B in it
// beside 4 B in the global world.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "hvd/hvd.h"
#include "tests/support/worlds/file_store.h"
#include "tests/support/worlds/process_stock.h"

namespace {

using hvd::test::ProcessStock;
using hvd::test::take_stock;
using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

double microseconds_of_4_bytes(const hvd::World& world) {
  constexpr int kRounds = 20'000;
  float value = 1;
  const hvd::Buffer buffer{.data = &value, .dtype = hvd::DataType::Float32, .shape = {1}};
  const hvd::AllreduceOptions options{.name = "small", .op = hvd::ReduceOp::Max, .world = world};
  for (int i = 0; i < 100; ++i) hvd::allreduce(buffer, buffer, options);
  const auto begin = Clock::now();
  for (int i = 0; i < kRounds; ++i) hvd::allreduce(buffer, buffer, options);
  return milliseconds_since(begin) * 1000 / kRounds;
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 8;
  hvd::init();
  std::array<char, 64> folder{"/tmp/hvd-cost-XXXXXX"};
  if (hvd::rank() == 0 && ::mkdtemp(folder.data()) == nullptr) return 1;
  hvd::broadcast({folder.data(), hvd::DataType::UInt8, {static_cast<std::int64_t>(folder.size())}},
                 {});
  const auto store = std::make_shared<hvd::test::FileStore>(folder.data());
  std::vector<hvd::World> worlds;
  std::vector<double> times;
  ProcessStock before;
  for (int i = 0; i <= count; ++i) {
    if (i == 1) before = take_stock();  // the first pays for what all of them share
    hvd::barrier();
    const auto begin = Clock::now();
    worlds.emplace_back(
        hvd::test::rendezvous_of(store, hvd::rank(), hvd::size(), "world " + std::to_string(i)));
    worlds.back().barrier();
    if (i > 0) times.push_back(milliseconds_since(begin));
  }
  const ProcessStock after = take_stock();
  std::sort(times.begin(), times.end());
  const double global = microseconds_of_4_bytes(hvd::World()),
               own = microseconds_of_4_bytes(worlds.back());
  if (hvd::rank() == 0) {
    const auto each = [&](long ProcessStock::*what) {
      return static_cast<double>(after.*what - before.*what) / count;
    };
    std::printf("%d ranks, %d worlds: usable after %.1f ms (median; at most %.1f)\n", hvd::size(),
                count, times[times.size() / 2], times.back());
    std::printf(
        "each takes, idle: %.1f threads, %.1f descriptors, %.1f mappings, %.2f MiB resident\n",
        each(&ProcessStock::threads), each(&ProcessStock::descriptors),
        each(&ProcessStock::mappings), each(&ProcessStock::resident_kib) / 1024);
    std::printf("allreduce of 4 B: %.2f us in a world, %.2f us in the global one, ratio %.2f\n",
                own, global, own / global);
    std::filesystem::remove_all(folder.data());
  }
  worlds.clear();
  hvd::shutdown();
  return 0;
}
