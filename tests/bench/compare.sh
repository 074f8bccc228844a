#!/usr/bin/env bash
# hvd side by side with raw MPI and memcpy, with torch.distributed (gloo) and with Horovod: one table of ratios, and a plot of it.
#   bash tests/bench/compare.sh [RANKS [ROUNDS]]          allreduces; default: 4 ranks, 3 rounds
#   bash tests/bench/compare.sh --sweep [RANKS [ROUNDS]]  every collective at every size, and how many of these cells hvd wins
#   bash tests/bench/compare.sh --steps [RANKS [ROUNDS]]  whole training steps, against the same step without communication
# The programs run one after the other, round by round, so that what else the machine does meets all alike; the table has the medians over
# the rounds. raw MPI and memcpy are measured by hvd_bench itself, in one process with hvd; so are the steps of hvd, of MPI_Allreduce by
# hand and without communication by step_bench, and each peer's steps with those without communication, in one process.
#   HVD_BUILD             build folder                              (default: build)
#   HVD_COMPARE_PYTHON    a python with torch (and numpy), for gloo (default: that of .deps/venv, if it is there)
#   HVD_HOROVOD_PYTHON    a python with Horovod                     (default: none)
#   HVD_COMPARE_SIZES     bytes, and models                         (default: 4 1024 65536 4194304 67108864 resnet50)
#                         with --sweep: the smallest and the largest number of bytes, in steps of 16 times (default: 4 67108864)
#   HVD_COMPARE_MODELS    with --steps: models                      (default: resnet18 resnet50 bert-base)
#   HVD_COMPARE_STEPS     with --steps: measured steps of each program in one round (default: 5)
#   HVD_COMPARE_INPUT     with --steps: options of step_bench for all models, such as "--batch-size 2 --image-size 64"
#   HVD_COMPARE_BERT      with --steps: options of step_bench for bert-base, such as "--layers 4 --sequence 64"
#                         (default: the whole model where there are 6 GB of memory per rank, otherwise a smaller one)
#   HVD_COMPARE_SVG       a file for the plot; the medians go into a .tsv beside it, of which 'python3 tests/bench/plot.py' draws it again
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
steps=0 sweep=0
if [ "${1:-}" = --steps ]; then steps=1; shift; fi
if [ "${1:-}" = --sweep ]; then sweep=1; shift; fi
ranks=${1:-4}
rounds=${2:-3}
case "$ranks$rounds" in *[!0-9]*) echo "compare.sh: RANKS and ROUNDS must be numbers: compare.sh [--steps | --sweep] [RANKS [ROUNDS]]" >&2; exit 2 ;; esac
build=${HVD_BUILD:-$root/build}
python=${HVD_COMPARE_PYTHON:-$root/.deps/venv/bin/python}
horovod=${HVD_HOROVOD_PYTHON:-}
svg=${HVD_COMPARE_SVG:-}
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
# A gloo that is built with a way through shared memory takes it where it is told that all ranks are on one host.
export LOCAL_WORLD_SIZE=$ranks
subjects="hvd-arena hvd-arena-fp16 hvd-ordinary hvd-ordinary-fp16 none hvd hvd-fp16 MPI MPI-packed memcpy gloo none-DDP DDP none-Horovod Horovod"

program=tools/hvd_bench
if [ "$steps" = 1 ]; then program=tests/step_bench; fi
[ -x "$build/$program" ] || { echo "compare.sh: $build/$program is not there: cmake --build builds it, or set HVD_BUILD" >&2; exit 1; }
if [ -n "$svg" ] && ! : >"${svg%.svg}.tsv"; then exit 1; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: >"$work/measured"

# shellcheck source=compare_common.sh
. "$root/tests/bench/compare_common.sh"
with_gloo=0 with_horovod=0
if has "$python" "import torch.distributed"; then with_gloo=1; else echo "compare.sh: without gloo: $python has no torch"; fi
if has "$horovod" "import horovod.torch"; then with_horovod=1; else echo "compare.sh: without Horovod: HVD_HOROVOD_PYTHON names no python that has it"; fi

# ranks_run NAME COMMAND...: the output is in $work/out
ranks_run() {
  local name=$1
  shift
  timeout 600 mpirun -np "$ranks" "$@" >"$work/out" 2>"$work/err" </dev/null || {
    echo "compare.sh: $name failed:" >&2
    cat "$work/out" "$work/err" >&2
    exit 1
  }
}

# Measurements are lines "WORK SUBJECT TIME [RATIO]".

# peer SUBJECT PYTHON WORK...: lines "WORK MICROSECONDS"
peer() {
  local subject=$1 python=$2
  shift 2
  HVD_COMPARE_PORT=$(port) ranks_run "$subject" "$python" "$root/tests/bench/peers_${subject,,}.py" "$@"
  awk -v subject="$subject" 'NF == 2 && $2 + 0 > 0 { print $1, subject, $2 }' "$work/out" >>"$work/measured"
}

