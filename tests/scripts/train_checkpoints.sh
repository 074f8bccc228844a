#!/usr/bin/env bash
# The trainer with sharded state and lossy compression: stopped in the middle of an epoch and resumed it ends with the same numbers; a
# checkpoint of 3 ranks is taken up by 2; the table of compressions has a row for each.
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

for way in "--shard-optimizer --optimizer adam" "--compression int8" "--compression topk --shard-optimizer" "--compression powersgd"; do
  rm -rf "$work/checkpoint"
  # shellcheck disable=SC2086  # options
  run 2 $way --json "$work/unbroken.json"
  # shellcheck disable=SC2086
  run 2 $way --checkpoint "$work/checkpoint" --max-steps 17
  # shellcheck disable=SC2086
  run 2 $way --checkpoint "$work/checkpoint" --resume --json "$work/resumed.json"
  for field in step loss top1; do
    [ "$(last "$work/unbroken.json" $field)" = "$(last "$work/resumed.json" $field)" ] ||
      fail "$way: $field is $(last "$work/resumed.json" $field), unbroken $(last "$work/unbroken.json" $field)"
  done
  echo "ok: $way: loss $(last "$work/resumed.json" loss)"
done

run 3 --shard-optimizer --optimizer adam --checkpoint "$work/three" --max-steps 10
run 2 --shard-optimizer --optimizer adam --checkpoint "$work/three" --resume --json "$work/fewer.json"
[ "$(last "$work/fewer.json" step)" = 30 ] || fail "the checkpoint of 3 ranks is not taken up by 2"
echo "ok: a checkpoint of 3 ranks goes on with 2"

timeout 120 mpirun -np 2 "$1/examples/compression_table" --steps 6 --batch-size 4 >"$work/table" </dev/null || fail "compression_table"
[ "$(grep -c 'KiB |$' "$work/table")" -eq 8 ] || { cat "$work/table"; fail "the table has not 8 rows"; }
echo "ok: the table of compressions"
