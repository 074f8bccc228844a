#!/usr/bin/env bash
# GradScaler makes of random sequences of calls, with finite and other gradients, bit for bit what PyTorch's torch.amp.GradScaler makes of
# them: scale, growth tracker, parameters, gradients, and which calls are refused.
# Usage: grad_scaler.sh BUILD_FOLDER
# timeout: 300
set -uo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
trace=$build/tests/grad_scaler_trace
[ -x "$trace" ] || { echo "SKIP: grad_scaler_trace was not built"; exit 77; }
python=
for candidate in "${HVD_DEPS_DIR:-$root/.deps}/venv/bin/python" python3; do
  if "$candidate" -c 'import torch.amp; torch.amp.GradScaler("cpu")' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || { echo "SKIP: no Python with PyTorch"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Hexadecimal floats have several spellings; both are read back and compared as numbers by printing them alike.
alike() { sed -E 's/0x([01])\.([0-9a-f]*[1-9a-f])?0*p/0x\1.\2p/g; s/\.p/p/g'; }
failures=0
for seed in 1 2 3; do "$python" "$root/tests/system/programs/grad_scaler_trace.py" write $seed; done >"$work/calls"
"$python" "$root/tests/system/programs/grad_scaler_trace.py" replay <"$work/calls" 2>"$work/err" | alike >"$work/pytorch"
"$trace" <"$work/calls" 2>>"$work/err" | alike >"$work/hvd"
lines=$(wc -l <"$work/hvd")
refused=$(grep -c ': refused' "$work/hvd")
scales=$(sed 's/.* : [a-z]* //' "$work/hvd" | cut -d' ' -f1 | uniq | wc -l)
if [ "$lines" -lt 5000 ] || [ "$refused" -lt 100 ] || [ "$scales" -lt 500 ]; then
  echo "FAIL  a poor sequence: $lines calls, $refused refused, $scales scales"
  cat "$work/err"
  failures=1
elif ! diff "$work/pytorch" "$work/hvd" >"$work/difference"; then
  echo "FAIL  PyTorch (<) and hvd (>) differ:"
  head -10 "$work/difference"
  failures=1
else
  echo "PASS  $lines calls, $refused of them refused, $scales changes of the scale"
fi
echo "$failures failed"
[ "$failures" -eq 0 ]
