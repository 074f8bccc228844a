#!/usr/bin/env python3
"""Prints what the last runs of tests/run.sh cost on this machine: each build by target, each test by name.

    python3 tests/costs.py

Builds are read from Ninja's log (seconds of each compiler and linker, added up by target; what ccache knows costs next to nothing), tests
from build*/tests/costs, where tests/run_test.sh notes them: seconds by the clock, with other tests beside them, and of processors.
"""
import collections
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
PRESETS = {"release": ROOT / "build", "tsan": ROOT / "build-tsan", "asan": ROOT / "build-asan"}
LEAST_SHARE = 0.01  # what costs less is one row together


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


print(report() or "nothing has run yet: bash tests/run.sh")
