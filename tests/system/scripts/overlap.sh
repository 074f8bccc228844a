#!/usr/bin/env bash
# tests/bench/overlap.py: its figures and its picture of a profile whose numbers are known, files that it refuses; and the profile that
# step_bench writes has what it needs. It judges no speed.
# Usage: overlap.sh BUILD_FOLDER
# timeout: 120
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
# shellcheck source=../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
command -v python3 >/dev/null || { echo "SKIP: no Python"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

verdict() { # verdict NAME PROBLEM
  if [ -z "$2" ]; then
    echo "PASS  $1"
  else
    echo "FAIL  $1: $2; output:"
    sed 's/^/      /' "$work/out"
    failures=$((failures + 1))
  fi
}
overlap() { timeout 60 python3 "$root/tests/bench/overlap.py" "$@" >"$work/out" 2>&1; }
has() { grep -qF -- "$1" "$work/out" || problem=${problem:-"it does not say '$1'"}; }

# known.json: three steps of 100 ms of two ranks, the last without communication. Of the first's batches 20 of 40 ms lie within the backward pass on rank 0, and 20 of
# 25 on rank 1, where they overlap; nothing of the second's. lacking.json: rank 1 lacks the second step's batch, and the third has one.
python3 - "$work" <<'PYTHON' || failures=$((failures + 1))
import json, sys
events = []
def meta(pid, name, words, tid=0):
    events.append({"ph": "M", "pid": pid, "tid": tid, "name": name, "args": {"name": words}})
def batch(pid, tid, ready, agreed, done):
    begin = lambda name, at: events.append({"ph": "B", "pid": pid, "tid": tid, "name": name, "ts": at * 1000.0})
    end = lambda at: events.append({"ph": "E", "pid": pid, "tid": tid, "ts": at * 1000.0})
    begin("NEGOTIATE_ALLREDUCE", ready), end(agreed)
    begin("ALLREDUCE", agreed), begin("WAIT_FOR_DATA", agreed), end(agreed + 1), begin("SHM_ALLREDUCE", agreed + 1), end(done), end(done)
for rank in (0, 1):
    meta(rank, "process_name", f"rank {rank} on host, process 1")
    meta(1000000 + rank, "process_name", f"rank {rank}: LibTorch, train")
    for step in range(3):
        at = 100.0 * step
        for name, begin, length in (("training step", 0, 100), ("forward", 0, 20), ("backward", 20, 40),
                                    ("wait for gradients", 60, 20), ("update", 80, 20)):
            events.append({"ph": "X", "cat": "user_annotation", "pid": 1000000 + rank, "tid": 7, "name": name, "ts": (at + begin) * 1000, "dur": length * 1000})
        for i in range(100):  # operators: one a millisecond, but from 40 to 50 one in two
            if i not in range(40, 50) or i % 2:
                events.append({"ph": "X", "cat": "cpu_op", "pid": 1000000 + rank, "tid": 7, "name": "aten::mul", "ts": (at + i + 0.5) * 1000, "dur": 100})
batch(0, 1, 30, 40, 50), batch(0, 2, 50, 50, 80)
batch(1, 1, 35, 40, 60), batch(1, 2, 55, 55, 65), batch(1, 3, 41, 42, 44)
batch(0, 1, 130, 160, 180)
common = len(events)
batch(1, 1, 160, 160, 180)
json.dump({"traceEvents": events}, open(sys.argv[1] + "/known.json", "w"))
del events[common:]
for rank in (0, 1):
    batch(rank, 1, 230, 240, 245)
json.dump({"traceEvents": events}, open(sys.argv[1] + "/lacking.json", "w"))
PYTHON
problem=
overlap - "known one=$work/known.json" || problem="it failed"
has "known one: 2 steps of 2 ranks"
has "training step 100, forward 20, backward 40, wait for gradients 20, exposed 20, update 20, batches 1.75, under way 26.25, hidden 10"
has "hidden behind backward: 38 % of the time that batches are under way (0 to 62 % step by step)"
has "operators begun meanwhile: 0.82 times as many"
verdict "a profile whose numbers are known" "$problem"
problem=
overlap - "lacking=$work/lacking.json" || problem="it failed"
has "lacking: 2 steps of 2 ranks"
has "batches 1.75, under way 18.75, hidden 12.5"
verdict "a profile in which a rank lacks a step" "$problem"

problem=
overlap "$work/known.svg" "known one=$work/known.json" || problem="it failed"
python3 - "$work/known.svg" 2>>"$work/out" <<'PYTHON' || problem=${problem:-"the picture is not what it should be"}
import collections, sys, xml.dom.minidom
picture = xml.dom.minidom.parse(sys.argv[1])
words = [span.firstChild.data for span in picture.getElementsByTagName("tspan")]
assert "known one: 38 % hidden" in words and "wait for gradients" in words and words.count("its gradients") == 2, words
boxes = collections.Counter()  # of each colour, the legend's and the panel's
for path in picture.getElementsByTagName("path"):
    boxes[path.getAttribute("class")] += path.getAttribute("d").count("z")
# Two ranks, each with four phases and an exposed wait; 2 batches of rank 0 and 3 of rank 1.
assert [boxes[f"s{i}"] for i in range(7)] == [3, 3, 3, 3, 3, 6, 6], boxes
assert len(picture.getElementsByTagName("path")) < 20
PYTHON
verdict "a picture" "$problem"

refused() { # refused NAME WORDS TEXT: of a file with this text
  printf '%s' "$3" >"$work/bad.json"
  problem=
  overlap - "$work/bad.json" && problem="it did not fail"
  has "bad.json: $2"
  verdict "$1" "$problem"
}
refused "what is no JSON" "not what --profile writes" "# a table"
refused "another program's JSON" "not what --profile writes" '{"rows": []}'
refused "no steps" "no training step in which gradients are reduced" '{"traceEvents": []}'

if [ -x "$build/tests/step_bench" ]; then
  problem=
  export OMP_NUM_THREADS=1
  timeout --kill-after=5 60 mpirun -np 2 "$build/tests/step_bench" --warmup 1 --rounds 3 --model bert-base --layers 2 --width 48 --heads 2 \
    --vocabulary 300 --sequence 16 --subjects none,hvd --profile "$work/steps.json" >"$work/out" 2>&1 </dev/null || problem="step_bench failed"
  has "# the profile is in $work/steps.json"
  overlap - "$work/steps.json" || problem=${problem:-"it failed"}
  has " steps of 2 ranks, medians" # three, where the machine has nothing else to do
  grep -qE 'forward [0-9.]+, backward [0-9.]+, wait for gradients [0-9.e-]+, exposed [0-9.e-]+, update [0-9.]+, batches [1-9]' "$work/out" || problem=${problem:-"phases are missing"}
  verdict "what step_bench writes" "$problem"
else
  echo "not tested: step_bench's profile, it was not built"
fi

echo "$failures failed"
[ "$failures" -eq 0 ]
