"""Images per second of the trainer's folder reader beside torchvision's DataLoader, in turn, with the same number of workers.

    .deps/venv/bin/python tests/bench/reader.py build/tests/image_reader [--data FOLDER] [--workers 1,2] [--rounds 3]

FOLDER has a folder per class, as --dataset folder of the trainer has it in train/. Without one, 300 pictures of 500 x 375 pixels are made.
Both make training batches of 32: decode, RandomResizedCrop to 224, flip, normalise. Medians over the rounds.
"""
import argparse
import os
import statistics
import subprocess
import tempfile
import time

import numpy as np
import torch
import torchvision
from PIL import Image
from torchvision import transforms

BATCH, SIZE = 32, 224


def make_images(folder, count):
    random = np.random.default_rng(1)
    y, x = np.mgrid[0:375, 0:500].astype(np.float64)
    for i in range(count):
        os.makedirs(f"{folder}/{i % 3}", exist_ok=True)
        planes = []
        for _ in range(3):
            a, b, c = random.uniform(0.01, 0.12, 3)
            planes.append(120 + 60 * np.sin(a * x + b * y) + 40 * np.sign(np.sin(c * x) * np.cos(b * y)) + random.normal(0, 6, x.shape))
        Image.fromarray(np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8)).save(f"{folder}/{i % 3}/{i}.jpg", quality=90)


class Peer:
    """torchvision's DataLoader, kept running between measurements."""

    def __init__(self, folder, workers):
        transform = transforms.Compose([
            transforms.RandomResizedCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ])
        images = torchvision.datasets.ImageFolder(folder, transform)
        images.samples = images.samples * 200  # an epoch that does not end
        self.loader = torch.utils.data.DataLoader(images, batch_size=BATCH, num_workers=workers, shuffle=True)

    def speed(self, seconds):
        batches = iter(self.loader)
        for _ in range(self.loader.num_workers + 1):
            next(batches)
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            count += len(next(batches)[1])
        return count / (time.perf_counter() - begin)


def speed(program, folder, workers, seconds):
    words = [program, "speed", folder, str(SIZE), str(BATCH), str(workers), str(seconds)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--data")
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        if options.data is None:
            make_images(made, 300)
        folder = options.data or made
        print(f"{'workers':>8} {'hvd images/s':>13} {'torchvision':>12} {'ratio':>6}   (per worker: {'hvd':>6} {'torchvision':>12})")
        for workers in map(int, options.workers.split(",")):
            peer, pairs = Peer(folder, workers), []
            for _ in range(options.rounds):
                pairs.append((speed(options.program, folder, workers, options.seconds), peer.speed(options.seconds)))
            ours, theirs = (statistics.median(side) for side in zip(*pairs))
            print(f"{workers:8} {ours:13.0f} {theirs:12.0f} {ours / theirs:6.2f}   {ours / workers:20.0f} {theirs / workers:12.0f}", flush=True)


main()
