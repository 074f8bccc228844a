"""Compares the trainer's folder reader with torchvision (tests/system/scripts/image_reader.sh): image_reader_oracle.py PROGRAM FOLDER"""
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import torch
import torchvision
import torchvision.transforms.transforms as transforms
from PIL import Image
from torchvision.transforms import functional as F

MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
MASK = (1 << 64) - 1


class Stream:
    """SplitMix64, as examples/train/images/random.h has it."""

    def __init__(self, *purpose):
        self.state = 0
        for word in purpose:
            self.state = self.next() ^ word

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def uniform(self):
        return (self.next() >> 11) * 2.0**-53

    def below(self, limit):
        return self.next() % limit


class Number(float):
    def item(self):
        return float(self)


class TorchOfStream:
    """What RandomResizedCrop.get_params calls of torch, with random numbers of a Stream."""

    def __init__(self, stream):
        self.stream = stream

    def tensor(self, values):
        return values

    def log(self, values):
        return [math.log(value) for value in values]

    def exp(self, value):
        return Number(math.exp(value))

    def empty(self, _):
        return self

    def uniform_(self, low, high):
        return Number(low + (high - low) * self.stream.uniform())

    def randint(self, low, high, size):
        return Number(low + self.stream.below(high - low))


def crop_of_torchvision(image, stream):
    transforms.torch = TorchOfStream(stream)
    try:
        top, left, height, width = transforms.RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
    finally:
        transforms.torch = torch
    return int(left), int(top), width, height, stream.below(2)


def picture(width, height, seed):
    """Something like a photograph: gradients, edges and noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    planes = []
    for channel in range(3):
        a, b, c = random.uniform(0.01, 0.12, 3)
        plane = 120 + 60 * np.sin(a * x + b * y) + 40 * np.sign(np.sin(c * x) * np.cos(b * y)) + random.normal(0, 6, (height, width))
        planes.append(plane)
    return Image.fromarray(np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8))


def make_images(folder):
    """Returns files that torchvision reads otherwise, or not at all."""
    for name in ("a", "b/sub", "c", "d"):
        os.makedirs(f"{folder}/{name}")
    count = 0
    for quality in (40, 92):
        for sampling in ("4:4:4", "4:2:2", "4:2:0", "4:1:1"):
            for progressive in (False, True):
                image = picture(311 + 37 * count, 240 + 23 * (count % 5), count)
                image.save(f"{folder}/{'a' if count % 2 else 'b/sub'}/{count:02}.jpg", quality=quality, subsampling=sampling,
                           progressive=progressive, restart_marker_rows=count % 3)
                count += 1
    image, other = picture(300, 220, 50), picture(300, 220, 51)
    image.save(f"{folder}/a/UPPER.JPG")
    image.convert("L").save(f"{folder}/c/grey.jpg")
    image.convert("CMYK").save(f"{folder}/c/cmyk.jpeg")
    rotated = Image.Exif()
    rotated[0x0112] = 6
    image.save(f"{folder}/c/rotated.jpg", exif=rotated)
    image.resize((31, 17)).save(f"{folder}/c/small.jpg")
    image.resize((1, 1)).save(f"{folder}/c/pixel.jpg")
    image.resize((600, 3)).save(f"{folder}/c/flat.jpg")
    alpha = image.convert("RGBA")
    alpha.putalpha(other.convert("L"))
    alpha.save(f"{folder}/d/alpha.png")
    image.save(f"{folder}/d/rgb.png")
    image.convert("L").save(f"{folder}/d/grey.PNG")
    image.convert("LA").save(f"{folder}/d/grey_alpha.png")
    image.convert("1").save(f"{folder}/d/bits.png")
    image.convert("P").save(f"{folder}/d/palette.png")
    image.quantize(13).save(f"{folder}/d/palette4.png", bits=4)
    image.quantize(13).save(f"{folder}/d/palette_clear.png", transparency=3)
    image.resize((3, 500)).save(f"{folder}/d/high.png")
    shutil.copy(f"{folder}/d/rgb.png", f"{folder}/d/really_png.JPEG")
    wide = np.asarray(image.convert("L")).astype(np.uint16) * 257
    Image.fromarray(wide).save(f"{folder}/d/sixteen.png")
    truncated = open(f"{folder}/a/01.jpg", "rb").read()
    open(f"{folder}/a/truncated.jpg", "wb").write(truncated[: len(truncated) * 2 // 3])
    open(f"{folder}/a/text.jpg", "w").write("no image")
    open(f"{folder}/a/notes.txt", "w").write("no image by its name")
    return {"sixteen.png": image.convert("L"), "truncated.jpg": None, "text.jpg": None}


def run(program, folder, out, mode, size, resize, shrink):
    said = subprocess.run([program, mode, folder, str(size), str(resize), "5", "3", str(shrink), out], check=True, capture_output=True, text=True)
    lines = [line.split("\t") for line in said.stdout.splitlines()]
    return lines, np.fromfile(out, np.float32).reshape(len(lines), 3, size, size)


def expected(mode, image, crop, size, resize):
    if mode == "train":
        left, top, width, height, mirror = crop
        image = F.resized_crop(image, top, left, height, width, [size, size])
        image = F.hflip(image) if mirror else image
    else:
        image = F.center_crop(F.resize(image, resize), size)
    return F.normalize(F.to_tensor(image), MEAN, DEVIATION).numpy()


def load(file, special):
    name = os.path.basename(file)
    if name in special:  # of 16 bits the upper eight count, where Pillow makes all above 255 white
        return special[name]
    return Image.open(file).convert("RGB")


def compare(program, folder, special, mode, size, resize, shrink):
    lines, values = run(program, folder, f"{folder}.out", mode, size, resize, shrink)
    listed = torchvision.datasets.ImageFolder(folder).samples
    assert [(line[0], int(line[1])) for line in lines] == listed, (lines, listed)
    most, means, equal = 0.0, [], 0
    for i, line in enumerate(lines):
        image = load(line[0], special)
        assert (line[7] == "") == (image is not None), line
        if image is None:
            continue
        image = image.convert("RGB")
        crop = tuple(map(int, line[2:7]))
        if mode == "train":
            wanted = crop_of_torchvision(image, Stream(5, 3, i))
            moved = [wanted[place] - crop[place] for place in (0, 1)]  # of a scaled image: to the left and up, by less than its pixel
            assert crop[2:] == wanted[2:] and all(0 <= step < (8 if shrink else 1) for step in moved), (line, wanted)
        difference = np.abs(expected(mode, image, crop, size, resize) - values[i]) * np.array(DEVIATION).reshape(3, 1, 1) * 255
        equal += difference.max() == 0
        means.append(float(difference.mean()))
        most = max(most, float(difference.max()))
    print(f"{mode} {size} {'scaled' if shrink else 'whole'}: {equal} of {len(means)} images equal, differences of 255: at most {most:.2f}, "
          f"mean at most {max(means):.3f}")
    return most, max(means)


def main():
    program, work = sys.argv[1], sys.argv[2]
    folder = f"{work}/images"
    special = make_images(folder)
    for mode in ("train", "val"):
        for size, resize in ((224, 256), (97, 97)):
            most, _ = compare(program, folder, special, mode, size, resize, shrink=0)
            assert most < 1.01
        most, mean = compare(program, folder, special, mode, 48, 55, shrink=1)
        assert most < 20 and mean < 2


main()
