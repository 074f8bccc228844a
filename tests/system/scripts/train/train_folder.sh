#!/usr/bin/env bash
# The trainer on folders of images: a folder of 2,000 on 4 ranks whose memory stays flat; the same losses whatever the number of workers;
# bad images skipped or refused on all ranks; classes in the checkpoint; wrong folders; CIFAR-100.
# Usage: train_folder.sh BUILD_FOLDER
# timeout: 300
# processors: 2
set -uo pipefail

train=$1/examples/train make=$1/examples/make_image_folder
# shellcheck source=../../../support/shell/trainer.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../../support/shell/trainer.sh"
data=$cases_folder
export OMP_NUM_THREADS=1
# What all cases read: pictures as small as they may be.
"$make" "$data/big" --train 2000 --val 100 --side 40 --quality 85
"$make" "$data/small" --train 40 --val 12 --side 36 --quality 85
small=(--dataset folder --data "$data/small" --image-size 32 --model mlp --batch-size 4 --epochs 2)

ranks() { # ranks N ARGUMENTS…: the trainer, its output in $work/out
  local n=$1
  shift
  timeout --kill-after=5 120 mpirun -np "$n" "$train" "$@" >"$work/out" 2>&1 </dev/null
}

memory_stays_flat() {
  ranks 4 --dataset folder --data "$data/big" --image-size 32 --model mlp --batch-size 10 --epochs 4 --workers 2 --json "$work/r.json" || fail "2,000 images on 4 ranks"
  grep -q '"test_images": 100' "$work/r.json" || fail "not all validation images were evaluated"
  awk -F'[:,] *' '/"peak_bytes"/ { peak[++n] = $2 } END { printf "peak MiB:"; for (i = 1; i <= n; ++i) printf " %.0f", peak[i] / 1048576; print ""; exit !(n == 4 && peak[4] < peak[2] + 16 * 1048576) }' "$work/r.json" ||
    fail "memory grows from epoch to epoch"
}

# One process with batches of 8 sees together what two ranks see with 4.
same_whatever_the_workers() {
  local workers
  for workers in 0 1 3; do
    ranks 2 "${small[@]}" --workers $workers --json "$work/$workers.json" || fail "$workers workers"
  done
  ranks 1 "${small[@]}" --batch-size 8 --workers 2 --json "$work/one.json" || fail "one process"
  for workers in 1 3; do
    [ "$(last "$work/0.json" train_loss)" = "$(last "$work/$workers.json" train_loss)" ] || fail "$workers workers give another loss than none"
  done
  awk -v a="$(last "$work/0.json" train_loss)" -v b="$(last "$work/one.json" train_loss)" 'BEGIN { exit !(a > 0 && (a - b) ^ 2 < 1e-8 * a * a) }' ||
    fail "two ranks see other images than one process"
}

bad_images() {
  cp -r "$data/small" "$work/bad"
  local victim
  for victim in train/wave3/0000003.jpg train/wave7/0000017.jpg val/wave1/0000001.jpg; do head -c -100 "$data/small/$victim" >"$work/bad/$victim"; done
  local options=(--dataset folder --data "$work/bad" --image-size 32 --model mlp --batch-size 4 --epochs 1)
  ranks 3 "${options[@]}" && fail "bad images are taken by default"
  [ "$(grep -ac '^train: rank [0-9]: bad image.*--bad-images skip' "$work/out")" = 1 ] || fail "the refusal is not printed once"
  grep -aq "RankFailed\|rank .* has died" "$work/out" && fail "a rank died instead of agreeing"
  ranks 3 "${options[@]}" --bad-images skip --json "$work/r.json" || fail "bad images are not skipped"
  for victim in train/wave3/0000003.jpg train/wave7/0000017.jpg val/wave1/0000001.jpg; do
    grep -aq "bad image .*$victim: the file is truncated" "$work/out" || fail "$victim is not named"
  done
  [ "$(last "$work/r.json" test_images) $(last "$work/r.json" bad_test_images)" = "11 1" ] || fail "the bad validation image counts"
  [ "$(last "$work/r.json" bad_training_images)" -ge 2 ] || fail "bad training images are not counted"
}

