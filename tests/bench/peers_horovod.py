#!/usr/bin/env python3
"""Times collectives of Horovod, for tests/bench/compare.sh.

    mpirun -np 4 python peers_horovod.py BYTES... [COLLECTIVE:BYTES...] [resnet18|resnet50|bert-base]

Of broadcast and allreduce the result overwrites the input; the others have no form but one with a new result. The same work and output as peers_gloo.py; a model is its gradients as a burst of allreduce_async_. Needs Horovod built for torch.
"""
import sys
import time

import horovod.torch as hvd
import torch

from peers_gloo import ROUNDS, gradients, repeats_for


def burst(tensors):
    handles = [hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"gradient.{i}") for i, tensor in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)


def collective(name, count_bytes):
    """Returns what does the operation once."""
    part = max(1, count_bytes // 4 // hvd.size())
    whole = torch.zeros(max(1, count_bytes // 4))
    parts = torch.zeros(part * hvd.size())
    called = f"{name}.{count_bytes}"
    if name == "allreduce":
        return lambda: hvd.allreduce_(whole, op=hvd.Sum, name=called)
    if name == "broadcast":
        return lambda: hvd.broadcast_(whole, 0, name=called)
    if name == "allgather":
        own = torch.zeros(part)
        return lambda: hvd.allgather(own, name=called)
    if name == "alltoall":
        return lambda: hvd.alltoall(parts, name=called)
    return lambda: hvd.reducescatter(parts, op=hvd.Sum, name=called)


def slowest_median(work, repeats):
    times = []
    for round_number in range(ROUNDS + 1):
        hvd.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        if round_number > 0:
            times.append((time.perf_counter() - start) / repeats)
    return hvd.allreduce(torch.tensor([sorted(times)[ROUNDS // 2]]), op=hvd.Max, name="slowest").item() * 1e6


def main():
    torch.set_num_threads(1)
    hvd.init()
    for work in sys.argv[1:]:
        if ":" in work:
            name, count_bytes = work.split(":")
            time_us = slowest_median(collective(name, int(count_bytes)), repeats_for(int(count_bytes)))
        elif work.isdigit():
            tensor = torch.zeros(int(work) // 4)
            time_us = slowest_median(lambda: hvd.allreduce_(tensor, op=hvd.Sum, name="single." + work), 20 if int(work) < 1 << 16 else 1)
        else:
            tensors = [torch.zeros(count) for count in gradients(work)]
            time_us = slowest_median(lambda: burst(tensors), 1)
        if hvd.rank() == 0:
            print(work, f"{time_us:.1f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
