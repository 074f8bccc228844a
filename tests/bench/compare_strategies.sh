#!/usr/bin/env bash
# The ways to train in parallel side by side, as tutorials compare them: ResNet-18 on images shaped like CIFAR-100, seconds per epoch of
# 50,000 images, with and without mixed precision: one process, data-parallel replicas in one process, DistributedDataParallel and
# DistributedOptimizer of this library, and PyTorch's DDP (gloo) and Horovod from Python. The same global batch for all. With CIFAR-10's
# files each trains on these, from weights of its own, and the table says what it knows of the test images after so many steps.
#   bash tests/bench/compare_strategies.sh [RANKS [ROUNDS]]     default: 4 ranks, 3 rounds
# The programs run one after the other, round by round; each trains for some steps, and the table has the medians over the rounds of the
# seconds that an epoch would take at that rate. Without HVD_COMPARE_DATA images are random, in CIFAR-100's files; evaluation is not counted.
#   HVD_COMPARE_DATA        a folder of CIFAR-10's binary files     (default: none)
#   HVD_BUILD               build folder                            (default: build)
#   HVD_COMPARE_BATCH       images per rank and step                (default: 32)
#   HVD_COMPARE_STEPS       steps of each program in one round      (default: 12; the first two do not count)
#   HVD_COMPARE_STEM        imagenet or cifar                       (default: imagenet, a sixteenth of the work)
#   HVD_COMPARE_PYTHON      a python with torch                     (default: that of .deps/venv, if it is there)
#   HVD_HOROVOD_PYTHON      a python with Horovod                   (default: none)
#   HVD_COMPARE_SVG         a file for the plot; the medians go into a .tsv beside it
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
ranks=${1:-4}
rounds=${2:-3}
case "$ranks$rounds" in *[!0-9]*) echo "compare_strategies.sh: RANKS and ROUNDS must be numbers" >&2; exit 2 ;; esac
train=${HVD_BUILD:-$root/build}/examples/train
[ -x "$train" ] || { echo "compare_strategies.sh: $train is not there: bash examples/train.sh builds it, or set HVD_BUILD" >&2; exit 1; }
batch=${HVD_COMPARE_BATCH:-32}
steps=${HVD_COMPARE_STEPS:-12}
stem=${HVD_COMPARE_STEM:-imagenet}
python=${HVD_COMPARE_PYTHON:-$root/.deps/venv/bin/python}
horovod=${HVD_HOROVOD_PYTHON:-}
svg=${HVD_COMPARE_SVG:-}
data=${HVD_COMPARE_DATA:-}
images=50000
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: >"$work/measured"
: >"$work/accuracy"
export PYTHONDONTWRITEBYTECODE=1

# shellcheck source=compare_common.sh
. "$root/tests/bench/compare_common.sh"

# Records of two labels, coarse and fine, and 3,072 random bytes.
records() { for ((i = 0; i < $1; ++i)); do printf "\\x$(printf %x $((i % 20)))\\x$(printf %x $((i % 100)))"; head -c 3072 /dev/urandom; done; }
if [ -n "$data" ]; then
  dataset=(--dataset cifar10 --data "$data") peers_data=(--data "$data" --classes 10) shape="CIFAR-10"
else
  mkdir "$work/cifar100"
  records $((ranks * batch * (steps + 1))) >"$work/cifar100/train.bin"
  records "$ranks" >"$work/cifar100/test.bin"
  dataset=(--dataset cifar100 --data "$work/cifar100") peers_data=(--classes 100) shape="images shaped like CIFAR-100"
fi

# run WORK SUBJECT RANKS BATCH OPTIONS...: the trainer; the first two steps do not count
run() {
  local work_name=$1 subject=$2 np=$3 per_rank=$4
  shift 4
  rm -f "$work/record.json"
  OMP_NUM_THREADS=$(($(nproc) > np ? $(nproc) / np : 1)) timeout 900 mpirun -np "$np" "$train" --model resnet18 --stem "$stem" "${dataset[@]}" \
    --batch-size "$per_rank" --epochs 1 --max-steps "$steps" --untimed-steps 2 --weight-decay 5e-4 --json "$work/record.json" "$@" \
    >"$work/out" 2>&1 </dev/null || { echo "compare_strategies.sh: $subject failed:" >&2; cat "$work/out" >&2; exit 1; }
  awk -F'[:,] *' -v w="$work_name" -v s="$subject" -v n="$images" '$1 ~ /"images_per_second"/ && $2 > 0 { print w, s, n / $2 }' "$work/record.json" >>"$work/measured"
  awk -F'[:,] *' -v w="$work_name" -v s="$subject" '$1 ~ /"top1"/ { print w, s, 100 * $2 }' "$work/record.json" >>"$work/accuracy"
}

