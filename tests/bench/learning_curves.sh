#!/usr/bin/env bash
# Trains ResNet-18 on CIFAR-10 in each of the ways that must not change what is learnt, and draws test accuracy over epochs in one plot:
# plain, bf16, gradients as fp16, sharded optimizer state, synchronised batch norm, PowerSGD.
#   bash tests/bench/learning_curves.sh CIFAR10_FOLDER OUT_FOLDER [OPTION OF train]...
# OUT_FOLDER gets WAY.json (the trainer's records) and learning_curves.svg. A way whose records are there already is not run again.
#   HVD_NP          ranks                     (default: 4)
#   HVD_BUILD       build folder              (default: build)
#   HVD_CURVES      the ways, by name         (default: plain bf16 fp16-gradients sharded sync-bn powersgd)
#   HVD_EPOCHS      epochs                    (default: 10)
set -euo pipefail

if [ $# -lt 2 ]; then sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
data=$1 out=$2
shift 2
mkdir -p "$out"
declare -A ways=(
  [plain]=""
  [bf16]="--amp bf16"
  [fp16-gradients]="--compression fp16"
  [sharded]="--shard-optimizer"
  [sync-bn]="--sync-bn"
  [powersgd]="--compression powersgd"
)
files=()
for way in ${HVD_CURVES:-plain bf16 fp16-gradients sharded sync-bn powersgd}; do
  [ -n "${ways[$way]+set}" ] || { echo "learning_curves.sh: there is no way '$way'; known: ${!ways[*]}" >&2; exit 2; }
  files+=("$out/$way.json")
  if [ -s "$out/$way.json" ]; then continue; fi
  echo "learning_curves.sh: $way" >&2
  # shellcheck disable=SC2086  # options
  mpirun -np "${HVD_NP:-4}" "${HVD_BUILD:-$root/build}/examples/train" --model resnet18 --dataset cifar10 --data "$data" --epochs "${HVD_EPOCHS:-10}" \
    ${ways[$way]} "$@" --json "$out/$way.part" </dev/null
  mv "$out/$way.part" "$out/$way.json"
done
python3 "$root/tests/bench/plot_curves.py" "$out/learning_curves.svg" "${files[@]}"
