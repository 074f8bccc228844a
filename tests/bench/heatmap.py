#!/usr/bin/env python3
"""Draws what hvd_bench --sweep measured as a heat map: python3 heatmap.py OUT.svg SWEEP.json [SWEEP.json ...]

One panel for each number of ranks, with the medians of its files; a row for each collective, or for each other way of doing it, a column for each
size. A cell says how many times as long as hvd MPI takes: blue where hvd is faster, red where it is slower. The medians go into OUT.tsv, of which
'python3 heatmap.py OUT.svg OUT.tsv' draws it again. Readable on light and on dark pages; needs nothing but Python.
"""
import json
import statistics
import sys

from pictures import Drawing, legend, short, size_name, unique

WAYS = ("main", "plain", "arena", "fp16", "bf16", "grouped")
BOUNDS = (0.5, 0.8, 0.95, 1.05, 1.25, 2, 4)  # between the colours
PALETTE = ("#b2182b", "#ef8a62", "#fddbc7", "#f7f7f7", "#d1e5f0", "#92c5de", "#4393c3", "#2166ac")
CELL_WIDTH, CELL_HEIGHT, LEFT, TOP, GAP = 50, 20, 150, 84, 16


def read_table(path):
    """Returns the panels of a file that write_table() made."""
    panels = {}
    with open(path, encoding="utf-8") as file:
        sizes = [int(size) for size in next(file).rstrip("\n").split("\t")[3:]]
        for line in file:
            title, collective, way, *ratios = line.rstrip("\n").split("\t")
            panels.setdefault(title, {}).update({(collective, way, size): float(r) for size, r in zip(sizes, ratios) if r})
    return list(panels.items())


def write_table(panels, path):
    rows, sizes = layout(panels)
    with open(path, "w", encoding="utf-8") as file:
        file.write("\t".join(["ranks", "collective", "way", *map(str, sizes)]) + "\n")
        for title, values in panels:
            for row in rows:
                ratios = [f"{values[(*row, size)]:.3g}" if (*row, size) in values else "" for size in sizes]
                file.write("\t".join([title, *row, *ratios]) + "\n")


def read(path):
    with open(path, encoding="utf-8") as file:
        sweep = json.load(file)
    values = {(row["collective"], row["way"], row["bytes"]): float(row["ratio"]) for row in sweep["rows"]}
    return f"{sweep['ranks']} ranks on {sweep['cores']} cores", values


def medians(runs):
    """One panel for each title, in the order in which they come."""
    together = {}
    for title, values in runs:
        for cell, ratio in values.items():
            together.setdefault(title, {}).setdefault(cell, []).append(ratio)
    return [(title, {cell: statistics.median(ratios) for cell, ratios in cells.items()}) for title, cells in together.items()]


def layout(panels):
    """Returns the rows (collective, way) and the sizes of all panels, in their order."""
    rows = sorted(unique((c, w) for _, values in panels for c, w, _ in values), key=lambda row: WAYS.index(row[1]))
    return rows, sorted({size for _, values in panels for _, _, size in values})


def colour(ratio):
    return sum(ratio >= bound for bound in BOUNDS)


def draw(panels):
    rows, sizes = layout(panels)
    panel = CELL_WIDTH * len(sizes) + GAP
    width, bottom = LEFT + panel * len(panels), TOP + CELL_HEIGHT * len(rows)
    rules = " ".join(f".c{i}{{fill:{c}}}" for i, c in enumerate(PALETTE)) + " .cell{font-size:10px;fill:#1f2328} .cell .w{fill:#fff}"
    title = "MPI's time / hvd's"
    out = Drawing(width, bottom + 32, title, "; ".join(name for name, _ in panels), rules, "")
    ranges = [f"< {BOUNDS[0]:g}", *(f"{bound:g}" for bound in BOUNDS)]
    swatches, names = legend(ranges, LEFT, 34)
    boxes = [[swatch] for swatch in swatches]
    lines = [[] for _ in rows]
    below = []
    for number, (name, values) in enumerate(panels):
        left = LEFT + panel * number
        below.append((left + (panel - GAP) / 2, TOP - 10, name, "title"))
        below += [(left + CELL_WIDTH * (column + 0.5), bottom + 18, size_name(size)) for column, size in enumerate(sizes)]
        for y, row in enumerate(rows):
            for x, ratio in ((x, values.get((*row, size))) for x, size in enumerate(sizes)):
                if ratio is not None:
                    place, kind = (left + CELL_WIDTH * x, TOP + CELL_HEIGHT * y), colour(ratio)
                    boxes[kind].append((*place, CELL_WIDTH - 1, CELL_HEIGHT - 1))
                    lines[y].append((place[0] + CELL_WIDTH / 2, place[1] + 14, short(ratio), "w" if kind in (0, len(BOUNDS)) else ""))
    out.texts([(20, 24, title, "title"), (20, 44, "from (and up)"), *names], anchor="start")
    for kind, series in enumerate(boxes):
        out.boxes(f"c{kind}", series)
    out.texts(below)
    out.texts([(LEFT - 8, TOP + CELL_HEIGHT * y + 14, c if w == "main" else f"{c}, {w}") for y, (c, w) in enumerate(rows)], anchor="end")
    for line in lines:
        out.texts(line, "cell")
    return str(out)


def main():
    if len(sys.argv) < 3:
        sys.exit("usage: heatmap.py OUT.svg SWEEP.json [SWEEP.json ...]")
    out, *files = sys.argv[1:]
    again = len(files) == 1 and files[0].endswith(".tsv")
    try:
        panels = read_table(files[0]) if again else medians(map(read, files))
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        sys.exit(f"heatmap.py: {' '.join(files)}: not what hvd_bench --sweep --json writes: {error}")
    if not again:
        write_table(panels, out.removesuffix(".svg") + ".tsv")
    with open(out, "w", encoding="utf-8") as file:
        file.write(draw(panels))


if __name__ == "__main__":
    main()
