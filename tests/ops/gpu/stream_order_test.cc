// What orders the work on GPUs: programs drawn from seeds, on virtual GPUs that do it as late as is
// legal, at random, at once, or starve a stream. No two uses of memory may lack an order, whatever
// the data are.
#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "tests/support/gpu/program_worlds.h"
#include "tests/support/sanitized.h"

namespace hvd::gpu::test {
namespace {

constexpr std::array kSchedules{Schedule::Kind::Late, Schedule::Kind::Random, Schedule::Kind::Eager,
                                Schedule::Kind::Starved};

/// HVD_TEST_GPU_SEEDS: how many programs, instead of so many.
std::uint64_t seeds(std::uint64_t otherwise) {
  const char* const text = std::getenv("HVD_TEST_GPU_SEEDS");
  if (text != nullptr) return std::stoull(text);
  return hvd::test::kThreadSanitizer ? otherwise / 10
         : hvd::test::kSanitized     ? otherwise / 5
                                     : otherwise;
}

void run_programs(Route way) {
  for (std::uint64_t seed = 0; seed < seeds(10); ++seed) {
    const ProgramDraw program = draw_program_for(way, seed);
    for (const auto kind : kSchedules) {
      // Staging moves megabytes, for which ThreadSanitizer needs 20 s.
      if (hvd::test::kThreadSanitizer && way == Route::Staged && kind != Schedule::Kind::Random)
        continue;
      const Schedule schedule{kind, seed};
      const ProgramReport report = run_program_on(way, program, schedule);
      CAPTURE(describe(way, program, schedule));
      CAPTURE(report.errors.empty() ? std::string() : report.errors.front());
      CHECK(report.errors.size() == 0);
    }
  }
}

}  // namespace

TEST_CASE("programs on virtual GPUs: NCCL, by 4 schedules") { run_programs(Route::Nccl); }
TEST_CASE("programs on virtual GPUs: a shared GPU, by 4 schedules") {
  run_programs(Route::SharedGpu);
}
TEST_CASE("programs on virtual GPUs: staged, by 4 schedules") { run_programs(Route::Staged); }

}  // namespace hvd::gpu::test