# hvd_of WORK: out of hvd_bench's table, by the names of its columns
hvd_of() {
  local choose versus=mpi,memcpy
  case $1 in
    *[!0-9]*) choose=(--model "$1") versus=mpi,packed,memcpy ;;
    *) choose=(--min-bytes "$1" --max-bytes "$1") ;;
  esac
  ranks_run hvd_bench "$build/tools/hvd_bench" "${choose[@]}" --memory ordinary,arena "${wires[@]}" --versus "$versus" --iterations 7
  awk -v work="$1" '
    /^# +size/ { sub("#", " "); for (i = 1; i <= NF; ++i) column[$i] = i; next }
    /^#/ || !column["memory"] || NF < column["max"] { next }
    {
      plain = !column["wire"] || $column["wire"] == "none"
      print work, "hvd-" $column["memory"] (plain ? "" : "-" $column["wire"]), $column["time"]
      if (plain && $column["memory"] == "ordinary") {
        print work, "MPI", $column["MPI"]
        if (column["packed"]) print work, "MPI-packed", $column["packed"]
        print work, "memcpy", $column["memcpy"]
      }
    }' "$work/out" >>"$work/measured"
}

compare_allreduces() {
  local round size
  read -ra works <<<"${HVD_COMPARE_SIZES:-4 1024 65536 4194304 67108864 resnet50}"
  base=hvd-arena unit=us
  title="$ranks ranks on $(getconf _NPROCESSORS_ONLN) cores, float32 sum; medians of $rounds rounds in us"
  note="how many times as long as hvd in the arena"
  # Not every build compresses raw buffers.
  wires=()
  if mpirun -np "$ranks" "$build/tools/hvd_bench" --wire fp16 -b 4 -e 4 --iterations 1 >/dev/null 2>&1 </dev/null; then wires=(--wire "none,fp16"); fi
  for round in $(seq "$rounds"); do
    echo "compare.sh: round $round of $rounds" >&2
    for size in "${works[@]}"; do
      hvd_of "$size"
      if [ "$with_gloo" = 1 ]; then peer gloo "$python" "$size"; fi
      if [ "$with_horovod" = 1 ]; then peer Horovod "$horovod" "$size"; fi
    done
  done
}

# The operations of hvd_bench --sweep, each at each size: COLLECTIVE:BYTES.
compare_sweep() {
  local round least most bytes collective
  read -r least most <<<"${HVD_COMPARE_SIZES:-4 67108864}"
  base=hvd-ordinary unit=us
  title="$ranks ranks on $(getconf _NPROCESSORS_ONLN) cores, float32, results into memory that exists; medians of $rounds rounds in us"
  note="how many times as long as hvd with ordinary memory"
  works=()
  for collective in allreduce broadcast allgather alltoall reducescatter; do
    for ((bytes = least; bytes <= most; bytes *= 16)); do works+=("$collective:$bytes"); done
  done
  for round in $(seq "$rounds"); do
    echo "compare.sh: round $round of $rounds" >&2
    ranks_run hvd_bench "$build/tools/hvd_bench" --sweep --min-bytes "$least" --max-bytes "$most"
    awk '
      BEGIN { unit["B"] = 1; unit["KiB"] = 1024; unit["MiB"] = 1024 * 1024 }
      ($4 == "main" || $4 == "arena") && $3 in unit {
        work = $1 ":" $2 * unit[$3]
        print work, $4 == "main" ? "hvd-ordinary" : "hvd-arena", $5
        if ($4 == "main") print work, "MPI", $6
      }' "$work/out" >>"$work/measured"
    if [ "$with_gloo" = 1 ]; then peer gloo "$python" "${works[@]}"; fi
    if [ "$with_horovod" = 1 ]; then peer Horovod "$horovod" "${works[@]}"; fi
  done
}

# step_options MODEL: into `options`
step_options() {
  options=()
  read -ra options <<<"${HVD_COMPARE_INPUT:-}$(if [ "$1" = bert-base ]; then echo " $bert"; fi)"
}

# step_peer SUBJECT PYTHON MODEL: lines "SUBJECT MILLISECONDS RATIO"
step_peer() {
  HVD_COMPARE_PORT=$(port) ranks_run "$1" "$2" "$root/tests/bench/peers_steps.py" "$1" --model "$3" --rounds "$measured_steps" --warmup 2 "${options[@]}"
  awk -v model="$3" -v peer="$1" 'NF == 3 && $2 + 0 > 0 { print model, ($1 == "none" ? "none-" peer : $1), $2, $3 }' "$work/out" >>"$work/measured"
}

