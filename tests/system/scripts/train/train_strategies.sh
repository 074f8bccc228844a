#!/usr/bin/env bash
# --strategy and --amp of the trainer: hvd and ddp on 2 ranks end with the same loss, which one process with the same global batch has too
# up to rounding; data-parallel and single are one process; --nproc starts its own ranks; mixed precision learns; a run with a
# scaler goes on where it was stopped.
# Usage: train_strategies.sh BUILD_FOLDER
# timeout: 600
set -euo pipefail

train=$1/examples/train
# shellcheck source=../../../support/shell/trainer.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../../support/shell/trainer.sh"
# field NAME RUN: of the last record; the run hvd, which others are compared with, comes before all cases
field() { last "$([ "$2" = hvd ] && echo "$cases_folder" || echo "$work")/$2.json" "$1"; }
# run NAME RANKS OPTION...: 24 steps of 32 images in all
run() {
  local name=$1 ranks=$2
  shift 2
  mpirun -np "$ranks" "$train" --model mlp --epochs 1 --max-steps 24 --threads 1 --batch-size $((32 / ranks)) --json "$work/$name.json" "$@" \
    >"$work/out" 2>&1 </dev/null || fail "$name: exit code $?"
}
# close A B LIMIT: relative
close() { awk -v a="$1" -v b="$2" -v limit="$3" 'BEGIN { d = a - b; if (d < 0) d = -d; exit !(a > 0 && d <= limit * a) }'; }

work=$cases_folder run hvd 2

# like_hvd NAME RANKS OPTION...: ends with the loss of hvd
like_hvd() {
  run "$@"
  echo "$1: loss $(field train_loss "$1"), hvd $(field train_loss hvd)"
  close "$(field train_loss "$1")" "$(field train_loss hvd)" 1e-5 || fail "$1 ends with another loss than hvd"
}
same_bits() {
  like_hvd "$@"
  [ "$(field train_loss "$1")" = "$(field train_loss hvd)" ] || fail "$1: not the same bits"
}
mixed() {
  run bf16 2 --amp bf16
  close "$(field train_loss bf16)" "$(field train_loss hvd)" 0.02 || fail "bf16: loss $(field train_loss bf16), fp32 $(field train_loss hvd)"
  [ "$(field train_loss bf16)" != "$(field train_loss hvd)" ] || fail "--amp bf16 changes nothing"
}
start like_hvd ddp 2 --strategy ddp
start like_hvd accumulated 2 --strategy ddp --accumulate 2 --batch-size 8
start like_hvd single 1 --strategy single
start like_hvd data-parallel 1 --strategy data-parallel --replicas 2
start same_bits sharded 2 --shard-optimizer
start same_bits sharded-gradients 2 --shard-gradients
start same_bits one-copy 2 --share-parameters
start same_bits workerless 2 --workers 0
start mixed

without_launcher() {
  local code=0
  "$train" --nproc 2 --model mlp --epochs 1 --max-steps 24 --threads 1 --batch-size 16 --json "$work/spawned.json" >"$work/out" 2>&1 </dev/null || fail "--nproc 2"
  [ "$(field train_loss spawned)" = "$(field train_loss hvd)" ] || fail "--nproc 2: other numbers than under mpirun"
  "$train" --nproc 2 --model mlp --dataset cifar10 --data "$work/none" >"$work/out" 2>&1 </dev/null || code=$?
  [ "$code" -ne 0 ] || fail "--nproc 2 ends with 0 where its ranks fail"
  grep -q "$work/none" "$work/out" || fail "--nproc 2 does not say why its ranks fail"
}
start without_launcher

# A ResNet in replicas, each with its own batch norm; synchronised batch norm equals one process
resnet=(--model resnet18 --max-steps 2)
replicas() {
  run replicas 1 "${resnet[@]}" --strategy data-parallel --replicas 2
  awk -v loss="$(field train_loss replicas)" 'BEGIN { exit !(loss > 0 && loss < 20) }' || fail "replicas: loss $(field train_loss replicas)"
}
synchronized() {
  run sync-bn 2 "${resnet[@]}" --sync-bn
  run one 1 "${resnet[@]}" --strategy single
  close "$(field train_loss sync-bn)" "$(field train_loss one)" 1e-4 || fail "sync-bn: loss $(field train_loss sync-bn), one process $(field train_loss one)"
}
start replicas
start synchronized

not_on_two_ranks() {
  if mpirun -np 2 "$train" --model mlp "$@" --max-steps 1 >"$work/out" 2>&1 </dev/null; then fail "$* runs on two ranks"; fi
  grep -q "one process" "$work/out" || fail "$* on two ranks is refused without words"
}
start not_on_two_ranks --strategy single
start not_on_two_ranks --strategy data-parallel
refused() {
  local code=0
  mpirun -np 1 "$train" --model mlp "$@" >"$work/out" 2>&1 </dev/null || code=$?
  [ "$code" = 2 ] || fail "$*: exit code $code instead of 2"
}
start refused --strategy single --compression fp16
start refused --strategy ddp --shard-optimizer
start refused --strategy ddp --share-parameters
start refused --strategy ddp --shard-gradients
start refused --replicas 2
start refused --topk-ratio 2

# Mixed precision with a scaler, stopped and resumed
scaler() {
  local fp16=(--model mlp --amp fp16 --lr 0.01 --batch-size 16 --threads 1 --epochs 2) name
  mpirun -np 2 "$train" "${fp16[@]}" --json "$work/unbroken.json" >"$work/out" 2>&1 </dev/null || fail "--amp fp16"
  mpirun -np 2 "$train" "${fp16[@]}" --max-steps 100 --checkpoint "$work/fp16" --json "$work/resumed.json" >"$work/out" 2>&1 </dev/null || fail "--amp fp16, first part"
  mpirun -np 2 "$train" "${fp16[@]}" --checkpoint "$work/fp16" --resume --json "$work/resumed.json" >"$work/out" 2>&1 </dev/null || fail "--amp fp16 --resume"
  for name in step loss top1; do
    [ "$(field $name unbroken)" = "$(field $name resumed)" ] || fail "fp16 resumed: $name is $(field $name resumed), unbroken $(field $name unbroken)"
  done
  echo "fp16 resumed ends with the loss of the unbroken run: $(field loss unbroken)"
}
start scaler
finish_cases
