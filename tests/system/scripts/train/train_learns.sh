#!/usr/bin/env bash
# The embedded default passes 90 % on 4 ranks (its time is printed, not judged), and an interrupted run goes on to the numbers of an unbroken one.
# Usage: train_learns.sh BUILD_FOLDER
# timeout: 600
# processors: 2
set -euo pipefail

examples=$1/examples
# shellcheck source=../../../support/shell/trainer.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../../support/shell/trainer.sh"
# run RANKS OPTIONS…
run() {
  local ranks=$1
  shift
  mpirun -np "$ranks" "$examples/train" "$@" </dev/null || fail "train $*: exit code $?"
}

embedded_default() {
  local started=$SECONDS top1
  run 4 --json "$work/default.json"
  top1=$(last "$work/default.json" top1)
  echo "embedded default: top-1 $top1 after $((SECONDS - started)) s"
  awk -v top1="$top1" 'BEGIN { exit !(top1 >= 0.9) }' || fail "top-1 is $top1, not 0.9"
}

# The loop with its marked lines
four_lines() {
  mpirun -np 4 "$examples/wrap_existing" >"$work/wrapped" </dev/null || fail "wrap_existing: exit code $?"
  awk '{ loss = $NF } END { exit !(loss > 0 && loss < 0.2) }' "$work/wrapped" || fail "wrap_existing does not learn: $(tail -n 1 "$work/wrapped")"
}

# 2,500 images make 39 steps of 2 ranks x 32 images: stopped after the first epoch, and in the middle of the second
resumed() {
  local unbroken=(--model mlp --optimizer sgd --lr 0.01 --epochs 2) stop field expected got
  run 2 "${unbroken[@]}" --json "$work/unbroken.json"
  for stop in "--epochs 1" "--max-steps 55"; do
    rm -rf "$work/checkpoint"
    # shellcheck disable=SC2086  # options
    run 2 "${unbroken[@]}" $stop --checkpoint "$work/checkpoint" --json "$work/resumed.json"
    run 2 "${unbroken[@]}" --checkpoint "$work/checkpoint" --resume --json "$work/resumed.json"
    for field in epoch step loss top1; do
      expected=$(last "$work/unbroken.json" $field)
      got=$(last "$work/resumed.json" $field)
      [ "$expected" = "$got" ] || fail "stopped by $stop and resumed: $field is $got, unbroken $expected"
    done
    [ "$(grep -c '"epoch"' "$work/resumed.json")" -eq 2 ] || fail "stopped by $stop and resumed: not one record per epoch"
  done
  echo "resumed runs end with the loss of the unbroken one: $(last "$work/unbroken.json" loss)"
}

start embedded_default
start resumed
start four_lines
finish_cases
