"""What the programs that draw share: an SVG of few elements, readable on light and on dark pages. Needs nothing but Python.

A series is one path, whatever the number of its bars, and words of one kind are one text: the files stand in the repository, and are read there.
"""
import html

LIGHT = ["#0072b2", "#56b4e9", "#009e73", "#7fd1b9", "#d55e00", "#e69f00", "#999999", "#cc79a7", "#8c6bb1"]
DARK = ["#4aa8e0", "#8fd0f5", "#2fc99a", "#a5e6d3", "#ff8a3d", "#ffc247", "#b0b0b0", "#ec9ccb", "#b79be0"]
LETTER = 7.8  # the width of a legend's letter


def short(number):
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


def size_name(size):
    for unit in ("B", "KiB", "MiB"):
        if size < 1024 or size % 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"


def unique(values):
    return list(dict.fromkeys(values))


def coordinate(number):
    return f"{number:.1f}".removesuffix(".0")


class Drawing:
    """An SVG of this size. `rules` and `dark` are its own style sheets, for light pages and for what differs on dark ones."""

    def __init__(self, width, height, title, description, rules, dark):
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img">',
            f"<title>{html.escape(title)}</title>",
            f"<desc>{html.escape(description)}</desc>",
            "<style>text{font:12px system-ui,sans-serif;fill:#1f2328} .title{font-weight:600;font-size:14px} .small{font-size:10px} "
            ".page{fill:#fff} .grid{stroke:#d0d7de} .base{stroke:#1f2328} " + rules
            + " @media (prefers-color-scheme:dark){text{fill:#e6edf3} .page{fill:#0d1117} .grid{stroke:#30363d} .base{stroke:#e6edf3} " + dark + "}</style>",
            f'<path class="page" d="M0 0h{width:.0f}v{height:.0f}H0z"/>',
        ]

    def path(self, style, steps, title=""):
        if steps:
            words = f"<title>{html.escape(title)}</title>" if title else ""
            self.lines.append(f'<path class="{style}" d="{"".join(steps)}"' + (f">{words}</path>" if words else "/>"))

    def boxes(self, style, boxes, title=""):
        """One path of all boxes (x, y, width, height)."""
        self.path(style, ["M{} {}h{}v{}h-{}z".format(*map(coordinate, (x, y, w, h, w))) for x, y, w, h in boxes], title)

    def grid(self, left, right, places):
        self.path("grid", [f"M{coordinate(left)} {coordinate(y)}H{coordinate(right)}" for y in places])

    def texts(self, words, style="", anchor="middle"):
        """One text of all words (x, y, word) or (x, y, word, style of this word)."""
        spans = "".join(
            f'<tspan x="{coordinate(x)}" y="{coordinate(y)}"' + (f' class="{own[0]}"' if own and own[0] else "") + f">{html.escape(word)}</tspan>"
            for x, y, word, *own in words)
        if spans:
            self.lines.append(f'<text text-anchor="{anchor}"' + (f' class="{style}"' if style else "") + f">{spans}</text>")

    def text(self, x, y, word, style="", anchor="middle"):
        self.texts([(x, y, word)], style, anchor)

    def __str__(self):
        return "\n".join([*self.lines, "</svg>"]) + "\n"


def legend(names, x, y):
    """Returns the boxes and the words of a line of names."""
    boxes, words = [], []
    for name in names:
        boxes.append((x, y, 12, 12))
        words.append((x + 17, y + 10, name))
        x += 30 + LETTER * len(name)
    return boxes, words


def legend_width(names):
    return sum(30 + LETTER * len(name) for name in names)


def colours(kind, palette, rule="fill:{}"):
    return " ".join(f".{kind}{i}{{{rule.format(colour)}}}" for i, colour in enumerate(palette))
