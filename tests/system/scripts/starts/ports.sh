#!/usr/bin/env bash
# Programs as people have them (a GAN, a VAE, an LSTM with carried state, LBFGS, gradient penalty, clipping of their own, torch::save...), made
# data parallel as the documents say: with 1, 2 and 4 ranks the parameters of one process that has all the rows (ports.cc).
# Usage: ports.sh BUILD_FOLDER
# timeout: 120
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
build=$(cd "$1" && pwd)
ports=$build/tests/ports
[ -x "$ports" ] || { echo "SKIP: ports was not built"; exit 77; }
# shellcheck source=../../../../cmake/mpi_env.sh
. "$root/cmake/mpi_env.sh"
# shellcheck source=../../../support/shell/cases.sh
. "$root/tests/support/shell/cases.sh"
# shellcheck source=../../../support/shell/jobs.sh
. "$root/tests/support/shell/jobs.sh"

shapes=9
try() { job "as one process" "$1" 0 $((shapes * $1)) '^[a-z_]+: [0-9.]+e[-+][0-9]+$' "$ports" "$work"; }
for ranks in 1 2 4; do start try $ranks; done
finish_cases