compare_steps() {
  local round model
  read -ra works <<<"${HVD_COMPARE_MODELS:-resnet18 resnet50 bert-base}"
  measured_steps=${HVD_COMPARE_STEPS:-5}
  base=none unit=ms
  bert=${HVD_COMPARE_BERT-}
  if [ -z "${HVD_COMPARE_BERT+set}" ] && [ "$(awk '/^MemAvailable:/ { print int($2 / 1e6) }' /proc/meminfo)" -lt $((6 * ranks)) ]; then
    bert="--layers 4 --sequence 64"
  fi
  title="$ranks ranks on $(getconf _NPROCESSORS_ONLN) cores, training steps${HVD_COMPARE_INPUT:+, $HVD_COMPARE_INPUT}; medians of $rounds rounds of $measured_steps in ms"
  case " ${works[*]} " in *" bert-base "*) if [ -n "$bert" ]; then title+="; bert-base with $bert"; fi ;; esac
  note="how many times as long as the same step without communication, in the same process"
  for round in $(seq "$rounds"); do
    echo "compare.sh: round $round of $rounds" >&2
    for model in "${works[@]}"; do
      step_options "$model"
      ranks_run step_bench "$build/tests/step_bench" --model "$model" --rounds "$measured_steps" --warmup 2 --subjects none,hvd,hvd-fp16,mpi "${options[@]}"
      awk -v model="$model" '$2 + 0 > 0 && $5 + 0 > 0 { print model, ($1 == "mpi" ? "MPI" : $1), $2, $5 }' "$work/out" >>"$work/measured"
      if [ "$with_gloo" = 1 ]; then step_peer DDP "$python" "$model"; fi
      if [ "$with_horovod" = 1 ]; then step_peer Horovod "$horovod" "$model"; fi
    done
  done
}

# medians: "WORK<tab>SUBJECT<tab>TIME<tab>RATIO", in the order of the table; a ratio that was not measured is one to the base
medians() {
  sort -k1,1 -k2,2 -k3,3n "$work/measured" | awk -v list="${works[*]}" -v order="$subjects" -v base="$base" '
    function sorted(values, n, i, j, held) {
      for (i = 2; i <= n; ++i) {
        held = values[i]
        for (j = i - 1; j > 0 && values[j] + 0 > held + 0; --j) values[j + 1] = values[j]
        values[j + 1] = held
      }
    }
    function median(all, key, n, i, list) {
      n = count[key]
      for (i = 1; i <= n; ++i) list[i] = all[key, i]
      sorted(list, n)
      return n % 2 ? list[(n + 1) / 2] : (list[n / 2] + list[n / 2 + 1]) / 2
    }
    { key = $1 " " $2; ++count[key]; times[key, count[key]] = $3; if (NF > 3) { ratios[key, count[key]] = $4; paired[key] = 1 } }
    END {
      subjects = split(order, subject, " ")
      works = split(list, work, " ")
      for (w = 1; w <= works; ++w)
        for (s = 1; s <= subjects; ++s) {
          key = work[w] " " subject[s]
          if (!count[key]) continue
          time = median(times, key)
          printf "%s\t%s\t%.5g\t%.3f\n", work[w], subject[s], time, paired[key] ? median(ratios, key) : time / median(times, work[w] " " base)
        }
    }'
}

if [ "$steps" = 1 ]; then
  compare_steps
elif [ "$sweep" = 1 ]; then
  compare_sweep
else
  compare_allreduces
fi
medians >"$work/medians"

echo
echo "$title; in brackets $note"
awk -F '\t' -v base="$base" -v list="${works[*]}" -v order="$subjects" '
  {
    seen[$2] = 1
    time = sprintf($3 < 1 ? "%.3f" : "%.1f", $3)
    cell[$1, $2] = ($2 == base || $2 ~ /^none/) ? time : sprintf("%s (%.2fx)", time, $4)
  }
  END {
    names = split(order, name, " ")
    for (n = 1; n <= names; ++n) if (name[n] in seen) subject[++subjects] = name[n]
    width = "%-24s"
    printf width, ""
    for (s = 1; s <= subjects; ++s) printf " %18s", subject[s]
    print ""
    works = split(list, work, " ")
    for (w = 1; w <= works; ++w) {
      printf width, work[w]
      for (s = 1; s <= subjects; ++s) printf " %18s", (work[w], subject[s]) in cell ? cell[work[w], subject[s]] : "-"
      print ""
    }
  }' "$work/medians"

if [ "$sweep" = 1 ]; then
  awk -F '\t' -v base="$base" '
    $2 != base && $2 !~ /^hvd/ { ++cells[$2]; if ($4 >= 1) ++won[$2]; else if ($4 >= 0.95) ++level[$2]; if (!($2 in least) || $4 < least[$2]) least[$2] = $4 }
    END {
      for (peer in cells)
        printf "# against %s: %d cells: %d won, %d level, %d lost; least ratio %.2f\n", peer, cells[peer], won[peer], level[peer], cells[peer] - won[peer] - level[peer], least[peer]
    }' "$work/medians"
fi

if [ -n "$svg" ]; then
  plot "$svg" "$python" "$title" "$base" "$unit" "$note" "$subjects"
fi
