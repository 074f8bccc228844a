"""What is fast enough on a GPU, from the JSON that the benchmarks write; exit code 1 if something is not.

  gpu_limits.py shared ALONE.json TOGETHER.json PERCENT   hvd_bench with --versus memcpy by one rank alone, and by ranks that share the GPU:
                                                          the largest allreduce in place, in memory that hvd lends, at PERCENT of the copy
                                                          rate at least. Bytes read and written by all ranks, against those of a copy.
  gpu_limits.py step RECORD.json RATIO                    step_bench: a step with hvd in RATIO times a plain one at most
"""

import json
import sys


def largest(record, **wanted):
    rows = [row for row in record["rows"] if all(row[key] == value for key, value in wanted.items())]
    if not rows:
        sys.exit(f"FAILED: no row with {wanted}")
    return max(rows, key=lambda row: row["bytes"])


def shared(alone, together, percent):
    copy = largest(alone)["memcpy"]["time_us"]
    row = largest(together, memory="arena", in_place=True)
    if largest(alone)["bytes"] != row["bytes"]:
        sys.exit("FAILED: the two records end at different sizes")
    rate = 100 * together["ranks"] * copy / row["time_us"]  # each rank's bytes are read once and written once, as a copy's are
    size = f"{row['bytes'] >> 20} MiB"
    print(f"{together['ranks']} ranks, {size} in place: {row['time_us']:.0f} us, {rate:.1f} % of copy; wanted: {percent}")
    return rate >= percent


def step(record, ratio):
    rows = [row for row in record["rows"] if row["subject"].startswith("hvd")]
    for row in rows:
        print(f"{row['subject']}: {row['ratio']:.4f} of a plain step; wanted: at most {ratio}")
    return bool(rows) and all(row["ratio"] <= ratio for row in rows)


def main(what, *arguments):
    *files, limit = arguments
    records = [json.load(open(file)) for file in files]
    sys.exit(0 if {"shared": shared, "step": step}[what](*records, float(limit)) else 1)


if len(sys.argv) < 4 or sys.argv[1] not in ("shared", "step"):
    sys.exit(__doc__)
main(*sys.argv[1:])
