#!/usr/bin/env python3
"""Times training steps of PyTorch's DistributedDataParallel with gloo, or of Horovod, for tests/bench/compare.sh --steps.

    mpirun -np 4 python peers_steps.py DDP|Horovod [--model resnet18|resnet50|bert-base] ...

The same models, inputs and optimizer (SGD with momentum) as step_bench, and the same options. The step without communication is measured in
turn with the peer's, in one process, each from barrier to barrier. Rank 0 prints "SUBJECT MILLISECONDS RATIO" for none and for the peer:
medians, and the median ratio to none of the same round. With --data, a folder of CIFAR-10's binary files, the peer trains on these, and rank 0
prints "top1 SHARE" of the test images. Needs torch; for Horovod, Horovod built for it.
"""
import argparse
import contextlib
import glob
import os
import statistics
import time

import torch
from torch import nn


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=["DDP", "Horovod"])
    parser.add_argument("-m", "--model", choices=["resnet18", "resnet50", "bert-base"], default="resnet18")
    for names, default in (
        (("-n", "--rounds"), 20),
        (("-w", "--warmup"), 3),
        (("-b", "--batch-size"), 4),
        (("--image-size",), 32),
        (("--classes",), 100),
        (("--sequence",), 128),
        (("--layers",), 12),
        (("--width",), 768),
        (("--heads",), 12),
        (("--vocabulary",), 30522),
    ):
        parser.add_argument(*names, type=int, default=default)
    parser.add_argument("--amp", choices=["none", "bf16"], default="none")
    parser.add_argument("--data")
    return parser.parse_args()


def convolution(wide_in, wide_out, kernel=1, stride=1):
    """With the batch norm after it."""
    return nn.Sequential(nn.Conv2d(wide_in, wide_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(wide_out))


class Block(nn.Module):
    """A residual block: two 3 x 3 convolutions, or a bottleneck that widens by four."""

    def __init__(self, wide_in, width, stride, bottleneck):
        super().__init__()
        wide_out = 4 * width if bottleneck else width
        if bottleneck:
            parts = [convolution(wide_in, width), nn.ReLU(True), convolution(width, width, 3, stride), nn.ReLU(True), convolution(width, wide_out)]
        else:
            parts = [convolution(wide_in, width, 3, stride), nn.ReLU(True), convolution(width, width, 3)]
        self.inside = nn.Sequential(*parts)
        self.around = convolution(wide_in, wide_out, 1, stride) if stride != 1 or wide_in != wide_out else nn.Identity()

    def forward(self, images):
        return torch.relu(self.inside(images) + self.around(images))


def resnet(blocks, bottleneck, classes):
    parts = [convolution(3, 64, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    wide = 64
    for stage, number in enumerate(blocks):
        for block in range(number):
            parts.append(Block(wide, 64 << stage, 2 if stage > 0 and block == 0 else 1, bottleneck))
            wide = (64 << stage) * (4 if bottleneck else 1)
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, classes))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        heads = [part(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        x = self.norm1(x + self.output(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(nn.functional.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self, said):
        super().__init__()
        self.words, self.positions, self.sentences = (nn.Embedding(n, said.width) for n in (said.vocabulary, 512, 2))
        self.norm = nn.LayerNorm(said.width)
        self.layers = nn.Sequential(*(Layer(said.width, said.heads) for _ in range(said.layers)))
        self.pooler, self.classifier = nn.Linear(said.width, said.width), nn.Linear(said.width, said.classes)

    def forward(self, tokens):
        places = torch.arange(tokens.size(1))
        x = self.layers(self.norm(self.words(tokens) + self.positions(places) + self.sentences(torch.zeros_like(tokens))))
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


def make_model(said):
    torch.manual_seed(0)
    if said.model == "bert-base":
        return Bert(said)
    return resnet((2, 2, 2, 2), False, said.classes) if said.model == "resnet18" else resnet((3, 4, 6, 3), True, said.classes)


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)


def with_ddp(model):
    """The model and optimizer of the peer, its barrier, this rank and what ends it."""
    import torch.distributed as dist

    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])  # for a gloo with a way through shared memory
    address = "tcp://127.0.0.1:" + os.environ.get("HVD_COMPARE_PORT", "29517")
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model, make_optimizer(model), dist.barrier, rank, dist.destroy_process_group


def with_horovod(model):
    import horovod.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    return model, optimizer, hvd.barrier, hvd.rank(), hvd.shutdown


def cifar10(folder, pattern):
    """Images as the trainer normalises them, and labels."""
    files = sorted(glob.glob(os.path.join(folder, pattern)))
    if not files:
        raise SystemExit(f"peers_steps.py: {folder} has no {pattern}")
    records = torch.cat([torch.frombuffer(bytearray(open(file, "rb").read()), dtype=torch.uint8) for file in files]).view(-1, 3073)
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))
    return (records[:, 1:].view(-1, 3, 32, 32) / 255 - mean) / deviation, records[:, 0].long()


def batches(said, rank, size):
    """Batches of this rank, another one each time: random ones, or each image once in an epoch."""
    if not said.data:
        if said.model == "bert-base":
            inputs = torch.randint(0, said.vocabulary, (said.batch_size, said.sequence))
        else:
            inputs = torch.randn(said.batch_size, 3, said.image_size, said.image_size)
        labels = torch.randint(0, said.classes, (said.batch_size,))
        while True:
            yield inputs, labels
    images, labels = cifar10(said.data, "data_batch_*.bin")
    order = torch.Generator().manual_seed(0)  # the same on all ranks
    while True:
        mine = torch.randperm(len(images), generator=order)[rank::size]
        for begin in range(0, len(images) // size - said.batch_size + 1, said.batch_size):
            some = mine[begin : begin + said.batch_size]
            yield images[some], labels[some]


def top1(model, folder):
    images, labels = cifar10(folder, "test_batch.bin")
    model.eval()
    with torch.no_grad():
        return sum((model(i).argmax(1) == l).sum().item() for i, l in zip(images.split(100), labels.split(100))) / len(labels)


def main():
    said = options()
    torch.set_num_threads(1)
    alone = make_model(said)
    together, optimizer, barrier, rank, end = (with_ddp if said.peer == "DDP" else with_horovod)(make_model(said))
    torch.manual_seed(1 + rank)
    of_rank = batches(said, rank, int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")))
    mixed = said.amp == "bf16"
    subjects = {"none": (alone, make_optimizer(alone)), said.peer: (together, optimizer)}
    times = {name: [] for name in subjects}
    for round_number in range(-said.warmup, said.rounds):
        inputs, labels = next(of_rank)
        for name in sorted(subjects, reverse=round_number % 2 == 1):  # another one goes first every time
            model, stepper = subjects[name]
            barrier()
            start = time.perf_counter()
            stepper.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            stepper.step()
            barrier()
            if round_number >= 0:
                times[name].append((time.perf_counter() - start) * 1e3)
    if rank == 0:
        for name, values in times.items():
            ratios = [mine / floor for mine, floor in zip(values, times["none"])]
            print(name, f"{statistics.median(values):.2f} {statistics.median(ratios):.3f}", flush=True)
        if said.data:
            known = top1(getattr(together, "module", together), said.data)
            print("top1", f"{known:.4f}", flush=True)
    end()


if __name__ == "__main__":
    main()
