#!/usr/bin/env python3
"""Draws how communication overlaps with the backward pass: python3 overlap.py OUT.svg [TITLE=]PROFILE.json [[TITLE=]PROFILE.json ...]

The files are those that step_bench --profile or train --profile write. One panel for each, with its step of median length: two rows for each
rank, what it computes and how it waits, and its batches of gradients (ready here until it knows that all ranks are, then until the result is
there). Prints for each file the medians over its steps, which share of the time that batches are under way lies within the backward pass
(communication that hides), and how many operators LibTorch begins meanwhile, in times of the rest of that pass: about 1 where communication
has a core to itself, less where it takes that of the backward pass. Exposed is waiting while a batch is under way; other waiting is for
slower ranks. With `-` instead of OUT nothing is drawn. Readable on light and on dark pages; needs nothing but Python.
"""
import bisect
import json
import math
import re
import statistics
import sys
from collections import namedtuple

from pictures import Drawing, colours, legend

# The names of examples/train/trainer/profile.h.
STEP, WAIT, BACKWARD = "training step", "wait for gradients", "backward"
COLOURS = {"forward": "#56b4e9", BACKWARD: "#0072b2", WAIT: "#e69f00", "update": "#009e73"}
EXPOSED, READY, REDUCED = "#a50f15", "#dddddd", "#cc79a7"
PALETTE = [*COLOURS.values(), EXPOSED, READY, REDUCED]
LEFT, WIDTH, RIGHT, TOP, TITLE, ROW = 100, 820, 24, 52, 26, 22

Batch = namedtuple("Batch", "ready agreed done")
Part = namedtuple("Part", "whole phases batches operators")  # one rank's part of a step: an interval, [(name, interval)], [Batch], [begin]


class Unusable(Exception):
    pass


def slices(events):
    """Yields (place, name, from, to) of what begins and ends, or is complete, outermost slices of a track only where it nests."""
    open_slices = {}
    for event in events:
        place = (event["pid"], event.get("tid"))
        if event["ph"] == "X":
            yield place, event["name"], event["ts"], event["ts"] + event["dur"]
        elif event["ph"] == "B":
            open_slices.setdefault(place, []).append((event["name"], event["ts"]))
        elif event["ph"] == "E" and open_slices.get(place):
            name, begin = open_slices[place].pop()
            if not open_slices[place]:
                yield place, name, begin, event["ts"]


def ranks_of(events):
    """What each process of the file is: pid -> (rank, whether its events are LibTorch's)."""
    found = {}
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_name":
            match = re.match(r"rank (\d+)(: LibTorch)?", event["args"]["name"])
            if match:
                found[event["pid"]] = int(match[1]), match[2] is not None
    return found


def batches_of(tracks):
    """A tensor's track alternates between negotiation and operation."""
    batches = set()
    for track in tracks.values():
        ready = None
        for name, begin, end in sorted(track, key=lambda one: one[1:]):
            if name.startswith("NEGOTIATE_"):
                ready = begin
            elif ready is not None:
                batches.add(Batch(ready, begin, end))
                ready = None
    return sorted(batches)


def steps_of(phases, batches, operators):
    """Returns the steps with communication by their number: a rank of a busy machine may lack one that another has."""
    steps = {}
    for number, (begin, end) in enumerate((begin, end) for name, begin, end in phases if name == STEP):
        inner = [(n, (b, e)) for n, b, e in phases if n in COLOURS and begin <= b and e <= end]
        mine = [batch for batch in batches if begin <= batch.agreed < end]
        if mine and any(n == BACKWARD for n, _ in inner):
            steps[number] = Part((begin, end), inner, mine, operators[bisect.bisect(operators, begin):bisect.bisect(operators, end)])
    return steps


