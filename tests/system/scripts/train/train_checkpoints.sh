#!/usr/bin/env bash
# The trainer with sharded state, lossy compression and batch norm: stopped in the middle of an epoch and resumed it ends with the same
# numbers; taken up by other numbers of ranks, with the same images per step, it ends as the unbroken run does; every test image is counted
# once; the table of compressions has a row for each.
# Usage: train_checkpoints.sh BUILD_FOLDER
# timeout: 400
# processors: 2
set -euo pipefail

examples=$1/examples tests=$1/tests
# shellcheck source=../../../support/shell/trainer.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../../support/shell/trainer.sh"
run() {
  local ranks=$1
  shift
  timeout 300 mpirun -np "$ranks" "$examples/train" --model mlp --lr 0.01 --max-steps 30 "$@" >"$work/out" 2>&1 </dev/null || fail "train $*"
}

# resumed OPTION...: stopped after 17 of 30 steps and taken up again, to the bit what the unbroken run gives
resumed() {
  local field
  run 2 "$@" --json "$work/unbroken.json"
  run 2 "$@" --checkpoint "$work/checkpoint" --max-steps 17
  run 2 "$@" --checkpoint "$work/checkpoint" --resume --json "$work/resumed.json"
  for field in step train_loss loss top1; do
    [ "$(last "$work/unbroken.json" $field)" = "$(last "$work/resumed.json" $field)" ] ||
      fail "$*: $field is $(last "$work/resumed.json" $field), unbroken $(last "$work/unbroken.json" $field)"
  done
  echo "ok: $*: loss $(last "$work/resumed.json" loss)"
}

# Other numbers of ranks, with the same images per step
other_ranks() {
  local adam=(--shard-optimizer --optimizer adam --lr 0.001) change before its_batch after batch field run
  run 2 "${adam[@]}" --batch-size 30 --json "$work/unbroken.json"
  for change in "3 20 2 30" "2 30 3 20"; do
    read -r before its_batch after batch <<<"$change"
    rm -rf "$work/checkpoint"
    run "$before" "${adam[@]}" --batch-size "$its_batch" --checkpoint "$work/checkpoint" --max-steps 10 --json "$work/stopped.json"
    run "$after" "${adam[@]}" --batch-size "$batch" --checkpoint "$work/checkpoint" --resume --json "$work/resumed.json"
    [ "$(last "$work/resumed.json" step)" = 30 ] || fail "the checkpoint of $before ranks is not taken up by $after"
    for field in train_loss loss; do
      awk -v a="$(last "$work/resumed.json" $field)" -v b="$(last "$work/unbroken.json" $field)" 'BEGIN { exit !(a > 0 && (a - b) ^ 2 < 1e-8 * a * a) }' ||
        fail "$before ranks, then $after: $field is $(last "$work/resumed.json" $field), unbroken $(last "$work/unbroken.json" $field)"
    done
    echo "ok: $before ranks, then $after: loss $(last "$work/resumed.json" loss), unbroken $(last "$work/unbroken.json" loss)"
    for run in stopped resumed; do
      [ "$(last "$work/$run.json" test_images)" = 1000 ] || fail "$run: $(last "$work/$run.json" test_images) test images are counted, not 1000"
    done
  done
}

table() {
  timeout 300 mpirun -np 2 "$tests/compression_table" --steps 6 --batch-size 4 >"$work/out" </dev/null || fail "compression_table"
  [ "$(grep -c 'KiB |$' "$work/out")" -eq 8 ] || fail "the table has not 8 rows"
  echo "ok: the table of compressions"
}

start table
few_images "$cases_folder/images" 320 50
start resumed --model resnet18 --dataset mnist --data "$cases_folder/images" --batch-size 4 --max-steps 20
start other_ranks
start resumed --shard-optimizer --optimizer adam
start resumed --share-parameters --optimizer adam
start resumed --compression int8
start resumed --compression topk --shard-optimizer
# What these remember does not depend on the scale of the loss.
start resumed --compression powersgd --amp fp16
start resumed --strategy ddp --compression int8 --amp fp16
finish_cases
