#!/usr/bin/env python3
"""Draws test accuracy over epochs out of the trainer's records: python3 plot_curves.py PLOT.svg NAME.json...

One line per file, named as the file. Readable on light and on dark pages; needs nothing but Python. Also prints a Markdown table.
"""
import json
import math
import os
import sys

from pictures import DARK, LIGHT, Drawing, colours

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 340, 56, 130, 48, 44


def read(path):
    with open(path, encoding="utf-8") as file:
        records = json.load(file)
    if not records:
        sys.exit(f"plot_curves.py: {path} has no records")
    return os.path.splitext(os.path.basename(path))[0], records


def draw(curves):
    epochs = max(record["epoch"] for _, records in curves for record in records)
    values = [100 * record["top1"] for _, records in curves for record in records]
    step = 5 if max(values) - min(values) > 12 else 2
    low, high = step * math.floor(min(values) / step), step * math.ceil(max(values) / step)
    high = max(high, low + step)

    def x(epoch):
        return LEFT + WIDTH * (epoch - 1) / max(epochs - 1, 1)

    def y(percent):
        return TOP + HEIGHT * (1 - (percent - low) / (high - low))

    title = f"Test accuracy (top-1, %) by epoch; {curves[0][1][0]['world_size']} ranks"
    said = "; ".join(f"{name}: {100 * records[-1]['top1']:.1f} %" for name, records in curves)
    line = "stroke:{};fill:none;stroke-width:2"
    out = Drawing(LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM, title, said, colours("l", LIGHT, line) + " " + colours("t", LIGHT),
                  colours("l", DARK, line) + " " + colours("t", DARK))
    out.text(20, 26, title, "title", "start")
    scale = range(low, high + 1, step)
    out.grid(LEFT, LEFT + WIDTH, map(y, scale))
    out.texts([(LEFT - 8, y(percent) + 4, str(percent)) for percent in scale], anchor="end")
    out.texts([(x(epoch), TOP + HEIGHT + 20, str(epoch)) for epoch in range(1, epochs + 1)])
    labels = sorted(((y(100 * records[-1]["top1"]), i) for i, (_, records) in enumerate(curves)))
    places, last = {}, -math.inf
    for place, i in labels:  # names at the lines' ends, moved apart where they would meet
        last = places[i] = max(place, last + 14)
    for i, (name, records) in enumerate(curves):
        points = [f"{x(r['epoch']):.1f} {y(100 * r['top1']):.1f}" for r in records]
        out.path(f"l{i % len(LIGHT)}", ["M" + "L".join(points)], name)
    out.texts([(LEFT + WIDTH + 8, places[i] + 4, name, f"t{i % len(LIGHT)}") for i, (name, _) in enumerate(curves)], anchor="start")
    return str(out)


def main():
    if len(sys.argv) < 3:
        sys.exit("usage: plot_curves.py PLOT.svg NAME.json...")
    curves = [read(path) for path in sys.argv[2:]]
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.write(draw(curves))
    print("| | epochs | test loss | top-1, % | top-5, % | s per epoch |\n|---|---|---|---|---|---|")
    for name, records in curves:
        r = records[-1]
        seconds = sorted(record["seconds"] for record in records)[len(records) // 2]
        print(f"| {name} | {r['epoch']} | {r['loss']:.3f} | {100 * r['top1']:.1f} | {100 * r['top5']:.1f} | {seconds:.0f} |")


if __name__ == "__main__":
    main()
