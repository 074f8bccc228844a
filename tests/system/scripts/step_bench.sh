#!/usr/bin/env bash
# step_bench: steps of every model train as MPI by hand does and alike on all ranks; the models are of the size they should be; its table,
# JSON and errors. It judges no speed.
# Usage: step_bench.sh BUILD_FOLDER
# timeout: 300
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
# shellcheck source=../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
bench=$build/tests/step_bench
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
[ -x "$bench" ] || { echo "SKIP: step_bench was not built"; exit 77; }
export OMP_NUM_THREADS=1

verdict() { # verdict NAME PROBLEM
  if [ -z "$2" ]; then
    echo "PASS  $1"
  else
    echo "FAIL  $1: $2; output:"
    sed 's/^/      /' "$work/out" "$work/err"
    failures=$((failures + 1))
  fi
}
# right NAME ROWS WORDS_IN_JSON ARGUMENTS...
right() {
  local name=$1 rows=$2 words=$3 problem=
  shift 3
  rm -f "$work/result.json"
  timeout --kill-after=5 100 mpirun "$@" --check --json "$work/result.json" >"$work/out" 2>"$work/err" </dev/null || problem="exit code $?"
  grep -q '^# checked: OK$' "$work/out" || problem=${problem:-"not checked, or wrong"}
  [ "$(grep -cE '^ +[a-z0-9-]+ +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9.-]+ +[0-9.-]+$' "$work/out")" -eq "$rows" ] || problem=${problem:-"not $rows rows"}
  grep -qF "$words" "$work/result.json" 2>>"$work/err" || problem=${problem:-"the JSON file lacks $words"}
  verdict "$name" "$problem"
}
# refused NAME WORDS ARGUMENTS...
refused() {
  local name=$1 words=$2 problem=
  shift 2
  timeout 60 "$bench" "$@" >"$work/out" 2>"$work/err" </dev/null
  [ $? -eq 2 ] || problem="exit code is not 2"
  grep -qF -- "$words" "$work/err" || problem=${problem:-"the message does not say '$words'"}
  verdict "$name: $(head -1 "$work/err")" "$problem"
}
short=(--warmup 0 --batch-size 2)
bert=(--model bert-base --width 48 --vocabulary 300 --sequence 16)

right "resnet18" 3 '"tensors": 62,' -np 2 "$bench" "${short[@]}" --rounds 2
right "resnet50 with 1,000 classes" 2 '"bytes": 102228128,' -np 2 "$bench" "${short[@]}" --rounds 1 --model resnet50 --classes 1000 --subjects none,hvd
right "a narrow encoder, also in 16 bits" 5 '"tensors": 201,' -np 3 "$bench" "${short[@]}" --rounds 2 "${bert[@]}" --subjects none,hvd,hvd-fp16,hvd-bf16,mpi
timeout --kill-after=5 100 mpirun -np 2 "$bench" "${short[@]}" --rounds 1 "${bert[@]}" --optimizer adam --updates 2 --subjects hvd,hvd-sharded,hvd-shared \
  >"$work/out" 2>"$work/err" </dev/null && [ "$(grep -cE '^ +hvd(-shar[a-z]+)? +[0-9.]+ +[0-9.]+ +[0-9.]+$' "$work/out")" -eq 3 ]
verdict "step() alone, sharded and not" "$([ $? -eq 0 ] || echo "not 3 rows of updates")"
right "gradients in shares" 3 '"subject": "hvd-zero2"' -np 2 "$bench" "${short[@]}" --rounds 2 "${bert[@]}" --subjects none,hvd-zero2,mpi
right "one copy of the parameters" 4 '"memory_mib": ' -np 3 "$bench" "${short[@]}" --rounds 2 "${bert[@]}" --subjects none,hvd-sharded,hvd-shared,mpi
right "mixed precision" 2 '"amp": "bf16"' -np 2 "$bench" "${short[@]}" --rounds 1 "${bert[@]}" --amp bf16 --subjects none,hvd
refused "MPI by hand on a GPU" "is for gradients on the host" --device cuda --subjects hvd,mpi
refused "fp16 on the host" "--amp fp16: on a GPU only" --amp fp16
refused "updates of gradients that are given up" "which hvd-zero2 gives up" --updates 2 --subjects hvd-zero2
refused "an unknown model" "vgg not in {resnet18,resnet50,bert-base}" --model vgg
refused "the same subject again" "is there twice" --subjects hvd,hvd
refused "heads that do not fit" "--width 100 is not a multiple of --heads 12" --model bert-base --width 100
refused "too little for batch norm" "needs more than one value" --batch-size 1

echo "$failures failed"
[ "$failures" -eq 0 ]
