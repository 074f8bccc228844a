#!/usr/bin/env python3
"""Draws test accuracy over epochs out of the trainer's records: python3 plot_curves.py PLOT.svg NAME.json...

One line per file, named as the file. Readable on light and on dark pages; needs nothing but Python. Also prints a Markdown table.
"""
import html
import json
import math
import os
import sys

from plot import DARK, LIGHT, Drawing

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 340, 56, 130, 48, 44


def style():
    def colours(palette):
        return " ".join(f".l{i}{{stroke:{c};fill:none;stroke-width:2}} .t{i}{{fill:{c}}}" for i, c in enumerate(palette))

    return (
        "<style>text{font:12px system-ui,sans-serif;fill:#1f2328} .title{font-weight:600;font-size:14px} .page{fill:#ffffff} .grid{stroke:#d0d7de} "
        + colours(LIGHT)
        + " @media (prefers-color-scheme:dark){text{fill:#e6edf3} .page{fill:#0d1117} .grid{stroke:#30363d} "
        + colours(DARK)
        + "}</style>"
    )


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

    out = Drawing()
    width, height = LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM
    title = f"Test accuracy (top-1, %) by epoch; {curves[0][1][0]['world_size']} ranks"
    out.add(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">')
    out.add(f"<title>{html.escape(title)}</title>")
    out.add("<desc>" + html.escape("; ".join(f"{name}: {100 * records[-1]['top1']:.1f} %" for name, records in curves)) + "</desc>")
    out.add(style())
    out.add(f'<rect class="page" width="{width}" height="{height}"/>')
    out.text(20, 26, title, "title", "start")
    for percent in range(low, high + 1, step):
        out.add(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y(percent):.1f}" y2="{y(percent):.1f}"/>')
        out.text(LEFT - 8, y(percent) + 4, str(percent), anchor="end")
    for epoch in range(1, epochs + 1):
        out.text(x(epoch), TOP + HEIGHT + 20, str(epoch))
    labels = sorted(((y(100 * records[-1]["top1"]), i) for i, (_, records) in enumerate(curves)))
    places, last = {}, -math.inf
    for place, i in labels:  # names at the lines' ends, moved apart where they would meet
        last = places[i] = max(place, last + 14)
    for i, (name, records) in enumerate(curves):
        points = " ".join(f"{x(r['epoch']):.1f},{y(100 * r['top1']):.1f}" for r in records)
        out.add(f'<polyline class="l{i % len(LIGHT)}" points="{points}"><title>{html.escape(name)}</title></polyline>')
        out.text(LEFT + WIDTH + 8, places[i] + 4, name, f"t{i % len(LIGHT)}", "start")
    out.add("</svg>")
    return "\n".join(out.lines) + "\n"


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
