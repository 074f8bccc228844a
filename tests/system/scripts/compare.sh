#!/usr/bin/env bash
# tests/bench/compare.sh: its tables, medians and plots have what they should, for allreduces and for training steps; wrong calls and files are
# refused. Without the peers, which are not there on every machine. It judges no speed.
# Usage: compare.sh BUILD_FOLDER
# timeout: 200
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
[ -x "$build/tools/hvd_bench" ] || { echo "SKIP: hvd_bench was not built"; exit 77; }
export HVD_BUILD=$build HVD_COMPARE_PYTHON=none HVD_HOROVOD_PYTHON=

verdict() { # verdict NAME PROBLEM
  if [ -z "$2" ]; then
    echo "PASS  $1"
  else
    echo "FAIL  $1: $2; output:"
    sed 's/^/      /' "$work/out" "$work"/*.tsv 2>/dev/null
    failures=$((failures + 1))
  fi
}
# bars: how many the plot has to have: all that was measured but the base, without communication or not
bars() { awk -F '\t' '/^# base: / { base = substr($0, 9) } !/^#/ && $2 != base && $2 !~ /^none/ { n++ } END { print n + 0 }' "$work/plot.tsv"; }
# compare NAME SUBJECTS ARGUMENTS...: the medians are of these works and subjects, all with a time and a ratio, and the table shows them
compare() {
  local name=$1 expected=$2 problem='' found
  shift 2
  rm -f "$work"/plot.*
  if ! HVD_COMPARE_SVG=$work/plot.svg bash "$root/tests/bench/compare.sh" "$@" >"$work/out" 2>&1; then problem="it failed"; fi
  found=$(grep -v '^#' "$work/plot.tsv" 2>/dev/null | awk -F '\t' '$3 > 0 && $4 > 0 { print $1 ":" $2 }' | grep -v -- '-fp16$' | tr '\n' ' ')
  if [ "$found" != "$expected " ]; then problem=${problem:-"measured '$found' instead of '$expected'"}; fi
  grep -q "${expected##*:} *\$" "$work/out" || problem=${problem:-"the table lacks the last subject"}
  grep -q ')$' "$work/out" || grep -q ' -$' "$work/out" || problem=${problem:-"the table has no ratios"}
  if command -v python3 >/dev/null; then
    python3 -c 'import sys, xml.dom.minidom as m; d = m.parse(sys.argv[1]); assert "prefers-color-scheme:dark" in d.toxml()
bars = sum(p.getAttribute("d").count("z") - 1 for p in d.getElementsByTagName("path") if p.getAttribute("class")[0] == "s")  # not the legend
assert bars == int(sys.argv[2]), bars' "$work/plot.svg" "$(bars)" 2>>"$work/out" || problem=${problem:-"the plot is not what it should be"}
  else
    grep -q "no plot" "$work/out" || problem=${problem:-"it does not say that there is no plot"}
  fi
  verdict "$name" "$problem"
}

HVD_COMPARE_SIZES="1024 resnet18" compare "allreduces" \
  "1024:hvd-arena 1024:hvd-ordinary 1024:MPI 1024:memcpy resnet18:hvd-arena resnet18:hvd-ordinary resnet18:MPI resnet18:MPI-packed resnet18:memcpy" 1 1
sweep=
for collective in allreduce broadcast allgather alltoall reducescatter; do
  for bytes in 4 64; do sweep+="$collective:$bytes:hvd-arena $collective:$bytes:hvd-ordinary $collective:$bytes:MPI "; done
done
HVD_COMPARE_SIZES="4 64" compare "every collective" "${sweep% }" --sweep 2 1
grep -q '^# against MPI: 10 cells: ' "$work/out" && problem= || problem="it does not count cells"
verdict "cells won" "$problem"
if [ -x "$build/tests/step_bench" ]; then
  HVD_COMPARE_MODELS=bert-base HVD_COMPARE_STEPS=2 HVD_COMPARE_BERT="--layers 1 --width 32 --heads 2 --vocabulary 99 --sequence 8" \
    compare "training steps" "bert-base:none bert-base:hvd bert-base:MPI" --steps 2 2
else
  echo "not tested: training steps, step_bench was not built"
fi

HVD_BUILD=$work bash "$root/tests/bench/compare.sh" >"$work/out" 2>&1 && problem="it did not fail" || problem=
grep -q "hvd_bench is not there" "$work/out" || problem="it does not say what is missing"
verdict "without a build" "$problem"
bash "$root/tests/bench/compare.sh" --frobnicate >"$work/out" 2>&1
[ $? -eq 2 ] && problem= || problem="not refused with 2"
verdict "an unknown option" "$problem"
if command -v python3 >/dev/null; then
  printf '# base: a\n4\ta\tmany\t1\n' >"$work/bad.tsv"
  python3 "$root/tests/bench/plot.py" "$work/bad.tsv" "$work/bad.svg" >"$work/out" 2>&1 && problem="it did not fail" || problem=
  grep -q 'bad.tsv:2: not' "$work/out" || problem="it does not name the line"
  verdict "a plot of what is no number" "$problem"
fi

echo "$failures failed"
[ "$failures" -eq 0 ]
