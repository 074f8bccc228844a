#!/usr/bin/env python3
"""Says what the last runs of tests/run.sh cost: each build by target, each test by name.

    python3 tests/costs.py             prints the tables
    python3 tests/costs.py --write     puts them into CONTRIBUTING.md, between its two marks

Builds are read from Ninja's log (seconds of each compiler and linker, added up by target; what ccache knows costs next to nothing), tests
from build*/tests/costs, where tests/run_test.sh notes them: seconds by the clock, and of processors.
"""
import argparse
import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PRESETS = {"release": ROOT / "build", "tsan": ROOT / "build-tsan", "asan": ROOT / "build-asan"}
LEAST_SHARE = 0.01  # what costs less is one row together
BEGIN, END = "<!-- costs: begin -->", "<!-- costs: end -->"


def build_costs(folder):
    """Returns {target: seconds} of the last time that each file was made."""
    last = {}
    for line in (folder / ".ninja_log").read_text().splitlines()[1:]:
        begin, end, _, made, _ = line.split("\t")
        last[made] = (int(end) - int(begin)) / 1000
    targets = collections.Counter()
    for made, seconds in last.items():
        compiled = re.search(r"CMakeFiles/([^/]+)\.dir/", made)
        name = compiled.group(1) if compiled else re.sub(r"^lib|\.a$|\.so.*$", "", pathlib.Path(made).name)
        targets[name] += seconds
    return targets


def test_costs(folder):
    """Returns {test: (seconds by the clock, seconds of processors)}."""
    costs = {}
    for file in sorted((folder / "tests" / "costs").glob("*")):
        words = file.read_text().split()
        if len(words) >= 3:
            wall, user, system = (float(word) for word in words[-3:])
            costs[file.name] = (wall, user + system)
    return costs


def table(title, rows, columns):
    """rows: (name, numbers...), the first number decides order and share."""
    total = sum(row[1] for row in rows) or 1
    rows = sorted(rows, key=lambda row: -row[1])
    large = [row for row in rows if row[1] >= LEAST_SHARE * total]
    small = rows[len(large):]
    if small:
        large.append((f"{len(small)} others", *(sum(numbers) for numbers in zip(*(row[1:] for row in small)))))
    large.append(("all", *(sum(numbers) for numbers in zip(*(row[1:] for row in rows)))))
    lines = [f"| {title} | " + " | ".join(columns) + " | share |", "|---|" + "---:|" * (len(columns) + 1)]
    lines += [f"| {name} | " + " | ".join(f"{number:.1f}" for number in numbers) + f" | {100 * numbers[0] / total:.0f} % |"
              for name, *numbers in large]
    return "\n".join(lines)


def report():
    parts = []
    for preset, folder in PRESETS.items():
        if (folder / ".ninja_log").exists():
            builds = build_costs(folder)
            parts.append(table(f"build {preset}", list(builds.items()), ["seconds"]))
        tests = test_costs(folder)
        if tests:
            parts.append(table(f"tests {preset}", [(name, *numbers) for name, numbers in tests.items()], ["seconds", "of processors"]))
    return "\n\n".join(parts)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--write", action="store_true", help="into CONTRIBUTING.md")
    text = report()
    if not arguments.parse_args().write:
        print(text or "nothing has run yet: bash tests/run.sh")
        return
    page = ROOT / "CONTRIBUTING.md"
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or not text:
        sys.exit(f"{page}: the marks {BEGIN} and {END} are not there, or nothing has run yet")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


main()
