#!/usr/bin/env python3
"""Draws how communication overlaps with the backward pass: python3 overlap.py OUT.svg [TITLE=]PROFILE.json [[TITLE=]PROFILE.json ...]

The files are those that step_bench --profile or train --profile write. One panel for each, with its step of median length: two rows for each
rank, what it computes and how it waits, and its batches of gradients (ready here until it knows that all ranks are, then until the result is
there). Prints for each file the medians over its steps, which share of the time that batches are under way lies within the backward pass
(communication that hides), and how many operators LibTorch begins meanwhile, in times of the rest of that pass: about 1 where communication
has a core to itself, less where it takes that of the backward pass. Exposed is waiting while a batch is under way; other waiting is for
slower ranks. Needs matplotlib; not with `-` instead of OUT, which draws nothing. The ending of OUT says which format it gets.
"""
import bisect
import json
import re
import statistics
import sys
from collections import namedtuple

from pictures import pyplot

# The names of examples/train/trainer/profile.h.
STEP, WAIT, BACKWARD = "training step", "wait for gradients", "backward"
COLOURS = {"forward": "#56b4e9", BACKWARD: "#0072b2", WAIT: "#e69f00", "update": "#009e73"}
READY, REDUCED, EXPOSED = "#dddddd", "#cc79a7", "#a50f15"

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
    steps = []
    for name, begin, end in phases:
        if name != STEP:
            continue
        inner = [(n, (b, e)) for n, b, e in phases if n in COLOURS and begin <= b and e <= end]
        mine = [batch for batch in batches if begin <= batch.agreed < end]
        if mine and any(n == BACKWARD for n, _ in inner):
            steps.append(Part((begin, end), inner, mine, operators[bisect.bisect(operators, begin):bisect.bisect(operators, end)]))
    return steps


def read(path):
    """Returns the file's steps with communication, each a list of what the ranks did in it; times in milliseconds."""
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
    steps = [list(parts) for parts in zip(*each)]
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


def draw_panel(axis, title, step):
    zero = min(part.whole[0] for part in step)
    names = []
    for rank, part in enumerate(step):
        y = 2 * rank
        for name, (begin, end) in part.phases:
            axis.barh(y, end - begin, left=begin - zero, height=0.8, color=COLOURS[name])
        for begin, end in exposed(part, step):
            axis.barh(y, end - begin, left=begin - zero, height=0.8, color=EXPOSED)
        placed = list(lanes(part.batches))
        height = 0.8 / (1 + max(lane for _, lane in placed))
        for batch, lane in placed:
            middle = y + 0.6 + height * (lane + 0.5)
            axis.barh(middle, batch.agreed - batch.ready, left=batch.ready - zero, height=height * 0.9, color=READY)
            axis.barh(middle, batch.done - batch.agreed, left=batch.agreed - zero, height=height * 0.9, color=REDUCED)
        for name, (begin, end) in part.phases:
            if name == BACKWARD:
                axis.plot([end - zero] * 2, [y - 0.4, y + 1.4], color="black", linewidth=0.8, linestyle=":")
        names += [f"rank {rank}", "its gradients"]
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_title(title, fontsize=9, loc="left")
    axis.tick_params(axis="x", labelsize=8)


def draw(panels, path):
    plt = pyplot("overlap.py")
    from matplotlib.patches import Patch

    height = 0.9 + sum(0.6 + 0.55 * len(step) for _, step in panels)
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, height), sharex=True, squeeze=False, layout="constrained",
                                height_ratios=[len(step) for _, step in panels])
    for (title, step), axis in zip(panels, axes[:, 0]):
        draw_panel(axis, title, step)
    axes[-1, 0].set_xlabel("ms since the step began", fontsize=8)
    legend = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    legend += [Patch(color=EXPOSED, label="of that exposed: a batch is under way"), Patch(color=READY, label="batch ready here, not agreed on"),
               Patch(color=REDUCED, label="batch under way")]
    figure.legend(handles=legend, loc="outside upper center", ncols=4, fontsize=7, frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


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
        draw(panels, sys.argv[1])


if __name__ == "__main__":
    main()
