#!/usr/bin/env python3
"""Times collectives of torch.distributed with gloo, for tests/bench/compare.sh.

    mpirun -np 4 python peers_gloo.py BYTES... [COLLECTIVE:BYTES...] [resnet18|resnet50|bert-base]

Sum of float32; bytes alone are an allreduce's; results go into memory that exists, and the bytes are those of the larger side; a model is its gradients in buckets of 25 MiB, as DistributedDataParallel has them. Rank 0 prints one line for each: its
name and the median of the slowest rank in microseconds, or nothing for what this gloo does not have. Needs torch.
"""
import os
import sys
import time

import torch
import torch.distributed as dist

BUCKET_BYTES = 25 << 20
ROUNDS = 7


def gradients(name):
    """Sizes of a model's gradients in backward order."""
    if name == "bert-base":
        return bert_gradients()
    blocks = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}[name]
    bottleneck = name == "resnet50"
    counts, width_in = [64 * 3 * 49, 64, 64], 64
    for stage, number in enumerate(blocks):
        width = 64 << stage
        width_out = 4 * width if bottleneck else width
        for block in range(number):
            if bottleneck:
                convolutions = [(width_in * width, width), (width * width * 9, width), (width * width_out, width_out)]
            else:
                convolutions = [(width_in * width * 9, width), (width * width * 9, width)]
            if block == 0 and (bottleneck or stage > 0):
                convolutions.append((width_in * width_out, width_out))
            for weights, features in convolutions:
                counts += [weights, features, features]
            width_in = width_out
    return (counts + [1000 * width_in, 1000])[::-1]


def bert_gradients(layers=12, width=768):
    linear = [width * width, width]
    counts = [30522 * width, 512 * width, 2 * width, width, width]
    for _ in range(layers):
        counts += 4 * linear + [width, width, 4 * width * width, 4 * width, 4 * width * width, width, width, width]
    return (counts + linear)[::-1]


def buckets(tensors):
    groups, size = [[]], 0
    for tensor in tensors:
        if size >= BUCKET_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.numel() * tensor.element_size()
    return groups


def burst(groups):
    flats = [torch.cat(group) for group in groups]
    works = [dist.all_reduce(flat, async_op=True) for flat in flats]
    for work, flat, group in zip(works, flats, groups):
        work.wait()
        for tensor, part in zip(group, flat.split([t.numel() for t in group])):
            tensor.copy_(part)


def repeats_for(count_bytes):
    """As hvd_bench --sweep has it."""
    if count_bytes < 64 << 10:
        return 200
    if count_bytes < 1 << 20:
        return 20
    return 3 if count_bytes < 16 << 20 else 1


def collective(name, count_bytes, size):
    """Returns what does the operation once."""
    part = max(1, count_bytes // 4 // size)
    if name == "allreduce":
        whole = torch.zeros(max(1, count_bytes // 4))
        return lambda: dist.all_reduce(whole)
    if name == "broadcast":
        whole = torch.zeros(max(1, count_bytes // 4))
        return lambda: dist.broadcast(whole, 0)
    whole, own = torch.zeros(part * size), torch.zeros(part)
    if name == "allgather":
        return lambda: dist.all_gather_into_tensor(whole, own)
    if name == "alltoall":
        received = torch.zeros(part * size)
        return lambda: dist.all_to_all_single(received, whole)
    return lambda: dist.reduce_scatter_tensor(own, whole)


def is_there(work):
    """Runs it once. A gloo that lacks an operation says so on all ranks, before anything is sent."""
    try:
        work()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        print(f"peers_gloo.py: not measured: {error}", file=sys.stderr)
        return False
    return True


def slowest_median(work, repeats):
    times = []
    for round_number in range(ROUNDS + 1):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        if round_number > 0:
            times.append((time.perf_counter() - start) / repeats)
    value = torch.tensor([sorted(times)[ROUNDS // 2]])
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item() * 1e6


def main():
    torch.set_num_threads(1)
    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])  # for a gloo with a way through shared memory
    address = "tcp://127.0.0.1:" + os.environ.get("HVD_COMPARE_PORT", "29517")
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    for work in sys.argv[1:]:
        if ":" in work:
            name, count_bytes = work.split(":")
            operation = collective(name, int(count_bytes), size)
            if not is_there(operation):
                continue
            time_us = slowest_median(operation, repeats_for(int(count_bytes)))
        elif work.isdigit():
            tensor = torch.zeros(int(work) // 4)
            time_us = slowest_median(lambda: dist.all_reduce(tensor), 20 if int(work) < 1 << 16 else 1)
        else:
            groups = buckets([torch.zeros(count) for count in gradients(work)])
            time_us = slowest_median(lambda: burst(groups), 1)
        if rank == 0:
            print(work, f"{time_us:.1f}", flush=True)
    dist.barrier()
    os._exit(0) if size == 1 else dist.destroy_process_group()


if __name__ == "__main__":
    main()
