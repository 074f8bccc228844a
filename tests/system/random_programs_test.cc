/// Programs drawn from seeds, run with threads as ranks, against an oracle. To repeat a failure or
/// to run more:
///   HVD_TEST_SEED=<first seed> HVD_TEST_PROGRAMS=<how many> tests/unit_tests -tc="*random*"
/// HVD_TEST_DOMAINS=<n>: all of them with so many domains, but those with fewer ranks.

#include <doctest/doctest.h>

#include <string>

#include "tests/support/programs/program_runner.h"
#include "tests/support/programs/random_program.h"
#include "tests/support/random.h"
#include "tests/support/sanitized.h"

namespace hvd::test {
namespace {

constexpr unsigned long kPrograms = kSanitized ? 40 : 300;

}  // namespace

TEST_CASE("random programs give what the oracle says" * doctest::timeout(36000)) {
  const unsigned long first = number_from("HVD_TEST_SEED", 1);
  const unsigned long programs = number_from("HVD_TEST_PROGRAMS", kPrograms);
  const auto domains = static_cast<int>(number_from("HVD_TEST_DOMAINS", 0));
  unsigned long run = 0;
  for (unsigned long seed = first; run < programs; ++seed) {
    Program program = draw_program(seed);
    if (program.size < domains) continue;
    if (domains > 0) program.domains = domains;
    ++run;
    const auto failures = run_program(program);
    if (failures.empty()) continue;
    std::string text = describe(program);
    for (const auto& failure : failures) text += "\n  " + failure;
    FAIL_CHECK(text << "\nto repeat: HVD_TEST_SEED=" << seed
                    << " HVD_TEST_PROGRAMS=1 unit_tests -tc=\"*random*\"");
  }
}

}  // namespace hvd::test
