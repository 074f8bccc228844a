#!/usr/bin/env bash
# Runs one test for ctest: in a folder for temporary files of its own, so that tests can run side by side; ended gently after its time by
# timeout(1), so that mpirun ends its ranks, which ctest's own limit does not. Notes what the test cost for tests/costs.py.
# Usage: run_test.sh NAME SECONDS COSTS_FOLDER COMMAND...
set -u

name=$1 limit=$2 costs=$3
shift 3
TMPDIR=$(mktemp -d "${TMPDIR:-/tmp}/hvd.XXXXXX") || exit 1
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
mkdir -p "$costs"
TIMEFORMAT='%R %U %S' # seconds: by the clock, of processors in the program, in the kernel
{ time timeout --verbose --kill-after=10 "$limit" "$@" 2>&3; } 3>&2 2>"$costs/$name"
