#!/usr/bin/env bash
# The trainer's folder reader gives what torchvision's ImageFolder, RandomResizedCrop, RandomHorizontalFlip, Resize, CenterCrop, ToTensor and
# Normalize give, on JPEG and PNG files of many kinds: the same list, the same crops from the same random numbers, and the same values but
# for one level of 255 (newer Pillows choose whether to resize across or down first). With JPEG files decoded to a half or less: a mean
# difference of less than two levels, none of more than 20. Needs torchvision, which setup.sh --tests installs.
# Usage: image_reader.sh BUILD_FOLDER
# timeout: 200
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
python=${HVD_DEPS_DIR:-$root/.deps}/venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # the tree's folders must not be found as packages
if ! why=$("$python" -c "import torch, torchvision" 2>&1); then
  echo "SKIP: no Python with torch and torchvision: $(printf '%s' "$why" | tail -n 1)"
  exit 77
fi
"$python" "$root/tests/examples/image_reader_oracle.py" "$1/tests/image_reader" "$work"
