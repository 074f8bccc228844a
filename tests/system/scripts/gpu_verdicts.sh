#!/usr/bin/env bash
# tests/gpu.sh with a GPU that is pretended: what passes, fails, skips itself or is not there becomes its exit code and its record.
# Usage: gpu_verdicts.sh BUILD_FOLDER
# timeout: 240
set -u

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
command -v python3 >/dev/null || { echo "SKIP: python3 is missing"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/bin" "$folder/tests" "$folder/cmake" "$folder/build-gpu/tests"
cp "$root/tests/gpu.sh" "$folder/tests"
cp "$root/cmake/mpi_env.sh" "$folder/cmake"
failed=0

# pretend TOOL COMMANDS: a program of that name, on the path or in the pretended build.
pretend() {
  printf '#!/bin/sh\n%s\n' "$2" >"$folder/$1"
  chmod +x "$folder/$1"
}
# expect CODE WORDS SECTION: the exit code, and what the program says.
expect() {
  local wanted=$1 words=$2 code
  PATH=$folder/bin:$PATH bash "$folder/tests/gpu.sh" "$3" >"$folder/said" 2>&1
  code=$?
  if [ "$code" -ne "$wanted" ] || ! grep -q "$words" "$folder/said"; then
    echo "FAILED: exit code $code instead of $wanted, or not '$words': gpu.sh $3"
    cat "$folder/said"
    failed=1
  fi
}

for tool in nvcc cmake ninja mpirun; do pretend "bin/$tool" 'exit 0'; done
pretend bin/nvidia-smi 'exit 9'
expect 77 "SKIP: there is no GPU here" communicator

pretend bin/nvidia-smi 'echo "Pretended GPU"'
pretend build-gpu/tests/errors_gpu_test 'exit 0'
pretend build-gpu/tests/nccl_gpu_test 'echo "  a rate   12.5 us   40 GB/s  80.5 % of copy"'
expect 0 "2 passed, 0 failed on Pretended GPU" communicator
python3 - "$folder"/tests/gpu-results/*.json <<'PY' || failed=1
import json
import sys

record = json.load(open(sys.argv[1]))
assert record["gpu"] == "Pretended GPU", record
assert [(step["step"], step["verdict"]) for step in record["steps"]] == [("communicators of one rank", "passed"), ("errors that calls leave behind", "passed")], record
assert record["rates"] == [{"what": "a rate", "us": 12.5, "gb_per_s": 40.0, "percent_of_copy": 80.5}], record
PY
pretend build-gpu/tests/nccl_gpu_test 'exit 77'
expect 1 "communicators of one rank: failed (skipped itself)" communicator
pretend build-gpu/tests/nccl_gpu_test 'kill -9 $$'
expect 1 "1 passed, 1 failed" communicator
# What has left a process behind that keeps its output open, as one does that is stuck in the driver, holds nothing up.
# shellcheck disable=SC2016
pretend build-gpu/tests/nccl_gpu_test 'echo "left behind"; setsid sleep 300 & echo $! >"$0.pid"'
started=$SECONDS
expect 0 "something that it has started is still there" communicator
if [ $((SECONDS - started)) -gt 200 ]; then
  echo "FAILED: a process that was left behind was waited for"
  failed=1
fi
kill "$(cat "$folder/build-gpu/tests/nccl_gpu_test.pid")"
rm "$folder/build-gpu/tests/nccl_gpu_test"
expect 1 "1 passed, 1 failed" communicator
expect 1 "FAILED: no section is called nothing" nothing
pretend bin/cmake 'exit 2'
expect 1 "build the kernels' tests: failed (2)" kernels
exit "$failed"