def read(path):
    """Returns the file's steps in which all ranks communicate, each a list of what the ranks did in it; times in milliseconds."""
    try:
        with open(path, encoding="utf-8") as file:
            events = [event for event in json.load(file)["traceEvents"] if "ph" in event]
        ranks = ranks_of(events)
        phases, tracks, operators = {}, {}, {}
        for (pid, tid), name, begin, end in slices(events):
            rank, is_torch = ranks.get(pid, (None, False))
            if rank is None:
                continue
            if is_torch and (name == STEP or name in COLOURS):
                phases.setdefault(rank, []).append((name, begin / 1000, end / 1000))
            elif not is_torch:
                tracks.setdefault(rank, {}).setdefault(tid, []).append((name, begin / 1000, end / 1000))
        for event in events:
            if event["ph"] == "X" and event.get("cat") == "cpu_op" and event["pid"] in ranks:
                operators.setdefault(ranks[event["pid"]][0], []).append(event["ts"] / 1000)
        each = [steps_of(sorted(phases[rank], key=lambda one: one[1]), batches_of(tracks.get(rank, {})), sorted(operators.get(rank, [])))
                for rank in sorted(phases)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unusable(f"{path}: not what --profile writes: {error}") from error
    steps = [[parts[number] for parts in each] for number in sorted(set.intersection(*map(set, each)))] if each else []
    if not steps:
        raise Unusable(f"{path}: no training step in which gradients are reduced")
    return steps


def union(intervals):
    joined = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return joined


def length(intervals):
    return sum(end - begin for begin, end in intervals)


def common(some, others):
    return [(max(a, c), min(b, d)) for a, b in some for c, d in others if max(a, c) < min(b, d)]


def begun(operators, intervals):
    return sum(bisect.bisect(operators, end) - bisect.bisect(operators, begin) for begin, end in intervals)


def under_way_of(part):
    return union((batch.agreed, batch.done) for batch in part.batches)


def exposed(part, step):
    """When the rank waits and a batch is under way on some rank."""
    anywhere = union(interval for one in step for interval in under_way_of(one))
    return common(union(interval for name, interval in part.phases if name == WAIT), anywhere)


def measure(step):
    """Means over the ranks of one step: of each phase, of the time that batches are under way, of that within backward..."""
    sums = {}
    for part in step:
        named = {name: union(interval for n, interval in part.phases if n == name) for name in COLOURS}
        under_way = under_way_of(part)
        hidden = common(under_way, named[BACKWARD])
        values = {STEP: length([part.whole]), "batches": len(part.batches), "under way": length(under_way)}
        values.update((name, length(intervals)) for name, intervals in named.items())
        values.update({"hidden": length(hidden), "exposed": length(exposed(part, step)), "operators": begun(part.operators, named[BACKWARD]),
                       "operators meanwhile": begun(part.operators, hidden)})
        for name, value in values.items():
            sums[name] = sums.get(name, 0) + value / len(step)
    return sums


def share(values):
    return 100 * values["hidden"] / values["under way"] if values["under way"] > 0 else 0


def summary(title, steps):
    each = [measure(step) for step in steps]
    columns = [STEP, "forward", BACKWARD, WAIT, "exposed", "update", "batches", "under way", "hidden"]
    median = {name: statistics.median(values[name] for values in each) for name in columns}
    whole = {name: sum(values[name] for values in each) for name in each[0]}
    print(f"{title}: {len(steps)} steps of {len(steps[0])} ranks, medians in ms")
    print("  " + ", ".join(f"{name} {median[name]:.4g}" for name in columns))
    print(f"  hidden behind backward: {share(whole):.0f} % of the time that batches are under way ({min(map(share, each)):.0f} to {max(map(share, each)):.0f} % step by step)")
    alone = (whole["operators"] - whole["operators meanwhile"]) / max(whole[BACKWARD] - whole["hidden"], 1e-9)
    if alone > 0 and whole["hidden"] > 0:
        print(f"  operators begun meanwhile: {whole['operators meanwhile'] / whole['hidden'] / alone:.2f} times as many a millisecond as in the rest of backward")
    return f"{title}: {share(whole):.0f} % hidden"


def typical(steps):
    """The step of median length."""
    ordered = sorted(steps, key=lambda step: measure(step)[STEP])
    return ordered[(len(ordered) - 1) // 2]


def lanes(batches):
    """Yields (batch, lane): two that overlap in time are in different lanes."""
    ends = []
    for batch in batches:
        lane = next((i for i, end in enumerate(ends) if end <= batch.ready), len(ends))
        ends[lane:lane + 1] = [batch.done]
        yield batch, lane


def boxes_of(part, step, zero):
    """Yields (colour, begin, end, top, height) of what is drawn of a rank, in ms since `zero` and in rows: one of computing, one of batches."""
    for name, (begin, end) in part.phases:
        yield COLOURS[name], begin - zero, end - zero, 0.1, 0.8
    for begin, end in exposed(part, step):
        yield EXPOSED, begin - zero, end - zero, 0.1, 0.8
    placed = list(lanes(part.batches))
    height = 0.8 / (1 + max(lane for _, lane in placed))
    for batch, lane in placed:
        top = 1.1 + height * lane
        yield READY, batch.ready - zero, batch.agreed - zero, top, height * 0.9
        yield REDUCED, batch.agreed - zero, batch.done - zero, top, height * 0.9


def draw_panel(out, title, step, top, scale):
    """Draws one path for each colour; returns the places of the rows' names."""
    zero = min(part.whole[0] for part in step)
    series, ends, names = {}, [], []
    for rank, part in enumerate(step):
        first = top + 2 * ROW * rank
        for colour, begin, end, place, height in boxes_of(part, step, zero):
            series.setdefault(colour, []).append((LEFT + scale * begin, first + ROW * place, max(scale * (end - begin), 0.1), ROW * height))
        ends += [f"M{LEFT + scale * (end - zero):.1f} {first:.1f}v{2 * ROW}" for name, (_, end) in part.phases if name == BACKWARD]
        names += [(LEFT - 8, first + ROW * 0.65, f"rank {rank}"), (LEFT - 8, first + ROW * 1.65, "its gradients")]
    out.text(LEFT, top - 6, title, anchor="start")
    for colour, boxes in series.items():
        out.boxes(f"s{PALETTE.index(colour)}", boxes)
    out.path("end", ends)
    return names


def draw(panels):
    longest = max(max(part.whole[1] for part in step) - min(part.whole[0] for part in step) for _, step in panels)
    scale = WIDTH / longest
    legend_names = [*COLOURS, "of that exposed: a batch is under way", "batch ready here, not agreed on", "batch under way"]
    heights = [2 * ROW * len(step) + TITLE for _, step in panels]
    bottom = TOP + sum(heights)
    rules = colours("s", PALETTE) + " .end{stroke:#1f2328;stroke-dasharray:1 2;fill:none}"
    out = Drawing(LEFT + WIDTH + RIGHT, bottom + 44, "A training step: what each rank computes, and when its gradients are reduced",
                  "; ".join(title for title, _ in panels), rules, ".end{stroke:#e6edf3}")
    rows = [legend(legend_names[:4], LEFT, 14), legend(legend_names[4:], LEFT, 34)]
    for i, box in enumerate(box for boxes, _ in rows for box in boxes):
        out.boxes(f"s{i}", [box])
    out.texts([word for _, words in rows for word in words], anchor="start")
    top, names = TOP, []
    for (title, step), height in zip(panels, heights):
        names += draw_panel(out, title, step, top + TITLE, scale)
        top += height
    out.texts(names, anchor="end")
    marks = ticks(longest)
    out.path("grid", [f"M{LEFT + scale * ms:.1f} {bottom + 4:.1f}v6" for ms in marks])
    out.texts([(LEFT + scale * ms, bottom + 22, f"{ms:g}") for ms in marks] + [(LEFT + WIDTH / 2, bottom + 38, "ms since the step began")])
    return str(out)


def ticks(longest):
    """Returns five to ten round numbers from 0 on."""
    power = 10.0 ** math.floor(math.log10(longest))
    step = next(d * power for d in (0.1, 0.2, 0.5, 1, 2) if longest / (d * power) <= 10)
    return [step * i for i in range(int(longest / step) + 1)]


def main():
    if len(sys.argv) < 3:
        sys.exit("usage: overlap.py OUT.svg [TITLE=]PROFILE.json [[TITLE=]PROFILE.json ...]")
    panels = []
    for word in sys.argv[2:]:
        title, path = word.rsplit("=", 1) if "=" in word else (word, word)
        try:
            steps = read(path)
        except Unusable as error:
            sys.exit(f"overlap.py: {error}")
        panels.append((summary(title, steps), typical(steps)))
    if sys.argv[1] != "-":
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            file.write(draw(panels))


if __name__ == "__main__":
    main()
