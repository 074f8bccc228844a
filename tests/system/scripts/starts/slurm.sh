#!/usr/bin/env bash
# Under Slurm: srun, salloc with mpirun, and sbatch of examples/train.sbatch both ways start one world of 4 ranks that trains to the same
# numbers; a rank that fails ends the job with its exit code. Skipped where no Slurm answers.
# Usage: slurm.sh BUILD_FOLDER
# timeout: 600
set -euo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
if ! command -v srun >/dev/null; then echo "SKIP: no Slurm on this machine (srun is missing)"; exit 77; fi
if ! timeout 20 sinfo >/dev/null 2>&1; then echo "SKIP: no Slurm answers (sinfo)"; exit 77; fi
# shellcheck source=../../../support/shell/trainer.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../../support/shell/trainer.sh"
work=$cases_folder # one case after the other
options="--model mlp --epochs 1 --max-steps 10 --threads 1"

# shellcheck disable=SC2086  # options
{
  timeout 120 srun -n 4 --mpi=pmix "$build/examples/train" $options --json "$work/srun.json" >"$work/srun.out" 2>&1 || fail "srun"
  timeout 120 salloc -Q -n 4 mpirun "$build/examples/train" $options --json "$work/salloc.json" >"$work/salloc.out" 2>&1 || fail "salloc mpirun"
  for launcher in mpirun srun; do
    HVD_BUILD=$build HVD_LAUNCHER=$launcher timeout 120 sbatch -Q -W -n 4 --output="$work/sbatch-$launcher.out" "$root/examples/train.sbatch" \
      $options --json "$work/sbatch-$launcher.json" || fail "sbatch with $launcher"
  done
}
for run in srun salloc sbatch-mpirun sbatch-srun; do
  [ "$(last "$work/$run.json" world_size)" = 4 ] || fail "$run: not one world of 4 ranks"
  for name in step train_loss top1; do
    [ "$(last "$work/$run.json" $name)" = "$(last "$work/srun.json" $name)" ] ||
      fail "$run: $name is $(last "$work/$run.json" $name), under srun $(last "$work/srun.json" $name)"
  done
  echo "$run: 4 ranks, loss $(last "$work/$run.json" train_loss)"
done
code=0
timeout 60 srun -n 4 --mpi=pmix bash -c 'exec "$0" --model mlp --max-steps 2 --json "$1$SLURM_PROCID"' "$build/examples/train" "$work/none/records" >"$work/failing.out" 2>&1 || code=$?
[ "$code" = 1 ] || fail "a job whose rank 0 cannot write ends with $code, not 1"
grep -q "none/records" "$work/failing.out" || fail "it does not say why"
