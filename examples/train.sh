#!/usr/bin/env bash
# Trains with the example program: sets up what is missing, builds it, and starts it on 4 ranks. Arguments go to the program
# (--help lists them); HVD_NP is the number of ranks, HVD_MPIRUN_ARGS goes to mpirun.
#   bash examples/train.sh
#   bash examples/train.sh --model resnet18 --dataset cifar10 --data DIR --epochs 3
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/cmake/setup.sh"
# shellcheck source=../cmake/build.sh
. "$root/cmake/build.sh"
hvd_build release train
# shellcheck source=../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
# shellcheck disable=SC2086
exec mpirun -np "${HVD_NP:-4}" ${HVD_MPIRUN_ARGS:-} "$root/build/examples/train" "$@"
