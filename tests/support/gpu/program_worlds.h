#pragma once
/// Runs the programs of stream_program.h: on ranks that have NCCL, that share a GPU, and that stage
/// through the host, each with its backend alone, without an engine, one rank at a time (baton.h).
/// What happens is the same each time. Functions without state.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/gpu/api/placement.h"
#include "tests/support/gpu/stream_program.h"

namespace hvd::gpu::test {

struct ProgramReport {
  std::vector<std::string> errors;  ///< what went wrong; empty: nothing
  std::string left_out;             ///< the call that was left out, if it came to it
  std::vector<std::pair<Omissions::Call, int>> calls;  ///< how many of each kind each rank has made
};

/// Draws a program that suits the way.
ProgramDraw draw_program_for(Route way, std::uint64_t seed);

/// Runs it. What is in the world besides, as tracks, registration and levels, follows from the
/// program's seed.
ProgramReport run_program_on(Route way, const ProgramDraw& program, const Schedule& schedule,
                             const std::optional<Omissions::Call>& left_out = std::nullopt);

/// Returns "NCCL, 2 ranks, program 3, schedule late:3".
std::string describe(Route way, const ProgramDraw& program, const Schedule& schedule);

}  // namespace hvd::gpu::test
