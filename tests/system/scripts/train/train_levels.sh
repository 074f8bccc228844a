#!/usr/bin/env bash
# --opt-level of the trainer with 1, 2 and 4 ranks: O0 and O1 are what they were without it, O2 learns as fp32 does where O3, in 16 bits
# alone, rounds its small steps away; O2 gives the same bits sharded, with one copy of the parameters and with ddp; its checkpoints hold the
# masters; batch norm stays in fp32, and what cannot work is refused.
# Usage: train_levels.sh BUILD_FOLDER
# timeout: 600
# processors: 2
set -euo pipefail

train=$1/examples/train hvdrun=$1/tools/hvdrun
# shellcheck source=../../../support/shell/trainer.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../../support/shell/trainer.sh"
export OMP_NUM_THREADS=1
field() { last "$work/$1.json" "$2"; }
# run NAME RANKS OPTION...: 32 images a step in all
run() {
  local name=$1 ranks=$2
  shift 2
  timeout --kill-after=5 400 "$hvdrun" -np "$ranks" --no-prefix "$train" --model mlp --batch-size $((32 / ranks)) --json "$work/$name.json" "$@" \
    >"$work/out" 2>&1 </dev/null || fail "$*: exit code $?"
}
same() {
  [ "$(field "$1" train_loss) $(field "$1" loss)" = "$(field "$2" train_loss) $(field "$2" loss)" ] ||
    fail "$1 ends with $(field "$1" loss), $2 with $(field "$2" loss)"
}
differ() { [ "$(field "$1" loss)" != "$(field "$2" loss)" ] || fail "$1 and $2 end with the same loss"; }
close() {
  awk -v a="$(field "$1" loss)" -v b="$(field "$2" loss)" -v limit="$3" 'BEGIN { d = a - b; if (d < 0) d = -d; exit !(a > 0 && d <= limit * a) }' ||
    fail "$1 ends with $(field "$1" loss), $2 with $(field "$2" loss)"
}

# How far the loss has fallen from that of a guess, in times of O0. A step changes most weights by less than a bf16 number can show.
learns() {
  local n=$1 level small=(--momentum 0 --lr 0.01 --epochs 2)
  for level in O0 O2 O3; do run $level "$n" "${small[@]}" --opt-level $level; done
  awk -v o0="$(field O0 loss)" -v o2="$(field O2 loss)" -v o3="$(field O3 loss)" -v n="$n" 'BEGIN {
    guess = log(10); all = guess - o0
    printf "%d ranks: O2 %.3f, O3 %.3f of what O0 learns\n", n, (guess - o2) / all, (guess - o3) / all
    exit !(all > 0.01 && guess - o2 > 0.95 * all && guess - o2 < 1.05 * all && guess - o3 < 0.5 * all) }' ||
    fail "$n ranks: the losses are $(field O0 loss), $(field O2 loss), $(field O3 loss)"
}
autocast() {
  local short=(--max-steps 24)
  run O0 2 "${short[@]}" --opt-level O0
  run plain 2 "${short[@]}"
  run O1 2 "${short[@]}" --opt-level O1
  run amp 2 "${short[@]}" --amp bf16
  same O0 plain
  same O1 amp
  close O0 O1 0.01
  differ O0 O1
}
# The same steps, however they are made: ways RANKS TYPE "OPTION..."...
ways() {
  local n=$1 type=$2 way options=(--opt-level O2 --amp "$2" --max-steps 20 --optimizer adam --clip-norm 0.5)
  shift 2
  run plain "$n" "${options[@]}"
  for way; do
    # shellcheck disable=SC2086
    run other "$n" "${options[@]}" $way
    same plain other
  done
  run gradients "$n" "${options[@]}" --shard-gradients
  close plain gradients 2e-3 # norms are added up in another order, and rounding to 16 bits makes more of it
  run fp32 "$n" --max-steps 20 --optimizer adam --clip-norm 0.5
  close fp32 plain 0.02
  differ fp32 plain
  echo "$n ranks, $type: $(field plain loss), fp32 $(field fp32 loss)"
}
one_process() {
  run single 1 --opt-level O2 --max-steps 24 --strategy single
  run replicas 1 --opt-level O2 --max-steps 24 --strategy data-parallel --replicas 2
  close single replicas 1e-3
}
# Stopped, and taken up again: the same bits, which weights without their masters would not give.
resumed() {
  local options=(--opt-level O2 --lr 0.01 --momentum 0.5 --ema 0.99 "$@")
  run unbroken 2 "${options[@]}" --max-steps 30
  run stopped 2 "${options[@]}" --max-steps 12 --checkpoint "$work/run"
  cp -r "$work/run" "$work/of4"
  run resumed 2 "${options[@]}" --max-steps 30 --checkpoint "$work/run" --resume
  same unbroken resumed
  echo "resumed with $*: $(field resumed loss)"
}
# By other numbers of ranks: nearly.
moved() {
  resumed "$@"
  run moved 4 --opt-level O2 --ema 0.99 "$@" --max-steps 30 --checkpoint "$work/of4" --resume
  close unbroken moved 1e-3
  run evaluated 1 --opt-level O2 --ema 0.99 "$@" --evaluate --checkpoint "$work/run"
  close resumed evaluated 1e-6
}
resnet() { # batch norm in fp32 among 16-bit layers, of each rank and of all
  local n=$1 level=$2
  shift 2
  few_images "$work/images" 16 8
  run resnet "$n" --model resnet18 --dataset mnist --data "$work/images" --batch-size $((8 / n)) --max-steps 2 --opt-level "$level" "$@"
  awk -v loss="$(field resnet train_loss)" 'BEGIN { exit !(loss > 1 && loss < 5) }' || fail "ResNet-18, $level $*: loss $(field resnet train_loss)"
}
# refused WORDS OPTION...
refused() {
  local words=$1 code=0
  shift
  timeout 60 "$hvdrun" -np 2 --no-prefix "$train" --model mlp --max-steps 1 "$@" >"$work/out" 2>&1 </dev/null || code=$?
  case $code in 1 | 2) ;; *) fail "$*: exit code $code" ;; esac
  grep -aF "train: " "$work/out" | grep -qF -- "$words" || fail "$*: not refused by the words '$words'"
}
of_another_level() {
  run narrow 2 --max-steps 1 --opt-level O2 --checkpoint "$work/run"
  refused "its type of the weights is bf16 with fp32 masters, here it is fp32" --checkpoint "$work/run" --resume
  refused "here it is bf16;" --opt-level O3 --checkpoint "$work/run" --resume
}

start learns 4
start autocast
start ways 1 bf16 "--strategy ddp"
start ways 2 bf16 --share-parameters --shard-optimizer
start ways 4 fp16 --shard-optimizer "--strategy ddp"
start one_process
start resumed --strategy ddp
start moved --amp fp16 --shard-optimizer --optimizer adam --lr 0.001
start resnet 2 O2 --sync-bn
start resnet 1 O3
start of_another_level
start refused "'O4' is not one of O0|O1|O2|O3" --opt-level O4
start refused "--opt-level O0 computes in fp32; leave out --amp fp16" --opt-level O0 --amp fp16
start refused "--opt-level O2 needs --amp bf16 or fp16" --opt-level O2 --amp none
start refused "epsilon of 1e-8 is 0 in fp16" --opt-level O3 --amp fp16 --optimizer adam
finish_cases
