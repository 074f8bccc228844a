#!/usr/bin/env bash
# Ranks that end without shutdown(): the job ends in order where all return from main(), however late rank 0 is with its checkpoint; where one
# ends otherwise, or in a signal handler that has interrupted the library, the others learn of it, and nothing hangs. Those that init() has
# refused end in order too, and those that have caught the error by which their world has failed. No thread of the library takes a signal.
# Usage: process_exits.sh BUILD_FOLDER
# timeout: 600
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
program=$(cd "$1" && pwd)/tests/process_exits
# shellcheck source=../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
# shellcheck source=../../support/shell/cases.sh
. "$root/tests/support/shell/cases.sh"
# shellcheck source=../../support/shell/jobs.sh
. "$root/tests/support/shell/jobs.sh"
ulimit -c 0

late_checkpoint() { # RANKS: rank 0 needs longer than any patience that a rank might have
  job "rank 0 writes its checkpoint when the others have returned" "$1" 0 0 "without calling .?finalize|died" \
    "$program" late_checkpoint "$work/checkpoint" 9
  [ -s "$work/checkpoint" ] || { echo "FAIL  there is no checkpoint"; failures=$((failures + 1)); }
}
for shared in auto off; do
  export HVD_SHARED_MEMORY=$shared
  for ranks in 1 2 3 4; do
    start late_checkpoint "$ranks"
    [ "$ranks" -gt 1 ] || continue
    start job "a rank ends with status 5" "$ranks" "5 3" some "^rank 0: RankFailed: rank $((ranks - 1)) (died|ended with exit status 5)" \
      "$program" status 5
    for status in 0 6; do
      start job "a rank calls shutdown() and exit($status); the others go on" "$ranks" "$status" $((ranks - 1)) \
        "^rank . goes on: .*rank $((ranks - 1)) has ended, or called" "$program" leaves "$status"
    done
    start job "a rank ends by an exception when others have returned" "$ranks" failure some "rank 0 has had enough" "$program" return_then_fail
  done
  for ranks in 2 4; do
    start job "all catch a StallTimeout, one after the other, and return" "$ranks" 0 "$ranks" "^rank . has caught StallTimeout" \
      "$program" caught deadline
    start job "all catch an abort(), one after the other, and return" "$ranks" 0 "$ranks" "^rank . has caught RankFailed" \
      "$program" caught abort
  done
  start job "a signal that the program has blocked" 2 0 2 "^rank . has its signal" env HVD_TIMELINE="$cases_folder/$shared" "$program" blocked
  for ranks in 2 4; do
    for status in 0 7; do # without MPI_Finalize mpirun counts a status of 0 as a failure, too
      start job "exit($status) in a signal handler, while the rank waits" "$ranks" failure 0 "watchdog" "$program" signal "$status" 0
      start job "exit($status) in a signal handler, among small operations" "$ranks" failure 0 "watchdog" "$program" signal "$status" 137
    done
  done
done
export HVD_SHARED_MEMORY=auto
start job "exit() in a signal handler: the others are told" 3 failure some "^rank [01]: RankFailed: rank 2 died" "$program" signal 0 211
for ranks in 1 3; do
  start job "functions that follow operations run while the ranks return from main()" "$ranks" 0 "$ranks" "^rank . has been followed: 1" \
    "$program" followed return
  start job "exit(0) in a function that follows an operation" "$ranks" 0 "$ranks" "^rank . has been followed: 1" "$program" followed 0
  start job "exit(5) in a function that follows an operation" "$ranks" 5 "$ranks" "^rank . has been followed: 1" "$program" followed 5
done
for ranks in 2 4; do
  start job "init() is refused, and the program ends in order" "$ranks" 0 "$ranks" "^rank . was refused" "$program" refused 0
done
start job "init() is refused, then it is not" 3 0 6 "^rank . was (refused|taken)" "$program" refused 1
finish_cases
