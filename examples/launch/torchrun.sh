#!/usr/bin/env bash
# Starts ranks by torchrun, without MPI, on this host or on several; arguments are the program and its own. On each host:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=first bash examples/launch/torchrun.sh build/examples/train --model resnet18
#   NPROC_PER_NODE   ranks on this host                              (default: 4)
#   NNODES           hosts                                           (default: 1)
#   NODE_RANK        this one's number, from 0
#   MASTER_ADDR      the name or address of host 0; MASTER_PORT a free port of it (default: 29500)
set -euo pipefail
[ $# -gt 0 ] || { echo "torchrun.sh: which program? torchrun.sh PROGRAM [arguments]" >&2; exit 2; }
exec torchrun --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "${NPROC_PER_NODE:-4}" \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" --no-python "$@"
