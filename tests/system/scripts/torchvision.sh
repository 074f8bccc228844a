#!/usr/bin/env bash
# The ResNets of examples/models give torchvision's outputs and gradients for torchvision's weights, and so does a TorchScript module of
# torchvision's; the trainer takes both. Wrong weights are refused with words. Needs torchvision, which setup.sh --tests installs.
# Usage: torchvision.sh BUILD_FOLDER
# timeout: 300
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
python=${HVD_DEPS_DIR:-$root/.deps}/venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# From the work folder: the trees's folder "torch_bindings" and others must not be found as packages.
cd "$work"
if ! why=$("$python" -c "import torch, torchvision" 2>&1); then
  echo "SKIP: no Python with torch and torchvision: $(printf '%s' "$why" | tail -n 1)"
  exit 77
fi

"$python" - "$work" <<'PYTHON'
import sys
import torch, torchvision

work = sys.argv[1]
torch.manual_seed(3)
torch.set_num_threads(1)
for name in ("resnet18", "resnet50"):
    model = getattr(torchvision.models, name)(num_classes=17)
    for module in model.modules():  # statistics, weights and biases that differ by channel
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.uniform_(module.bias, -0.5, 0.5)
            module.running_mean.uniform_(-0.2, 0.2)
            module.running_var.uniform_(0.5, 2)
    torch.save(dict(model.state_dict()), f"{work}/{name}.pth")
    torch.jit.script(model).save(f"{work}/{name}.pt")
    images = torch.randn(3, 3, 64, 64)
    scores = model(images)
    scores.square().sum().backward()
    case = {"images": images, "training": scores.detach(), "gradient": model.conv1.weight.grad}
    model.eval()
    case["evaluation"] = model(images).detach()
    torch.save(case, f"{work}/{name}.case")
PYTHON

for model in resnet18 resnet50; do
  OMP_NUM_THREADS=1 "$1/tests/model_outputs" $model "$work/$model.pth" "$work/$model.case"
done
OMP_NUM_THREADS=1 "$1/tests/model_outputs" "script:$work/resnet18.pt" - "$work/resnet18.case"

fail() {
  echo "FAILED: $*"
  exit 1
}
if "$1/tests/model_outputs" resnet18 "$work/resnet50.pth" "$work/resnet18.case" 2>"$work/words"; then fail "weights of another model are taken"; fi
grep -q "resnet50.pth.*same model\|resnet50.pth.*has shape" "$work/words" || fail "no words for weights of another model: $(cat "$work/words")"
if "$1/tests/model_outputs" resnet18 "$work/resnet18.pt" "$work/resnet18.case" 2>"$work/words"; then fail "a script is taken for weights"; fi

# Two ranks train both: the same weights, so the same loss.
"$python" - "$work" <<'PYTHON'
import sys
import torch, torchvision
torch.manual_seed(5)
model = torchvision.models.resnet18(num_classes=10)
torch.save(dict(model.state_dict()), f"{sys.argv[1]}/ten.pth")
torch.jit.script(model).save(f"{sys.argv[1]}/ten.pt")
PYTHON
four_steps() { mpirun -np 2 "$train" --model "$@" --batch-size 8 --max-steps 4 </dev/null; }
train=$1/examples/train
four_steps resnet18 --weights "$work/ten.pth" --json "$work/1.json"
four_steps "script:$work/ten.pt" --json "$work/2.json"
losses() { grep -h -m 1 train_loss "$1" | tr -dc '0-9.'; }
awk -v a="$(losses "$work/1.json")" -v b="$(losses "$work/2.json")" 'BEGIN { print "loss of four steps:", a, "and as a script", b; exit !(a > 0 && (a - b) ^ 2 < 1e-6 * a * a) }' ||
  fail "the script trains otherwise than the model"
