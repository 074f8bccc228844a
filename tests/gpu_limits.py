"""What is fast enough on a GPU, from the JSON that the benchmarks write, of one run or of several, whose median counts; exit code 1 if something
is not.

  gpu_limits.py shared ALONE.json TOGETHER.json... PERCENT   hvd_bench with --versus memcpy by one rank alone, and by ranks that share the GPU, a
                                                             pair for each run: the largest allreduce in place, in memory that hvd lends, at
                                                             PERCENT of the copy rate at least. Bytes read and written by all ranks, against
                                                             those of a copy.
  gpu_limits.py step RECORD.json... RATIO                    step_bench: a step with hvd in RATIO times a plain one at most
"""

import json
import statistics
import sys


def largest(record, **wanted):
    rows = [row for row in record["rows"] if all(row[key] == value for key, value in wanted.items())]
    if not rows:
        sys.exit(f"FAILED: no row with {wanted}")
    return max(rows, key=lambda row: row["bytes"])


def shared_rate(alone, together):
    copy = largest(alone)["memcpy"]["time_us"]
    row = largest(together, memory="arena", in_place=True)
    if largest(alone)["bytes"] != row["bytes"]:
        sys.exit("FAILED: the two records end at different sizes")
    rate = 100 * together["ranks"] * copy / row["time_us"]  # each rank's bytes are read once and written once, as a copy's are
    print(f"{together['ranks']} ranks, {row['bytes'] >> 20} MiB in place: {row['time_us']:.0f} us, {rate:.1f} % of copy")
    return rate


def shared(records, percent):
    if len(records) % 2:
        sys.exit("FAILED: a run by one rank alone for each by several is needed")
    rate = statistics.median(shared_rate(*pair) for pair in zip(records[::2], records[1::2]))
    print(f"median of {len(records) // 2}: {rate:.1f} % of copy; wanted: {percent}")
    return rate >= percent


def step(records, ratio):
    ratios = {}
    for record in records:
        for row in record["rows"]:
            if row["subject"].startswith("hvd"):
                ratios.setdefault(row["subject"], []).append(row["ratio"])
    for subject, found in ratios.items():
        print(f"{subject}: {statistics.median(found):.4f} of a plain step, the median of {len(found)}; wanted: at most {ratio}")
    return bool(ratios) and all(statistics.median(found) <= ratio for found in ratios.values())


def main(what, *arguments):
    *files, limit = arguments
    records = [json.load(open(file)) for file in files]
    sys.exit(0 if {"shared": shared, "step": step}[what](records, float(limit)) else 1)


if len(sys.argv) < 4 or sys.argv[1] not in ("shared", "step"):
    sys.exit(__doc__)
main(*sys.argv[1:])