# peer SUBJECT PYTHON TYPE: peers_steps.py says milliseconds per step
peer() {
  local name=fp32
  [ "$3" = none ] || name=$3
  HVD_COMPARE_PORT=$(port) OMP_NUM_THREADS=1 timeout 900 mpirun -np "$ranks" "$2" "$root/tests/bench/peers_steps.py" "$1" --model resnet18 \
    --rounds $((steps - 2)) --warmup 2 --batch-size "$batch" --amp "$3" "${peers_data[@]}" >"$work/out" 2>&1 </dev/null ||
    { echo "compare_strategies.sh: $1 failed:" >&2; cat "$work/out" >&2; exit 1; }
  awk -v w="$name" -v s="$1" '$1 == "top1" { print w, "Python-" s, 100 * $2 }' "$work/out" >>"$work/accuracy"
  awk -v w="$name" -v s="$1" -v n="$images" -v batch=$((ranks * batch)) '$1 == s && NF == 3 { print w, "Python-" s, n / batch * $2 / 1000 }' "$work/out" >>"$work/measured"
}

with_ddp=0 with_horovod=0
if [ "$stem" = imagenet ]; then  # the peers' models have that stem
  if has "$python" "import torch.distributed"; then with_ddp=1; else echo "compare_strategies.sh: without Python's DDP: $python has no torch"; fi
  if has "$horovod" "import horovod.torch"; then with_horovod=1; else echo "compare_strategies.sh: without Horovod: HVD_HOROVOD_PYTHON names no python that has it"; fi
fi
for round in $(seq "$rounds"); do
  echo "compare_strategies.sh: round $round of $rounds" >&2
  for amp in none bf16; do
    name=$([ "$amp" = none ] && echo fp32 || echo bf16)
    run "$name" single 1 $((ranks * batch)) --strategy single --amp "$amp"
    run "$name" data-parallel 1 $((ranks * batch)) --strategy data-parallel --replicas "$ranks" --amp "$amp"
    run "$name" ddp "$ranks" "$batch" --strategy ddp --amp "$amp"
    run "$name" hvd "$ranks" "$batch" --strategy hvd --amp "$amp"
    if [ "$with_ddp" = 1 ]; then peer DDP "$python" "$amp"; fi
    if [ "$with_horovod" = 1 ]; then peer Horovod "$horovod" "$amp"; fi
  done
done

title="ResNet-18, $shape, $ranks x $batch images a step, $(getconf _NPROCESSORS_ONLN) cores: seconds per epoch of $images"
sort -k1,1r -k2,2 -k3,3n "$work/measured" | awk '
  { key = $1 "\t" $2; if (!(key in count)) order[++keys] = key; time[key, ++count[key]] = $3 }
  END {
    for (k = 1; k <= keys; ++k) {
      n = count[order[k]]
      median[order[k]] = n % 2 ? time[order[k], (n + 1) / 2] : (time[order[k], n / 2] + time[order[k], n / 2 + 1]) / 2
    }
    for (k = 1; k <= keys; ++k) {
      split(order[k], part, "\t")
      printf "%s\t%.1f\t%.3f\n", order[k], median[order[k]], median[order[k]] / median[part[1] "\thvd"]
    }
  }' >"$work/medians"

subjects="hvd ddp data-parallel single Python-DDP Python-Horovod"
echo
echo "$title"
echo
awk -F '\t' -v order="$subjects" '
  { cell[$1, $2] = sprintf("%.0f (%.2f)", $3, $4) }
  END {
    n = split(order, subject, " ")
    printf "| |"; for (s = 1; s <= n; ++s) printf " %s |", subject[s]
    printf "\n|---|"; for (s = 1; s <= n; ++s) printf "---|"
    print ""
    split("fp32 bf16", works, " ")
    for (w = 1; w <= 2; ++w) {
      printf "| %s |", works[w]
      for (s = 1; s <= n; ++s) printf " %s |", ((works[w], subject[s]) in cell) ? cell[works[w], subject[s]] : "-"
      print ""
    }
  }' "$work/medians"
if [ -n "$data" ]; then # of the last round: all begin anew each time
  awk -v order="$subjects" '
    { top1[$1, $2] = $3 }
    END {
      n = split(order, subject, " ")
      split("fp32 bf16", works, " ")
      for (w = 1; w <= 2; ++w) {
        printf "| %s, top-1 |", works[w]
        for (s = 1; s <= n; ++s) printf " %s |", ((works[w], subject[s]) in top1) ? sprintf("%.1f %%", top1[works[w], subject[s]]) : "-"
        print ""
      }
    }' "$work/accuracy"
  echo
  echo "top-1: of the test images, after $steps steps of $((ranks * batch)) images."
fi
echo
echo "In brackets: how many times as long as hvd."
if [ -n "$svg" ]; then
  plot "$svg" "$python" "$title" hvd s "how many times as long as hvd" "$subjects"
fi
