#!/usr/bin/env bash
# What the trainer reports and how it steps: schedules and warm-up, CSV beside JSON, TensorBoard's files, averages of parameters, clipping,
# --evaluate, --profile, the summary.
# Usage: train_options.sh BUILD_FOLDER
# timeout: 300
# processors: 2
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
python=${HVD_DEPS_DIR:-$root/.deps}/venv/bin/python
train=$1/examples/train
# shellcheck source=../../../support/shell/trainer.sh
. "$root/tests/support/shell/trainer.sh"
export OMP_NUM_THREADS=1
common=(--model mlp --batch-size 25) # 2,500 synthetic images

ranks() { # ranks N ARGUMENTS…: the trainer, its output in $work/out
  local n=$1
  shift
  timeout --kill-after=5 120 mpirun -np "$n" "$train" "${common[@]}" "$@" >"$work/out" 2>&1 </dev/null
}
near() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && b != "" && (a - b) ^ 2 <= 1e-8 * (a * a + 1e-12)) }'; }
column() { awk -F, -v name="$2" 'NR == 1 { for (i = 1; i <= NF; ++i) if ($i == name) c = i; next } { value = $c } END { print value }' "$1"; }

# The last step's rate: of an epoch of 50 steps, after 49/50.
schedules() {
  ranks 2 --epochs 2 --lr 0.1 --lr-schedule step --lr-steps 1 --lr-gamma 0.5 --csv "$work/r.csv" --json "$work/r.json" || fail "steps"
  near "$(column "$work/r.csv" learning_rate)" 0.05 || fail "the rate of --lr-schedule step"
  near "$(column "$work/r.csv" top1)" "$(last "$work/r.json" top1)" || fail "CSV and JSON differ"
  [ "$(wc -l <"$work/r.csv")" = 3 ] || fail "not a line per epoch"
  ranks 2 --epochs 1 --lr 0.1 --lr-schedule cosine --csv "$work/c.csv" || fail "cosine"
  near "$(column "$work/c.csv" learning_rate)" "$(awk 'BEGIN { print 0.05 * (1 + cos(atan2(0, -1) * 0.98)) }')" || fail "the rate of --lr-schedule cosine"
  ranks 2 --epochs 1 --lr 0.1 --scale-lr --warmup-epochs 2 --csv "$work/w.csv" || fail "warm-up"
  near "$(column "$work/w.csv" learning_rate)" "$(awk 'BEGIN { print 0.2 * (0.5 + 0.5 * 0.98 / 2) }')" || fail "the rate of a warm-up to a scaled rate"
  # A run that is interrupted goes on with the same rates, and its files with the same lines.
  local schedule=(--epochs 2 --lr 0.1 --lr-schedule cosine --checkpoint "$work/run" --csv "$work/i.csv" --ema 0.9)
  ranks 2 "${schedule[@]}" --max-steps 70 || fail "interrupted"
  ranks 2 "${schedule[@]}" --max-steps 70 --resume || fail "begun again where nothing is left to do"
  [ "$(wc -l <"$work/i.csv")" = 3 ] || fail "where nothing is left to do, records are lost"
  ranks 2 "${schedule[@]}" --resume || fail "resumed"
  ranks 2 --epochs 2 --lr 0.1 --lr-schedule cosine --csv "$work/u.csv" --ema 0.9 || fail "uninterrupted"
  [ "$(wc -l <"$work/i.csv")" = 3 ] || fail "lines of an interrupted run"
  near "$(column "$work/i.csv" train_loss)" "$(column "$work/u.csv" train_loss)" || fail "an interrupted run with a schedule ends otherwise"
  near "$(column "$work/i.csv" loss)" "$(column "$work/u.csv" loss)" || fail "an interrupted run has another average"
}

