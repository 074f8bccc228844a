#!/usr/bin/env bash
# hvd_bench: right results for every type, operation, kind of memory and collective on 1 to 4 ranks, and on many; its models, table and JSON; its errors;
# idle ranks cost next to nothing. It judges no speed.
# Usage: bench.sh BUILD_FOLDER
# timeout: 300
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
# shellcheck source=../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
# Where other programs run too, raw MPI spins through whole time slices of ranks that wait for one another.
export OMPI_MCA_mpi_yield_when_idle=1
# shellcheck source=../../support/shell/cases.sh
. "$root/tests/support/shell/cases.sh"
bench=$build/tools/hvd_bench
[ -x "$bench" ] || { echo "SKIP: hvd_bench was not built"; exit 77; }

# run -np RANKS COMMAND...: under mpirun; run COMMAND...: alone, for what is refused before MPI starts
run() {
  local launcher=(mpirun)
  if [ "$1" != -np ]; then launcher=(); fi
  timeout --kill-after=5 60 "${launcher[@]}" "$@" >"$work/out" 2>"$work/err" </dev/null
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
rows() { grep -acE '^ +[0-9]+ +[0-9]+ +[a-z]+' "$work/out"; }
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
# sweep: all cells of two sizes are there, right, counted, and in the file
sweep() {
  local problem= counted
  run -np 2 "$bench" --sweep "${quick[@]}" -b 64 -e 128K -f 2048 --json "$work/sweep.json"
  if [ "$status" -ne 0 ]; then problem="exit code $status"; fi
  if grep -aq WRONG "$work/out"; then problem=${problem:-"wrong results"}; fi
  counted=$(grep -aE '^# [a-z0-9]+ +[0-9]+ cells: ' "$work/out" | awk '{ printf "%s=%s ", $2, $3 }')
  if [ "$counted" != "main=10 arena=10 fp16=2 bf16=2 grouped=2 plain=6 " ]; then problem=${problem:-"it counts $counted"}; fi
  python3 - "$work/sweep.json" <<'PYTHON' 2>>"$work/err" || problem=${problem:-"the JSON file is not what it should be"}
import json, sys
sweep = json.load(open(sys.argv[1]))
assert sweep["sweep"] and sweep["ranks"] == 2 and len(sweep["rows"]) == 32, len(sweep["rows"])
assert all(row["wrong"] == 0 and row["time_us"] > 0 and row["mpi_us"] > 0 for row in sweep["rows"])
assert sum(sweep["counts"]["main"][word] for word in ("won", "level", "lost")) == 10
PYTHON
  verdict "a sweep" "$problem"
}
quick=(--check --iterations 2 --warmup 0 --repeats 2)
everywhere=(--memory "ordinary,arena" --place "in,out")

for ranks in 1 2 3 4; do
  start right "$ranks ranks, ordinary memory and arena, in and out of place" 16 -np $ranks "$bench" "${quick[@]}" "${everywhere[@]}" -b 4 -e 1M -f 64
done
# Every type and every operation; the contract suite has all of their pairs.
for pair in float64:average float16:min bfloat16:product float32:max uint8:average int8:min int16:product int32:max int64:average bool:max int32:bitxor bool:bitand \
  complex64:average complex128:sum; do
  start right "${pair#*:} of ${pair%:*}" 8 -np 3 "$bench" "${quick[@]}" "${everywhere[@]}" -d "${pair%:*}" --op "${pair#*:}" -b 9 -e 300K -f 30000
done
# The inputs stay so small that the sums of many ranks are exact.
for many in 25:int8 52:uint8 60:bfloat16; do
  start right "${many%:*} ranks, ${many#*:}" 1 "$build/tools/hvdrun" --no-prefix -np "${many%:*}" "$bench" "${quick[@]}" -d "${many#*:}" -b 4K -e 4K
done
# 4 and 3 ranks: all in pairs, and one left over; each rank a domain of its own where there is no shared memory
burst() { # N ranks, extra arguments
  local problem= ranks=$1
  shift
  run -np "$ranks" "$@" "$bench" --burst 40 --versus mpi "${quick[@]}" --json "$work/burst.json"
  if [ "$status" -ne 0 ]; then problem="exit code $status"; fi
  python3 - "$work/burst.json" "$ranks" <<'PYTHON' 2>>"$work/err" || problem=${problem:-"the JSON file is not what it should be"}
import json, sys
burst = json.load(open(sys.argv[1]))
assert burst["burst"] == 40 and burst["ranks"] == int(sys.argv[2]) and [row["bytes"] for row in burst["rows"]] == [200, 16384], burst
for row in burst["rows"]:
    assert row["wrong"] == 0 and all(row[way + "_us"] > 0 for way in ("async", "shuffled", "group", "plain", "mpi")), row
    assert burst["ranks"] == 1 or row["fused"] > 0, row
PYTHON
  verdict "a burst, $ranks ranks${*:+, $*}" "$problem"
}
for ranks in 1 2 3 4; do start burst "$ranks"; done
start burst 3 -x HVD_SHARED_MEMORY=off

start right "adasum" 4 -np 4 "$bench" "${quick[@]}" "${everywhere[@]}" --op adasum -b 600K -e 600K
start right "adasum of halves through MPI" 2 -np 3 "$bench" "${quick[@]}" --backend mpi --op adasum -d float16 -b 4 -e 60K -f 10000
start right "asynchronous" 3 -np 3 "$bench" "${quick[@]}" --async -b 4 -e 1M -f 512
start right "as a group" 3 -np 3 "$bench" "${quick[@]}" --grouped -b 4 -e 1M -f 512
for collective in broadcast allgather alltoall reducescatter; do
  start right "$collective" 6 -np 3 "$bench" "${quick[@]}" --collective $collective --memory ordinary,arena --versus mpi -b 12 -e 3M -f 512
done
start right "reducescatter of complex numbers" 1 -np 3 "$bench" "${quick[@]}" --collective reducescatter -d complex64 --op average -b 99K -e 99K
start right "alltoall of bool, asynchronous" 1 -np 3 "$bench" "${quick[@]}" --collective alltoall --async -d bool -b 99K -e 99K
start right "barrier" 1 -np 3 "$bench" "${quick[@]}" --collective barrier --versus mpi
start right "through MPI" 3 -np 3 "$bench" "${quick[@]}" --backend mpi -b 4 -e 1M -f 512
start right "--backend shm" 1 -np 2 "$bench" "${quick[@]}" --backend shm -b 4 -e 4

# Not every build compresses raw buffers. One that does not says so.
sixteen_bits() {
  run -np 2 "$bench" --wire fp16 -b 4 -e 4 -n 1 -w 0
  if [ "$status" -eq 0 ]; then
    right "values that travel in 16 bits" 12 -np 3 "$bench" "${quick[@]}" "${everywhere[@]}" --wire none,fp16,bf16 -b 300K -e 300K
    right "averages that do" 2 -np 3 "$bench" "${quick[@]}" --wire fp16,bf16 --op average -d float64 -b 300K -e 300K
  else
    refused "values that travel in 16 bits, not in this build" 2 "--wire fp16: not in this build" -np 2 "$bench" --wire fp16
  fi
}
start sixteen_bits

models() {
  # Raw MPI of so many bytes on one rank only: on a busy machine it takes minutes on two.
  right "--model resnet18 --versus mpi,packed,memcpy" 1 -np 1 "$bench" --check --iterations 1 --warmup 0 --model resnet18 \
    --versus mpi,packed,memcpy --json "$work/versus.json"
  right "--model resnet50 --versus memcpy --json" 2 -np 2 "$bench" --check --iterations 1 --warmup 0 --memory ordinary,arena \
    --model resnet50 --versus memcpy --json "$work/result.json"
  local problem='' word batches
  for word in '"tensors": 161,' '"bytes": 102228128,' '"memory": "arena",' '"wrong": 0,' '"memcpy": {' '"ratio": ' '"p90_us": ' '"p99_us": ' '"max_us": ' '"busbw_gbps": '; do
    grep -aqF "$word" "$work/result.json" || problem="the JSON file lacks $word"
  done
  if command -v python3 >/dev/null && ! python3 -m json.tool "$work/result.json" >/dev/null; then problem="not JSON"; fi
  for word in '"mpi": {' '"packed": {'; do grep -aqF "$word" "$work/versus.json" || problem="the other JSON file lacks $word"; done
  # 161 tensors that travel in so few batches have been fused
  batches=$(sed -n 's/.*"batches": \([0-9]*\).*/\1/p' "$work/result.json" | sort -n | tail -1)
  if [ "${batches:-999}" -gt 40 ]; then problem=${problem:-"the burst took $batches batches"}; fi
  verdict "the JSON file; the burst took at most $batches batches" "$problem"
}
start models

bert() {
  local problem='' word
  run "$bench" --check --iterations 1 --warmup 0 --model bert-base --grouped --json "$work/bert.json"
  if [ "$status" -ne 0 ]; then problem="exit code $status"; fi
  for word in '"tensors": 199,' '"bytes": 437928960,' '"grouped": true,' '"wrong": 0,'; do
    grep -aqF "$word" "$work/bert.json" || problem=${problem:-"the JSON file lacks $word"}
  done
  verdict "--model bert-base --grouped, without mpirun" "$problem"
}
start bert

idle() { # processor time, not time by the clock
  local problem='' largest
  run -np 4 "$bench" --idle 1 --json "$work/idle.json"
  largest=$(sed -n 's/.*"largest": \([0-9.e-]*\).*/\1/p' "$work/idle.json" 2>/dev/null)
  if [ "$status" -ne 0 ]; then problem="exit code $status"; fi
  awk -v a="${largest:-100}" 'BEGIN { exit !(a < 1) }' || problem=${problem:-"an idle rank takes $largest % of a core"}
  verdict "idle ranks take at most $largest % of a core" "$problem"
}
start idle

if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q .; then
  start right "a GPU's memory, ordinary and lent" 4 -np 2 "$bench" "${quick[@]}" --device cuda --memory ordinary,arena -b 4K -e 4M -f 1024
else
  start refused "a GPU where there is none" 2 "--device cuda: " -np 2 "$bench" --device cuda
fi
start refused "rows of a GPU tensor for each rank" 2 "--device cuda: goes with --collective allreduce and broadcast only" -np 2 "$bench" --device cuda \
  --collective alltoall
start refused "an unknown option" 2 "--frobnicate" -np 2 "$bench" --frobnicate
start refused "an unknown type" 2 "must be one of bfloat16, bool, complex128, complex64, double, float, float16" "$bench" --dtype complex
start refused "an unknown operation" 2 "must be one of adasum, average, bitand, bitor, bitxor, max, min, product, sum" "$bench" --op median
start refused "an unknown model" 2 "must be one of bert-base, resnet18, resnet50" "$bench" --model vgg
start refused "an unknown wire" 2 "must be one of bf16, fp16, none" "$bench" --wire int8
start refused "an unknown rival" 2 "must be one of line, memcpy, mpi, packed" "$bench" --versus nccl
start refused "the line of one host" 2 "--versus line: needs several hosts" -np 2 "$bench" --versus line -b 4 -e 4 -n 1 -w 0
start refused "a size that is none" 2 "--max-bytes 'big'" "$bench" --max-bytes big
start refused "sizes the wrong way round" 2 "--max-bytes 4 is below --min-bytes 1024" "$bench" -b 1K -e 4
start refused "elements of a rank that MPI cannot count" 2 "--versus mpi: MPI counts no more than 2147483647 elements" -np 2 "$bench" --versus mpi \
  --collective alltoall -d uint8 -b 4G -e 4G
start refused "a burst of such" 2 "--versus mpi: MPI counts no more than 2147483647 elements" -np 2 "$bench" --versus mpi --burst 1 -d uint8 -e 2G
start refused "a factor of 1" 2 "--factor" "$bench" --factor 1
start refused "MPI without a half" 2 "MPI has no type for float16" "$bench" --dtype float16 --versus mpi
start refused "a sum of bool" 2 "allreduces of bool take min, max, bitand, bitor and bitxor only" "$bench" --dtype bool
start refused "the largest complex number" 2 "allreduces of complex64 take sum and average only" "$bench" --dtype complex64 --op max
start refused "adasum of integers" 2 "allreduces of int32 take" "$bench" --dtype int32 --op adasum
start refused "reducescatter by maximum" 2 "reducescatter knows sum and average only" "$bench" --collective reducescatter --op max
start refused "a group of broadcasts" 2 "--grouped goes with" "$bench" --collective broadcast --grouped
start refused "16 bits of what has 16" 2 "of float32 or float64 only" "$bench" --wire bf16 --dtype float16
start refused "one tensor to be packed" 2 "--versus packed goes with --model" "$bench" --versus packed
start refused "a model that is broadcast" 2 "--model goes with --collective allreduce" "$bench" --model resnet18 --collective broadcast
start refused "an arena where there is none" 2 "share no memory" -np 2 "$bench" --backend mpi --memory arena
start refused "--backend shm where there is none" 2 "share no memory" -np 2 -x HVD_SHARED_MEMORY=off "$bench" --backend shm
start refused "a sweep of one collective" 2 "--sweep measures all collectives" "$bench" --sweep --collective alltoall
start refused "a burst of broadcasts" 2 "--burst measures allreduces" "$bench" --burst 10 --collective broadcast
start refused "a burst beside a copy" 2 "--burst goes with --versus mpi only" "$bench" --burst 10 --versus memcpy
start refused "an allreduce into" 2 "--into goes with" "$bench" --into
start sweep
start refused "a JSON file that cannot be" 1 "$cases_folder/none/a.json" -np 2 "$bench" --json "$cases_folder/none/a.json"

finish_cases
