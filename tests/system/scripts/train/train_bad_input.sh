#!/usr/bin/env bash
# Bad input to the trainer on two ranks: an error that says what is wrong, printed once; exit code not 0; no hang.
# Usage: train_bad_input.sh BUILD_FOLDER
# timeout: 600
set -uo pipefail

train=$1/examples/train
# shellcheck source=../../../support/shell/cases.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../../support/shell/cases.sh"
data=$cases_folder # what cases read; each writes to its own $work

# refused EXIT_CODE "WORD|WORD…" COMMAND…: the command must fail with that code and say every word, in one line that begins with "train:"
refused() {
  local code=$1 words=$2 word status complaint
  shift 2
  timeout --kill-after=5 60 mpirun -np 2 "$@" >"$work/out" 2>&1 </dev/null
  status=$?
  complaint=$(grep -a '^train: ' "$work/out")
  local problem=
  [ "$status" -eq 124 ] && problem="hangs"
  [ -z "$problem" ] && [ "$status" -ne "$code" ] && problem="exit code $status instead of $code"
  [ -z "$problem" ] && [ "$(printf '%s\n' "$complaint" | wc -l)" -ne 1 ] && problem="the message is not printed once"
  while IFS= read -r word; do
    [ -z "$problem" ] && [[ "$complaint" != *"$word"* ]] && problem="the message does not say '$word'"
  done < <(printf '%s\n' "$words" | tr '|' '\n')
  if [ -n "$problem" ]; then
    echo "FAILED: ${*##*/}: $problem; output:"
    cat "$work/out"
    failures=$((failures + 1))
  else
    echo "ok: $complaint"
  fi
}

zeros() { head -c "$1" /dev/zero; }
record=3073

# Options
start refused 2 "--frobnicate" "$train" --frobnicate
start refused 2 "--model|vgg|resnet18|mlp" "$train" --model vgg
start refused 2 "--compression|int4|none|fp16|bf16|int8|topk|powersgd" "$train" --compression int4
start refused 2 "--batch-size|'0'" "$train" --batch-size 0
start refused 2 "--epochs|'-1'" "$train" --epochs=-1
start refused 2 "--lr|'fast'" "$train" --lr fast
start refused 2 "--lr|'nan'" "$train" --lr nan
start refused 2 "--resume|--checkpoint" "$train" --resume
start refused 2 "--checkpoint|''" "$train" --checkpoint ""
start refused 2 "--seed|'-1'|18446744073709551615" "$train" --seed=-1
start refused 2 "--dataset cifar10|--data" "$train" --dataset cifar10

# Data
start refused 1 "$data/nowhere|not a folder|data_batch_1.bin" "$train" --dataset cifar10 --data "$data/nowhere"
mkdir "$data/empty"
start refused 1 "$data/empty|none of|cifar-10-binary.tar.gz" "$train" --dataset cifar10 --data "$data/empty"
start refused 1 "$data/empty|train-images-idx3-ubyte" "$train" --dataset mnist --data "$data/empty"
for folder in truncated label few; do
  mkdir "$data/$folder"
  zeros $((8 * record)) >"$data/$folder/test_batch.bin"
done
zeros $((8 * record - 1)) >"$data/truncated/data_batch_1.bin"
start refused 1 "data_batch_1.bin|truncated" "$train" --dataset cifar10 --data "$data/truncated"
{ zeros $((5 * record)); printf '\013'; zeros $((record - 1)); } >"$data/label/data_batch_1.bin"
start refused 1 "record 5|data_batch_1.bin|label 11|0 to 9" "$train" --dataset cifar10 --data "$data/label"
zeros $record >"$data/few/data_batch_1.bin"
start refused 1 "1 training images|2 ranks" "$train" --dataset cifar10 --data "$data/few"
# Only one rank finds its data: all end, and that rank says why.
mkdir "$data/here0"
zeros $((8 * record)) | tee "$data/here0/test_batch.bin" >"$data/here0/data_batch_1.bin"
# shellcheck disable=SC2016  # the rank is known to the inner shell only
start refused 1 "rank 1|$data/here1" bash -c 'exec "$0" --dataset cifar10 --data "$1$OMPI_COMM_WORLD_RANK"' "$train" "$data/here"

# Files that are written
touch "$data/file"
start refused 1 "$data/file/checkpoints" "$train" --model mlp --checkpoint "$data/file/checkpoints"
start refused 1 "$data/file/records.json" "$train" --model mlp --json "$data/file/records.json"
start refused 1 "$data/none|--resume" "$train" --model mlp --checkpoint "$data/none" --resume
mkdir "$data/damaged"
zeros 1000 >"$data/damaged/checkpoint.pt"
start refused 1 "$data/damaged/checkpoint.pt|damaged" "$train" --model mlp --checkpoint "$data/damaged" --resume
of_another_model() {
  if ! timeout 120 mpirun -np 2 "$train" --model mlp --max-steps 1 --checkpoint "$work/mlp" >"$work/out" 2>&1 </dev/null; then
    echo "FAILED: one step with a checkpoint"
    cat "$work/out"
    failures=$((failures + 1))
  fi
  refused 1 "$work/mlp/checkpoint.pt|--model is mlp|resnet18" "$train" --model resnet18 --checkpoint "$work/mlp" --resume
}
start of_another_model

# Training itself
start refused 1 "diverged|--lr" "$train" --model mlp --optimizer sgd --lr 1e30 --max-steps 5

# A knob of the library: every rank finds it
wrong_knob() {
  if HVD_FUSION_THRESHOLD=abc timeout --kill-after=5 60 mpirun -np 2 "$train" --model mlp >"$work/out" 2>&1 </dev/null; then
    echo "FAILED: HVD_FUSION_THRESHOLD=abc is taken"
    failures=$((failures + 1))
  elif ! grep -aq 'HVD_FUSION_THRESHOLD.*abc' "$work/out"; then
    echo "FAILED: HVD_FUSION_THRESHOLD=abc is not named:"
    cat "$work/out"
    failures=$((failures + 1))
  fi
}
start wrong_knob

finish_cases
