# Trains what master_weights_trace.cc trains, with fp32 masters by hand, and compares with what that has printed (standard input): SGD bit for
# bit; AdamW, whose formulas PyTorch and LibTorch order differently, within rounding.
import sys

import torch


def numbers(sizes, variant, factor):
    count = 1
    for size in sizes:
        count *= size
    number = torch.arange(count)
    return ((number * 3 + number * number + variant * 5).remainder(11) - 4).to(torch.float32).reshape(sizes) * factor


def steps(name, dtype):
    weights = [numbers(sizes, i, 0.11).to(dtype).requires_grad_() for i, sizes in enumerate([(6, 9), (9,), (9, 3)])]
    masters = [w.detach().float().clone() for w in weights]
    if name == "sgd":
        optimizer = torch.optim.SGD(masters, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=False)
    else:
        optimizer = torch.optim.AdamW(masters, lr=0.01, weight_decay=0.1, foreach=False)
    scale = 1000.0
    for step in range(8):
        x, y = numbers((5, 6), step, 0.25).to(dtype), numbers((5, 3), step + 1, 0.25)
        out = (torch.tanh(x.matmul(weights[0]) + weights[1]).matmul(weights[2])).float()
        gradients = torch.autograd.grad((out - y).square().mean() * scale, weights)
        inverse = torch.tensor(scale, dtype=torch.float64).reciprocal().float()
        for master, gradient in zip(masters, gradients):
            master.grad = gradient.float() * inverse
        optimizer.step()
        for weight, master in zip(weights, masters):
            weight.data.copy_(master)
        yield step, weights, masters


def main():
    torch.set_num_threads(1)
    compared = 0
    for name in ("sgd", "adamw"):
        for dtype in (torch.bfloat16, torch.float16):
            for step, weights, masters in steps(name, dtype):
                title = f"step {step} {name} {str(dtype).split('.')[1]}"
                line = sys.stdin.readline().strip()
                if line != title:
                    sys.exit(f"'{line}' instead of '{title}'")
                for weight, master in zip(weights, masters):
                    for what, tensor in (("weight", weight), ("master", master)):
                        words = sys.stdin.readline().split()
                        mine = torch.tensor([float(word) for word in words[1:]], dtype=torch.float64)
                        theirs = tensor.detach().double().reshape(-1)
                        if words[0] != what or mine.shape != theirs.shape:
                            sys.exit(f"{title}: {words[:1]} of {len(words) - 1} numbers instead of {what} of {theirs.numel()}")
                        allowed = 0.0 if name == "sgd" else 1e-5 if what == "master" else 1e-2
                        worst = (mine - theirs).abs().max().item()
                        if worst > allowed:
                            sys.exit(f"{title}: {what} differs by {worst}, {allowed} is allowed")
                        compared += theirs.numel()
    print(f"{compared} numbers compared")


main()
