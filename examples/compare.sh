#!/usr/bin/env bash
# hvd side by side with raw MPI_Allreduce and memcpy, with torch.distributed (gloo) and with Horovod: one table of ratios.
#   bash examples/compare.sh [RANKS [ROUNDS]]          default: 4 ranks, 3 rounds
# The programs run one after the other, round by round, so that what else the machine does meets all alike; the table has the medians over
# the rounds. raw MPI and memcpy are measured by hvd_bench itself, in one process with hvd.
#   HVD_BUILD             build folder                              (default: build)
#   HVD_COMPARE_PYTHON    a python with torch and numpy, for gloo   (default: that of .deps/venv, if it is there)
#   HVD_HOROVOD_PYTHON    a python with Horovod                     (default: none)
#   HVD_COMPARE_SIZES     bytes, and models                         (default: 4 1024 65536 4194304 67108864 resnet50)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
ranks=${1:-4}
rounds=${2:-3}
bench=${HVD_BUILD:-$root/build}/examples/hvd_bench
python=${HVD_COMPARE_PYTHON:-$root/.deps/venv/bin/python}
horovod=${HVD_HOROVOD_PYTHON:-}
read -ra sizes <<<"${HVD_COMPARE_SIZES:-4 1024 65536 4194304 67108864 resnet50}"
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1

[ -x "$bench" ] || { echo "compare.sh: $bench is not there: bash examples/train.sh builds it, or set HVD_BUILD" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

has() { [ -n "$1" ] && command -v "$1" >/dev/null && (cd "$work" && "$1" -c "$2" >/dev/null 2>&1); }
with_gloo=0 with_horovod=0
if has "$python" "import numpy, torch.distributed"; then with_gloo=1; else echo "compare.sh: without gloo: $python has no torch and numpy"; fi
if has "$horovod" "import horovod.torch"; then with_horovod=1; else echo "compare.sh: without Horovod: HVD_HOROVOD_PYTHON names no python that has it"; fi

# one SUBJECT COMMAND...: runs it; its lines "WORK MICROSECONDS" go to the measurements
one() {
  local subject=$1
  shift
  timeout 300 mpirun -np "$ranks" "$@" >"$work/out" 2>"$work/err" </dev/null || {
    echo "compare.sh: $subject failed:" >&2
    cat "$work/out" "$work/err" >&2
    exit 1
  }
  awk -v subject="$subject" 'NF == 2 && $2 + 0 > 0 { print $1, subject, $2 }' "$work/out" >>"$work/measured"
}

# hvd_of WORK: hvd_bench's table is columns 5 memory, 7 time, 13 MPI, 15 memcpy
hvd_of() {
  local choose
  case $1 in
    *[!0-9]*) choose=(--model "$1") ;;
    *) choose=(--min-bytes "$1" --max-bytes "$1") ;;
  esac
  timeout 300 mpirun -np "$ranks" "$bench" "${choose[@]}" --memory ordinary,arena --versus mpi,memcpy --iterations 7 >"$work/out" 2>"$work/err" </dev/null || {
    echo "compare.sh: hvd_bench failed:" >&2
    cat "$work/out" "$work/err" >&2
    exit 1
  }
  awk -v work="$1" '!/^#/ && NF > 14 { print work, "hvd-" $5, $7; if ($5 == "ordinary") { print work, "MPI", $13; print work, "memcpy", $15 } }' \
    "$work/out" >>"$work/measured"
}

for round in $(seq "$rounds"); do
  echo "compare.sh: round $round of $rounds" >&2
  for size in "${sizes[@]}"; do
    hvd_of "$size"
    if [ "$with_gloo" = 1 ]; then HVD_COMPARE_PORT=$((20000 + RANDOM % 20000)) one gloo "$python" "$root/examples/peers_gloo.py" "$size"; fi
    if [ "$with_horovod" = 1 ]; then one Horovod "$horovod" "$root/examples/peers_horovod.py" "$size"; fi
  done
done

echo
echo "$ranks ranks on $(getconf _NPROCESSORS_ONLN) cores, float32 sum; medians of $rounds rounds in us; in brackets how many times as long as hvd in the arena"
sort -k1,1 -k2,2 -k3,3n "$work/measured" | awk -v list="${sizes[*]}" '
  { key = $1 " " $2; values[key, ++count[key]] = $3 }
  function median(key) { return count[key] ? values[key, int((count[key] + 1) / 2)] : 0 }
  END {
    subjects = split("hvd-arena hvd-ordinary MPI memcpy gloo Horovod", subject, " ")
    printf "%-10s", "bytes"
    for (s = 1; s <= subjects; ++s) printf " %20s", subject[s]
    print ""
    works = split(list, work, " ")
    for (w = 1; w <= works; ++w) {
      printf "%-10s", work[w]
      base = median(work[w] " hvd-arena")
      for (s = 1; s <= subjects; ++s) {
        time = median(work[w] " " subject[s])
        if (time == 0) printf " %20s", "-"
        else if (s == 1) printf " %20.1f", time
        else printf " %20s", sprintf("%.1f (%.2fx)", time, time / base)
      }
      print ""
    }
  }'