steps() {
  local options=(--epochs 1 --weight-decay 0.01) other
  ranks 2 "${options[@]}" --json "$work/plain.json" || fail "plain"
  for other in "--label-smoothing 0.1" "--clip-norm 0.05" "--no-decay-norm-bias" "--ema 0.99"; do
    # shellcheck disable=SC2086
    ranks 2 "${options[@]}" $other --json "$work/other.json" || fail "$other"
    near "$(last "$work/plain.json" loss)" "$(last "$work/other.json" loss)" && fail "$other changes nothing"
    # shellcheck disable=SC2086
    ranks 1 "${options[@]}" --batch-size 50 $other --strategy single --json "$work/one.json" || fail "$other in one process"
    awk -v a="$(last "$work/one.json" loss)" -v b="$(last "$work/other.json" loss)" 'BEGIN { exit !(a > 0 && (a - b) ^ 2 < 1e-6 * a * a) }' ||
      fail "$other differs between two ranks and one process"
  done
  ranks 2 "${options[@]}" --clip-norm 0.05 --strategy ddp --json "$work/ddp.json" || fail "ddp clips"
  ranks 2 "${options[@]}" --clip-norm 0.05 --json "$work/hvd.json" || fail "hvd clips"
  awk -v a="$(last "$work/ddp.json" loss)" -v b="$(last "$work/hvd.json" loss)" 'BEGIN { exit !(a > 0 && (a - b) ^ 2 < 1e-6 * a * a) }' || fail "ddp and hvd clip differently"
  ranks 2 --share-parameters --ema 0.9 && fail "--ema with --share-parameters is taken"
  grep -aq "train: --ema does not go with --share-parameters" "$work/out" || fail "no words for --ema with --share-parameters"
  ranks 1 --batch-size 025 --max-steps 08 --seed 18446744073709551615 || fail "zeros before a number, or a large seed"
  grep -aq "^epoch 1/3" "$work/out" || fail "no epoch"
  ranks 2 --lr-steps 3,2 --lr-schedule step && fail "steps that fall are taken"
  grep -aq "no list of epochs that rise" "$work/out" || fail "no words for steps that fall"
}

evaluate() {
  ranks 2 --epochs 1 --checkpoint "$work/run" --json "$work/r.json" --ema 0.9 || fail "training"
  ranks 3 --evaluate --checkpoint "$work/run" --json "$work/e.json" --ema 0.9 || fail "--evaluate"
  near "$(last "$work/r.json" loss)" "$(last "$work/e.json" loss)" || fail "--evaluate gives another loss than training's evaluation"
  ranks 2 --evaluate && fail "--evaluate without weights is taken"
  grep -aq "train: --evaluate needs" "$work/out" || fail "no words for --evaluate without weights"
}

reports() {
  ranks 2 --epochs 1 --tensorboard "$work/board" --print-frequency 10 --profile "$work/profile.json" --profile-steps 3 --csv "$work/r.csv" || fail "reports"
  [ "$(grep -ac '  step [0-9]*0/50  loss' "$work/out")" = 5 ] || fail "not a line every 10 steps"
  grep -aq '^time: .* compute .*input .*exposed communication' "$work/out" || fail "no summary"
  [ "$(column "$work/r.csv" peak_bytes)" -gt 10000000 ] || fail "no peak of memory"
  grep -q SHM_ALLREDUCE "$work/profile.json" || fail "the profile lacks hvd's timeline"
  grep -q 'aten::addmm\|aten::linear' "$work/profile.json" || fail "the profile lacks LibTorch's operators"
  local phase
  for phase in "training step" forward backward "wait for gradients" update; do
    grep -qF "\"name\":\"$phase\"" "$work/profile.json" || fail "the profile lacks the phase '$phase'"
  done
  [ "$(ls "$work" | grep -c profile)" = 1 ] || fail "files of the profile are left over"
  local why
  if ! why=$("$python" -c "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator" 2>&1); then
    echo "left out: no Python with tensorboard: $(printf '%s' "$why" | tail -n 1)"
    return
  fi
  (cd "$work" && "$python" - "$work" "$(column "$work/r.csv" loss)") <<'PYTHON' || fail "TensorBoard reads something else"
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
board = EventAccumulator(sys.argv[1] + "/board").Reload()
[loss] = board.Scalars("test/loss")
assert loss.step == 50 and abs(loss.value - float(sys.argv[2])) < 1e-6, loss
assert [point.step for point in board.Scalars("step/loss")] == [10, 20, 30, 40, 50]
# The profile: both kinds of events of both ranks, at the same time.
events = json.load(open(sys.argv[1] + "/profile.json"))["traceEvents"]
spans = {}
for event in events:
    if event.get("ph") in "XBE" and "ts" in event:
        kind = (event["pid"] if event["pid"] < 2 else (event["pid"] - 1000000) // 100, event["pid"] >= 2)
        low, high = spans.get(kind, (event["ts"], event["ts"]))
        spans[kind] = (min(low, event["ts"]), max(high, event["ts"]))
print(spans)
assert set(spans) == {(0, False), (0, True), (1, False), (1, True)}, spans
lengths = [high - low for low, high in spans.values()]
assert max(low for low, _ in spans.values()) < min(high for _, high in spans.values()), spans
PYTHON
}

start schedules
start steps
start evaluate
start reports
finish_cases
