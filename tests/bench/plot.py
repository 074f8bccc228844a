#!/usr/bin/env python3
"""Draws what tests/bench/compare.sh measured as an SVG: python3 plot.py MEDIANS.tsv PLOT.svg

Bars on a logarithmic scale, grouped by work: times relative to the base, which is the line at 1. Readable on light and on dark pages; needs
nothing but Python. The file has lines "# key: value" (title, base, unit, note, and subjects: their order) and rows "work, subject, time, ratio", with tabs.
"""
import math
import sys

from pictures import DARK, LIGHT, Drawing, colours, legend, legend_width, short, size_name, unique

BAR, GAP, GROUP_GAP, HEIGHT = 24, 4, 40, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 96, 64
LOWEST = 0.1  # bars end here: a memcpy of a few bytes would leave no room for the rest


def read(path):
    about, rows = {}, []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            line = line.rstrip("\n")
            if line.startswith("#"):
                key, _, value = line[1:].partition(":")
                about[key.strip()] = value.strip()
            elif line:
                try:
                    work, subject, time, ratio = line.split("\t")
                    rows.append((work, subject, float(time), float(ratio)))
                    if rows[-1][3] <= 0:
                        raise ValueError
                except ValueError:
                    sys.exit(f"plot.py: {path}:{number}: not 'work, subject, time, ratio' with tabs: {line!r}")
    if not rows:
        sys.exit(f"plot.py: {path} has no measurements")
    return about, rows


def work_name(work):
    return size_name(int(work)) if work.isdigit() else work


def ticks(low, high):
    """Round numbers from low to high: 1, 2, 5, 10..., more or fewer of them as there is room."""
    digits = (1, 1.2, 1.5, 2, 3, 5, 7) if high / low < 8 else (1, 2, 5) if high / low < 200 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]


def draw(about, rows):
    base, unit = about.get("base", rows[0][1]), about.get("unit", "")
    works = unique(row[0] for row in rows)
    values = {(work, subject): (time, ratio) for work, subject, time, ratio in rows}
    there = unique(row[1] for row in rows)
    ordered = unique([s for s in about.get("subjects", "").split() if s in there] + there)
    shown = [s for s in ordered if s != base and not s.startswith("none")]
    groups = {work: [s for s in shown if (work, s) in values] for work in works}
    ratios = [values[work, s][1] for work in works for s in groups[work]] + [1.0]
    low, high = max(min(ratios), LOWEST) * 0.8, max(ratios) * 1.3

    def y(ratio):
        return TOP + HEIGHT * (1 - math.log(max(ratio, LOWEST) / low) / math.log(high / low))

    widths = {work: max(120, len(groups[work]) * (BAR + GAP)) for work in works}
    title = about.get("title", "")
    base_name = "without communication" if base == "none" else base
    meaning = f"Bars: {about.get('note', 'times relative to ' + base)}; the line at 1 is {base_name}, below it is faster."
    width = max(LEFT + RIGHT + sum(widths.values()) + GROUP_GAP * len(works), LEFT + RIGHT + legend_width(shown), 40 + 8.2 * len(title),
                40 + 6.8 * len(meaning))
    gap = (width - LEFT - RIGHT - sum(widths.values())) / len(works)
    said = "; ".join(f"{work_name(w)}: " + ", ".join(f"{s} {short(values[w, s][1])}" for s in groups[w]) for w in works)
    out = Drawing(width, TOP + HEIGHT + BOTTOM, title, said, ".base{stroke-width:1.5} " + colours("s", LIGHT), colours("s", DARK))

    swatches, names = legend(shown, 20, 58)
    bars = {subject: ([swatch], []) for subject, swatch in zip(shown, swatches)}
    marks, below, left = [], [], LEFT + gap / 2
    for work in works:
        x = left + (widths[work] - len(groups[work]) * (BAR + GAP) + GAP) / 2
        for subject in groups[work]:
            time, ratio = values[work, subject]
            top, bottom = min(y(ratio), y(1)), max(y(ratio), y(1))
            bars[subject][0].append((x, top, BAR, max(bottom - top, 1)))
            bars[subject][1].append(f"{work_name(work)} {time:g} {unit}")
            marks.append((x + BAR / 2, top - 4 if ratio >= 1 else bottom + 11, short(ratio)))
            x += BAR + GAP
        middle = left + widths[work] / 2
        below.append((middle, TOP + HEIGHT + 28, work_name(work), "title"))
        if (work, base) in values:
            below.append((middle, TOP + HEIGHT + 46, f"{base_name}: {short(values[work, base][0])} {unit}", "small"))
        left += widths[work] + gap

    scale = ticks(low, high)
    out.texts([(20, 24, title, "title"), (20, 44, meaning), *names], anchor="start")
    out.grid(LEFT, width - RIGHT, map(y, scale))
    out.texts([(LEFT - 8, y(tick) + 4, f"{tick:g}x") for tick in scale], anchor="end")
    for i, subject in enumerate(shown):
        out.boxes(f"s{i % len(LIGHT)}", bars[subject][0], f"{subject}: " + ", ".join(bars[subject][1]))
    out.texts(marks, "small")
    out.texts(below)
    out.path("base", [f"M{LEFT} {y(1):.1f}H{width - RIGHT:.0f}"])
    return str(out)


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: plot.py MEDIANS.tsv PLOT.svg")
    picture = draw(*read(sys.argv[1]))
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(picture)


if __name__ == "__main__":
    main()
