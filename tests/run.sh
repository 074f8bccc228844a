#!/usr/bin/env bash
# Sets up what is missing, builds, and runs the tests. The last line counts; the exit code is 0 only if nothing failed.
#   bash tests/run.sh                          the release build: every kind of test, without the label "thorough"
#   bash tests/run.sh --all                    all of its tests; then the builds with ThreadSanitizer and AddressSanitizer
#   bash tests/run.sh [--all] CTEST-ARGUMENTS  the tests that they choose (-R NAME, -L LABEL, ...)
# Tests run side by side, as most wait more than they compute: HVD_TEST_JOBS, default two for each core, and one for those that only wait.
# What each build and test cost: python3 tests/costs.py
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
passed=0 failed=0 skipped=0
presets=(release)
if [ "${1:-}" = --all ]; then
  presets+=(tsan asan)
  shift
elif [ $# -eq 0 ]; then
  set -- -LE '^thorough$'
fi

finish() {
  printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
  [ "$failed" -eq 0 ]
  exit
}

bash "$root/cmake/setup.sh" --tests || {
  failed=1
  finish
}
# shellcheck source=../cmake/build.sh
. "$root/cmake/build.sh"
# shellcheck source=../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"

# attribute <name> <file>: a number of the report's <testsuite ...>
attribute() { grep -m 1 -o "[[:space:]]$1=\"[0-9]*\"" "$2" | tr -dc '0-9'; }

# skip_reasons <report> <log>: for each skipped test its line "SKIP: ..." or, failing that, its last line
skip_reasons() {
  sed -n 's/.*<testcase name="\([^"]*\)".* status="notrun".*/\1/p' "$1" | while read -r name; do
    awk -v name="$name" '
      /^[0-9]+\/[0-9]+ Test: / { here = ($3 == name) }
      here && /^Output:$/ { inside = 1; next }
      /^<end of output>$/ { inside = 0 }
      inside && /^SKIP/ && reason == "" { reason = $0; sub(/^SKIP:? */, "", reason) }
      inside && NF && !/^-+$/ { last = $0 }
      END { print "skipped " name ": " (reason == "" ? last : reason) }' "$2"
  done
}

# slowest <build folder>: the five tests that took longest
slowest() {
  local file
  for file in "$1"/tests/costs/*; do
    if [ "$file" -nt "$1/tests-begin" ]; then echo "$(cut -d ' ' -f 1 "$file") ${file##*/}"; fi
  done | sort -rn | head -n 5 | awk '{ printf "%s%s %.0f s", NR == 1 ? "slowest: " : ", ", $2, $1 } END { if (NR) print "" }'
}

# test_preset <preset> <ctest arguments>...
test_preset() {
  local preset=$1 folder=$root/build report total bad left
  shift
  if [ "$preset" != release ]; then folder=$root/build-$preset; fi
  printf '\n== %s\n' "$preset"
  local start=$SECONDS built
  if ! hvd_build "$preset"; then
    echo "the build $preset failed"
    failed=$((failed + 1))
    return
  fi
  built=$((SECONDS - start))
  report=$folder/report.xml
  rm -f "$report"
  touch "$folder/tests-begin"
  ctest --test-dir "$folder" --parallel "${HVD_TEST_JOBS:-$((2 * $(nproc) + 1))}" --output-on-failure --no-tests=ignore --output-junit "$report" "$@"
  local code=$?
  if [ ! -s "$report" ]; then
    echo "ctest left no report of $preset"
    failed=$((failed + 1))
    return
  fi
  total=$(attribute tests "$report") bad=$(attribute failures "$report") left=$(($(attribute skipped "$report") + $(attribute disabled "$report")))
  if [ $# -eq 0 ] && [ "$total" -eq 0 ]; then
    echo "$preset has no tests"
    failed=$((failed + 1))
  fi
  if [ "$code" -ne 0 ] && [ "$bad" -eq 0 ]; then # tests that could not be run count as skipped in the report
    echo "ctest ended with exit code $code"
    bad=1 left=$((left > 0 ? left - 1 : 0))
  fi
  passed=$((passed + total - bad - left)) failed=$((failed + bad)) skipped=$((skipped + left))
  skip_reasons "$report" "$folder/Testing/Temporary/LastTest.log"
  slowest "$folder"
  echo "$preset: built in $built s, tested in $((SECONDS - start - built)) s"
}

for preset in "${presets[@]}"; do test_preset "$preset" "$@"; done
echo
finish
