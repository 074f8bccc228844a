#!/usr/bin/env python3
"""Draws what hvd_bench --sweep measured as a heat map: python3 heatmap.py OUT.svg SWEEP.json [SWEEP.json ...]

One panel for each number of ranks, with the medians of its files; a row for each collective, or for each other way of doing it, a column for each size. A cell says how many times as
long as hvd MPI takes: blue where hvd is faster, red where it is slower. Needs matplotlib; the ending of OUT says which format it gets.
"""
import json
import statistics
import sys

from pictures import pyplot

WAYS = ("main", "plain", "arena", "fp16", "bf16", "grouped")


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            sweep = json.load(file)
        rows = sweep["rows"]
        values = {(row["collective"], row["way"], row["bytes"]): float(row["ratio"]) for row in rows}
        return f"{sweep['ranks']} ranks on {sweep['cores']} cores", values
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"heatmap.py: {path}: not what hvd_bench --sweep --json writes: {error}")


def medians(runs):
    """One panel for each title, in the order in which they come."""
    together = {}
    for title, values in runs:
        for cell, ratio in values.items():
            together.setdefault(title, {}).setdefault(cell, []).append(ratio)
    return [(title, {cell: statistics.median(ratios) for cell, ratios in cells.items()}) for title, cells in together.items()]


def unique(values):
    return list(dict.fromkeys(values))


def size_name(size):
    for unit in ("B", "KiB", "MiB"):
        if size < 1024 or size % 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"


def label(collective, way):
    return collective if way == "main" else f"{collective}, {way}"


def draw(panels, path):
    plt = pyplot("heatmap.py")
    from matplotlib.colors import LogNorm

    rows = sorted(unique((c, w) for _, values in panels for c, w, _ in values), key=lambda row: WAYS.index(row[1]))
    sizes = sorted({size for _, values in panels for _, _, size in values})
    width, height = 2.6 + 0.72 * len(sizes) * len(panels), 1.3 + 0.32 * len(rows)
    figure, axes = plt.subplots(1, len(panels), figsize=(width, height), sharey=True, squeeze=False, layout="constrained")
    image = None
    for (title, values), axis in zip(panels, axes[0]):
        cells = [[values.get((c, w, size), float("nan")) for size in sizes] for c, w in rows]
        image = axis.imshow(cells, cmap="RdBu", norm=LogNorm(vmin=0.1, vmax=10), aspect="auto")
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(sizes)), [size_name(size) for size in sizes], rotation=45, ha="right", fontsize=8)
        axis.set_yticks(range(len(rows)), [label(*row) for row in rows], fontsize=8)
        for y, line in enumerate(cells):
            for x, ratio in enumerate(line):
                if ratio == ratio:
                    axis.text(x, y, f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}", ha="center", va="center", fontsize=7,
                              color="black" if 0.25 < ratio < 4 else "white")
    figure.colorbar(image, ax=axes[0], label="MPI's time / hvd's", shrink=0.8, ticks=[0.1, 0.3, 1, 3, 10], format="%g")
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main():
    if len(sys.argv) < 3:
        sys.exit("usage: heatmap.py OUT.svg SWEEP.json [SWEEP.json ...]")
    draw(medians([read(path) for path in sys.argv[2:]]), sys.argv[1])


if __name__ == "__main__":
    main()
