#!/usr/bin/env python3
"""Draws what tests/bench/compare.sh measured as an SVG: python3 plot.py MEDIANS.tsv PLOT.svg

Bars on a logarithmic scale, grouped by work: times relative to the base, which is the line at 1. Readable on light and on dark pages; needs
nothing but Python. The file has lines "# key: value" (title, base, unit, note, and subjects: their order) and rows "work, subject, time, ratio", with tabs.
"""
import html
import math
import sys

BAR, GAP, GROUP_GAP, HEIGHT = 24, 4, 40, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 96, 64
LOWEST = 0.1  # bars end here: a memcpy of a few bytes would leave no room for the rest
LIGHT = ["#0072b2", "#56b4e9", "#009e73", "#7fd1b9", "#d55e00", "#e69f00", "#999999", "#cc79a7", "#8c6bb1"]
DARK = ["#4aa8e0", "#8fd0f5", "#2fc99a", "#a5e6d3", "#ff8a3d", "#ffc247", "#b0b0b0", "#ec9ccb", "#b79be0"]


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


def unique(values):
    return list(dict.fromkeys(values))


def work_name(work):
    if not work.isdigit():
        return work
    size = int(work)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024 or size % 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"


def short(number):
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


def ticks(low, high):
    """Round numbers from low to high: 1, 2, 5, 10..., more or fewer of them as there is room."""
    digits = (1, 1.2, 1.5, 2, 3, 5, 7) if high / low < 8 else (1, 2, 5) if high / low < 200 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]


class Drawing:
    def __init__(self):
        self.lines = []

    def add(self, line):
        self.lines.append(line)

    def text(self, x, y, words, style="", anchor="middle"):
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{f" class={chr(34)}{style}{chr(34)}" if style else ""}>{html.escape(words)}</text>')


def style():
    def colours(palette):
        return " ".join(f".s{i}{{fill:{colour}}}" for i, colour in enumerate(palette))

    return (
        "<style>text{font:12px system-ui,sans-serif;fill:#1f2328} .title{font-weight:600;font-size:14px} .small{font-size:10px} "
        ".page{fill:#ffffff} .grid{stroke:#d0d7de} .base{stroke:#1f2328;stroke-width:1.5} "
        + colours(LIGHT)
        + " @media (prefers-color-scheme:dark){text{fill:#e6edf3} .page{fill:#0d1117} .grid{stroke:#30363d} .base{stroke:#e6edf3} "
        + colours(DARK)
        + "}</style>"
    )


def draw(about, rows):
    base = about.get("base", rows[0][1])
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
    legend = sum(30 + 7.8 * len(s) for s in shown)
    title = about.get("title", "")
    base_name = "without communication" if base == "none" else base
    meaning = f"Bars: {about.get('note', 'times relative to ' + base)}; the line at 1 is {base_name}, below it is faster."
    width = max(LEFT + RIGHT + sum(widths.values()) + GROUP_GAP * len(works), LEFT + RIGHT + legend, 40 + 8.2 * len(title), 40 + 6.8 * len(meaning))
    height = TOP + HEIGHT + BOTTOM
    gap = (width - LEFT - RIGHT - sum(widths.values())) / len(works)

    out = Drawing()
    out.add(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" role="img">')
    out.add(f"<title>{html.escape(title)}</title>")
    out.add("<desc>" + html.escape("; ".join(f"{work_name(w)}: " + ", ".join(f"{s} {short(values[w, s][1])}" for s in groups[w]) for w in works)) + "</desc>")
    out.add(style())
    out.add(f'<rect class="page" width="{width:.0f}" height="{height}"/>')
    out.text(20, 24, title, "title", "start")
    out.text(20, 44, meaning, anchor="start")
    x = 20
    for i, subject in enumerate(shown):
        out.add(f'<rect class="s{i % len(LIGHT)}" x="{x:.1f}" y="58" width="12" height="12"/>')
        out.text(x + 17, 68, subject, anchor="start")
        x += 30 + 7.8 * len(subject)
    for tick in ticks(low, high):
        out.add(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT:.0f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        out.text(LEFT - 8, y(tick) + 4, f"{tick:g}x", anchor="end")
    left = LEFT + gap / 2
    for work in works:
        x = left + (widths[work] - len(groups[work]) * (BAR + GAP) + GAP) / 2
        for subject in groups[work]:
            time, ratio = values[work, subject]
            top, bottom = min(y(ratio), y(1)), max(y(ratio), y(1))
            words = html.escape(f"{work_name(work)}, {subject}: {time:g} {about.get('unit', '')}, {ratio:g} x")
            out.add(
                f'<rect class="s{shown.index(subject) % len(LIGHT)}" x="{x:.1f}" y="{top:.1f}" width="{BAR}" '
                f'height="{max(bottom - top, 1):.1f}"><title>{words}</title></rect>'
            )
            out.text(x + BAR / 2, top - 4 if ratio >= 1 else bottom + 11, short(ratio), "small")
            x += BAR + GAP
        middle = left + widths[work] / 2
        out.text(middle, TOP + HEIGHT + 28, work_name(work), "title")
        if (work, base) in values:
            out.text(middle, TOP + HEIGHT + 46, f"{base_name}: {short(values[work, base][0])} {about.get('unit', '')}", "small")
        left += widths[work] + gap
    out.add(f'<line class="base" x1="{LEFT}" x2="{width - RIGHT:.0f}" y1="{y(1):.1f}" y2="{y(1):.1f}"/>')
    out.add("</svg>")
    return "\n".join(out.lines) + "\n"


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: plot.py MEDIANS.tsv PLOT.svg")
    picture = draw(*read(sys.argv[1]))
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(picture)


if __name__ == "__main__":
    main()