classes_are_kept() {
  ranks 2 "${small[@]}" --checkpoint "$work/run" --max-steps 3 || fail "a checkpoint"
  cp -r "$data/small" "$work/renamed"
  mv "$work/renamed/train/wave4" "$work/renamed/train/wavf4"
  mv "$work/renamed/val/wave4" "$work/renamed/val/wavf4"
  ranks 2 "${small[@]}" --data "$work/renamed" --checkpoint "$work/run" --resume && fail "a checkpoint of other classes is taken"
  grep -aq "its class 4 is wave5, here it is wave6\|its class 4 is wave4, here it is wave5" "$work/out" || fail "the class is not named"
  ranks 3 "${small[@]}" --checkpoint "$work/run" --resume || fail "the same classes are refused"
}

refused() { # refused "WORD|WORD…" ARGUMENTS…: on two ranks, in one line
  local words=$1 word complaint
  shift
  ranks 2 --model mlp --batch-size 2 --epochs 1 "$@" && fail "not refused: $*"
  complaint=$(grep -a '^train: ' "$work/out")
  [ "$(printf '%s\n' "$complaint" | wc -l)" -eq 1 ] || fail "the message is not printed once: $*"
  while IFS= read -r word; do
    [[ "$complaint" == *"$word"* ]] || fail "the message does not say '$word'"
  done < <(printf '%s\n' "$words" | tr '|' '\n')
  echo "ok: $complaint"
}

wrong_folders() {
  refused "nowhere has no folder train|val" --dataset folder --data "$work/nowhere"
  mkdir -p "$work/more/val/dog"
  cp -r "$data/small/train" "$work/more/train"
  cp "$data/small/val/wave1/0000001.jpg" "$work/more/val/dog"
  refused "classes that the training images have not: dog" --dataset folder --data "$work/more"
  refused "--classes 9|10" --dataset folder --data "$data/small" --classes 9
  refused "--image-size|folder" --image-size 32
  refused "--resize 20|--image-size 32" --dataset folder --data "$data/small" --image-size 32 --resize 20
}

# As where two hosts have other files.
other_files() {
  cp -r "$data/small" "$work/here0"
  cp -r "$data/small" "$work/here1"
  rm "$work/here1/train/wave5/0000005.jpg"
  # shellcheck disable=SC2016  # the rank is known to the inner shell only
  timeout 60 mpirun -np 2 bash -c 'exec "$0" --dataset folder --data "$1$OMPI_COMM_WORLD_RANK" --model mlp --image-size 32' "$train" "$work/here" >"$work/out" 2>&1 </dev/null &&
    fail "ranks with other files train"
  grep -aq "the ranks find other files.*rank 0 train 40 images.*rank 1 train 39 images" "$work/out" || fail "no words for other files"
}

# Records of a coarse and a fine label: the fine one is as many as there are classes.
cifar100() {
  local label
  for label in $(seq 0 99) $(seq 0 27); do printf '%b' "\\x07\\x$(printf %x "$label")"; head -c 3072 /dev/urandom; done >"$work/train.bin"
  head -c $((10 * 3074)) "$work/train.bin" >"$work/test.bin"
  ranks 2 --dataset cifar100 --data "$work" --model mlp --batch-size 16 --epochs 1 --json "$work/r.json" || fail "CIFAR-100"
  grep -aq "CIFAR-100, 128 training and 10 test images" "$work/out" || fail "CIFAR-100 is not described"
  { printf '\x07\x64'; head -c 3072 /dev/zero; } >"$work/test.bin"
  refused "label 100|0 to 99" --dataset cifar100 --data "$work"
}

start memory_stays_flat
start same_whatever_the_workers
start bad_images
start classes_are_kept
start wrong_folders
start other_files
start cifar100
finish_cases
