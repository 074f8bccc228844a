#!/usr/bin/env bash
# The trainer with sharded state, lossy compression and batch norm: stopped in the middle of an epoch and resumed it ends with the same
# numbers; taken up by other numbers of ranks, with the same images per step, it ends as the unbroken run does; every test image is counted
# once; the table of compressions has a row for each.
# Usage: train_checkpoints.sh BUILD_FOLDER
# timeout: 400
set -euo pipefail

train=$1/examples/train
# shellcheck source=../support/trainer.sh
. "$(dirname "${BASH_SOURCE[0]}")/../support/trainer.sh"
run() {
  local ranks=$1
  shift
  timeout 120 mpirun -np "$ranks" "$train" --model mlp --lr 0.01 --max-steps 30 "$@" >"$work/out" 2>&1 </dev/null || fail "train $*"
}

for way in "--shard-optimizer --optimizer adam" "--compression int8" "--compression topk --shard-optimizer" "--compression powersgd" \
  "--strategy ddp --compression int8" "--model resnet18 --batch-size 4 --max-steps 20"; do
  rm -rf "$work/checkpoint"
  # shellcheck disable=SC2086  # options
  run 2 $way --json "$work/unbroken.json"
  # shellcheck disable=SC2086
  run 2 $way --checkpoint "$work/checkpoint" --max-steps 17
  # shellcheck disable=SC2086
  run 2 $way --checkpoint "$work/checkpoint" --resume --json "$work/resumed.json"
  for field in step train_loss loss top1; do
    [ "$(last "$work/unbroken.json" $field)" = "$(last "$work/resumed.json" $field)" ] ||
      fail "$way: $field is $(last "$work/resumed.json" $field), unbroken $(last "$work/unbroken.json" $field)"
  done
  echo "ok: $way: loss $(last "$work/resumed.json" loss)"
done

# Other numbers of ranks, with the same images per step
adam="--shard-optimizer --optimizer adam --lr 0.001"
# shellcheck disable=SC2086
run 2 $adam --batch-size 30 --json "$work/unbroken.json"
for change in "3 20 2 30" "2 30 3 20"; do
  read -r before its_batch after batch <<<"$change"
  rm -rf "$work/checkpoint"
  # shellcheck disable=SC2086
  {
    run "$before" $adam --batch-size "$its_batch" --checkpoint "$work/checkpoint" --max-steps 10 --json "$work/stopped.json"
    run "$after" $adam --batch-size "$batch" --checkpoint "$work/checkpoint" --resume --json "$work/resumed.json"
  }
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

timeout 120 mpirun -np 2 "$1/examples/compression_table" --steps 6 --batch-size 4 >"$work/table" </dev/null || fail "compression_table"
[ "$(grep -c 'KiB |$' "$work/table")" -eq 8 ] || { cat "$work/table"; fail "the table has not 8 rows"; }
echo "ok: the table of compressions"
