#!/usr/bin/env bash
# MasterWeights steps as fp32 masters by hand do in PyTorch: bf16 and fp16 weights, loss scaling, SGD bit for bit, AdamW within rounding.
# Usage: master_weights.sh BUILD_FOLDER
# timeout: 120
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
trace=$build/tests/master_weights_trace
[ -x "$trace" ] || { echo "SKIP: master_weights_trace was not built"; exit 77; }
python=
for candidate in "${HVD_DEPS_DIR:-$root/.deps}/venv/bin/python" python3; do
  if "$candidate" -c 'import torch' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || { echo "SKIP: no Python with PyTorch"; exit 77; }
if "$trace" | "$python" "$root/tests/system/programs/master_weights_trace.py"; then
  echo "PASS"
else
  echo "FAIL  see above"
  exit 1
fi
