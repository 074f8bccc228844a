#!/usr/bin/env bash
# A rank forks: the child, however it ends, leaves the world alone, and the library tells it why it cannot be used there.
# Usage: process_forks.sh BUILD_FOLDER
# timeout: 600
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
program=$(cd "$1" && pwd)/tests/process_forks
# shellcheck source=../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
# shellcheck source=../../support/shell/cases.sh
. "$root/tests/support/shell/cases.sh"
# shellcheck source=../../support/shell/jobs.sh
. "$root/tests/support/shell/jobs.sh"
ulimit -c 0

for ranks in 1 2 3 4; do
  for way in exit0 exit1 _exit abort kill return exec_fails exec system lives; do
    HVD_SHARED_MEMORY=auto start job "the child: $way" "$ranks" 0 "$ranks" "^rank [0-9]: all is well" "$program" "$way"
    [ "$ranks" -gt 1 ] || continue
    HVD_SHARED_MEMORY=off start job "the child: $way" "$ranks" 0 "$ranks" "^rank [0-9]: all is well" "$program" "$way"
  done
done
# Each rank forks three children; each makes seven calls.
start job "calls in the child throw" 2 0 42 "^child: [a-z_]+: NotInitialized: this process was forked from rank [01]" "$program" exit0
start job "and all do" 2 0 0 "did not throw|it is initialized" "$program" exit0
finish_cases
