#!/usr/bin/env bash
# hvd_bench: right results for every type, operation, kind of memory and collective on 1 to 4 ranks; its table and JSON; its errors; idle ranks
# cost next to nothing. It judges no speed.
# Usage: bench.sh BUILD_FOLDER
# timeout: 300
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
bench=$build/examples/hvd_bench
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
[ -x "$bench" ] || { echo "SKIP: hvd_bench was not built"; exit 77; }

run() {
  timeout --kill-after=5 60 mpirun "$@" >"$work/out" 2>"$work/err" </dev/null
  status=$?
}
verdict() { # verdict NAME PROBLEM
  if [ -z "$2" ]; then
    echo "PASS  $1"
  else
    echo "FAIL  $1: $2; output:"
    sed 's/^/      /' "$work/out" "$work/err"
    failures=$((failures + 1))
  fi
}
# rows: the lines of the table
rows() { grep -acE '^ +[0-9]+ +[0-9]+ +[a-z]+[0-9]' "$work/out"; }
# right NAME ROWS ARGUMENTS...: so many rows, nothing wrong
right() {
  local name=$1 expected=$2 problem=
  shift 2
  run "$@"
  if [ "$status" -ne 0 ]; then problem="exit code $status"; fi
  if [ -z "$problem" ] && [ "$(rows)" -ne "$expected" ]; then problem="$(rows) rows instead of $expected"; fi
  if [ -z "$problem" ] && ! grep -aq '^# Out of bounds values : 0 OK$' "$work/out"; then problem="wrong results, or not checked"; fi
  verdict "$name" "$problem"
}
# refused NAME CODE WORDS ARGUMENTS...: one line that begins with "hvd_bench:" and has the words
refused() {
  local name=$1 code=$2 words=$3 problem=
  shift 3
  run "$@"
  if [ "$status" -ne "$code" ]; then problem="exit code $status instead of $code"; fi
  if [ -z "$problem" ] && [ "$(grep -ac '^hvd_bench: ' "$work/err")" -ne 1 ]; then problem="not one message"; fi
  if [ -z "$problem" ] && ! grep -a '^hvd_bench: ' "$work/err" | grep -qF -- "$words"; then problem="the message does not say '$words'"; fi
  verdict "$name: $(grep -am 1 '^hvd_bench: ' "$work/err")" "$problem"
}
quick=(--check --iterations 2 --warmup 0 --repeats 2)
everywhere=(--memory ordinary,arena --place in,out)

for ranks in 1 2 3 4; do
  right "$ranks ranks, ordinary memory and arena, in and out of place" 16 -np $ranks "$bench" "${quick[@]}" "${everywhere[@]}" -b 4 -e 1M -f 64
done
for dtype in float64 float16 bfloat16 uint8 int8 int16 int32 int64; do
  right "$dtype" 8 -np 3 "$bench" "${quick[@]}" "${everywhere[@]}" -d $dtype -b 9 -e 300K -f 30000 --op average
done
for op in min max product; do right "$op" 2 -np 3 "$bench" "${quick[@]}" --op $op -b 4 -e 600K -f 140000; done
right "asynchronous" 3 -np 3 "$bench" "${quick[@]}" --async -b 4 -e 1M -f 512
right "broadcast" 6 -np 3 "$bench" "${quick[@]}" --collective broadcast --memory ordinary,arena -b 4 -e 1M -f 512
right "allgather" 6 -np 3 "$bench" "${quick[@]}" --collective allgather --memory ordinary,arena -b 12 -e 3M -f 512
right "through MPI" 3 -np 3 "$bench" "${quick[@]}" --backend mpi -b 4 -e 1M -f 512
right "--backend shm" 1 -np 2 "$bench" "${quick[@]}" --backend shm -b 4 -e 4

right "--model resnet50 --versus mpi,memcpy --json" 2 -np 2 "$bench" --check --iterations 2 --warmup 0 --memory ordinary,arena \
  --model resnet50 --versus mpi,memcpy --json "$work/result.json"
problem=
for word in '"tensors": 161,' '"bytes": 102228128,' '"memory": "arena",' '"wrong": 0,' '"mpi": {' '"memcpy": {' '"ratio": ' '"p99_us": ' '"busbw_gbps": '; do
  grep -aqF "$word" "$work/result.json" || problem="the JSON file lacks $word"
done
if command -v python3 >/dev/null && ! python3 -m json.tool "$work/result.json" >/dev/null; then problem="not JSON"; fi
# 161 tensors that travel in so few batches have been fused
batches=$(sed -n 's/.*"batches": \([0-9]*\).*/\1/p' "$work/result.json" | sort -n | tail -1)
if [ "${batches:-999}" -gt 40 ]; then problem=${problem:-"the burst took $batches batches"}; fi
verdict "the JSON file; the burst took at most $batches batches" "$problem"

run -np 4 "$bench" --idle 3 --json "$work/idle.json"
largest=$(sed -n 's/.*"largest": \([0-9.e-]*\).*/\1/p' "$work/idle.json" 2>/dev/null)
problem=
if [ "$status" -ne 0 ]; then problem="exit code $status"; fi
awk -v a="${largest:-100}" 'BEGIN { exit !(a < 1) }' || problem=${problem:-"an idle rank takes $largest % of a core"}
verdict "idle ranks take at most $largest % of a core" "$problem"

refused "an unknown option" 2 "--frobnicate" -np 2 "$bench" --frobnicate
refused "an unknown type" 2 "must be one of bfloat16, float16" -np 2 "$bench" --dtype complex
refused "an unknown operation" 2 "must be one of average, max, min, product, sum" -np 2 "$bench" --op adasum
refused "an unknown model" 2 "must be one of resnet18, resnet50" -np 2 "$bench" --model vgg
refused "a size that is none" 2 "--max-bytes 'big'" -np 2 "$bench" --max-bytes big
refused "sizes the wrong way round" 2 "--max-bytes 4 is below --min-bytes 1024" -np 2 "$bench" -b 1K -e 4
refused "a factor of 1" 2 "--factor" -np 2 "$bench" --factor 1
refused "MPI without a half" 2 "MPI has no type for float16" -np 2 "$bench" --dtype float16 --versus mpi
refused "an arena where there is none" 2 "share no memory" -np 2 "$bench" --backend mpi --in-arena
refused "--backend shm where there is none" 2 "share no memory" -np 2 -x HVD_SHARED_MEMORY=off "$bench" --backend shm
refused "a JSON file that cannot be" 1 "$work/none/a.json" -np 2 "$bench" --json "$work/none/a.json"

echo "$failures failed"
[ "$failures" -eq 0 ]
