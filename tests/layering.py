#!/usr/bin/env python3
"""The rules within a floor: which part may include which, and no circles, neither of headers nor of files with what they implement
(docs/architecture.md). tests/layering.cmake has the rules between the floors.

    python3 tests/layering.py ROOT             prints every include that breaks a rule, and fails if there is any
    python3 tests/layering.py --notices        checks that it finds what it must
"""
import pathlib
import re
import sys
import tempfile

# The parts of the floors: what a path begins with, and how high the part lies. A file belongs to the first part that fits. It may include
# files of its own part and of lower ones of its floor, but none that is as high or higher. Decimals tell the rooms of one folder apart: to
# other folders they are as high as the folder.
PARTS = [
    ("hvd/base/", 0),
    ("hvd/api/", 5),
    ("hvd/hvd.h", 4),  # the front door: only api/ and other floors go through it
    ("hvd/torch.h", 6),
    ("hvd/engine/core/", 3.0),
    ("hvd/engine/agreement/", 3.1),
    ("hvd/engine/fast_path/", 3.2),
    ("hvd/engine/progress/", 3.3),
    ("hvd/engine/peers/", 3.4),
    ("hvd/engine/leader/", 3.4),
    ("hvd/engine/health/", 3.5),
    ("hvd/engine/", 3.9),
    ("hvd/launch/", 2),
    ("hvd/timeline/", 2),
    ("hvd/negotiation/values/", 2.0),
    ("hvd/negotiation/table/", 2.1),
    ("hvd/negotiation/board/", 2.2),
    ("hvd/negotiation/leaders/", 2.3),
    ("hvd/negotiation/", 2.9),
    ("hvd/", 1),  # values and ports
    ("ops/kernels/", 1),
    ("ops/shm/memory/", 3.0),
    ("ops/shm/", 3.1),
    ("ops/rendezvous/", 4),
    ("ops/p2p/", 4),
    ("ops/mpi/", 5),
    ("ops/ucx/", 5),
    ("ops/gpu/kernels/", 1),
    ("ops/gpu/api/", 5),
    ("ops/gpu/nccl/", 6),
    ("ops/gpu/ipc/", 6),
    ("ops/gpu/staged/", 6),
    ("ops/host_ops.h", 2),
    ("ops/partition.h", 0),
    ("ops/", 7),  # what puts a world together
    ("torch_bindings/platform/", 0),
    ("torch_bindings/collectives/", 1),
    ("torch_bindings/files/", 2),
    ("torch_bindings/parameters/", 3),
    ("torch_bindings/gradients/", 4),
    ("torch_bindings/precision/", 5),
    ("torch_bindings/reducer/", 6),
    ("torch_bindings/sharding/", 7),
    ("torch_bindings/optimizer/", 8),
    ("torch_bindings/modules/", 9),
    ("torch_bindings/training/", 10),
    ("torch_bindings/replicas/", 11),
    ("torch_bindings/checkpoint/", 12),
    ("torch_bindings/", 13),  # the front door
]
FLOORS = ("hvd", "ops", "torch_bindings")


def part_of(path):
    """Returns (part, height) of a file."""
    return next((prefix, height) for prefix, height in PARTS if path.startswith(prefix))


def read_includes(root):
    """Returns {file: [file that it includes, of the three floors]}."""
    files = sorted(path.relative_to(root).as_posix() for floor in FLOORS for path in (root / floor).rglob("*")
                   if path.suffix in (".h", ".cc", ".cu"))
    known = set(files)
    include = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)
    return {file: [name for name in include.findall((root / file).read_text()) if name in known] for file in files}


def find_circle(includes):
    """Returns files that include each other in a circle, the first one again at the end; empty if there is none."""
    done = set()

    def visit(file, way):
        if file in way:
            return way[way.index(file):] + [file]
        if file in done:
            return []
        for included in includes[file]:
            if circle := visit(included, way + [file]):
                return circle
        done.add(file)
        return []

    return next((circle for file in includes if (circle := visit(file, []))), [])


def by_module(includes):
    """Returns the same of modules: x.h and x.cc are one, and what belongs to them alone (x_kernel.h, x_definition.h, x_layout.h) with them."""
    def module(file):
        return re.sub(r"(_kernel|_definition|_layout)?\.[a-z]+$", "", file)

    modules = {}
    for file, names in includes.items():
        modules.setdefault(module(file), []).extend(module(name) for name in names if module(name) != module(file))
    return modules


def violations(root):
    includes = read_includes(root)
    found = []
    for file, names in includes.items():
        part, height = part_of(file)
        for name in names:
            other, other_height = part_of(name)
            same_floor = file.split("/")[0] == name.split("/")[0]
            same_folder = file.split("/")[:2] == name.split("/")[:2]
            is_high = other_height >= height if same_folder else int(other_height) >= int(height)
            if same_floor and other != part and is_high:
                where = "lies higher" if other_height > height else "lies beside it"
                found.append(f"{file}: includes {name}, which {where}: {part} (height {height}) must not know {other} ({other_height})")
    if circle := find_circle(includes):
        found.append(f"{circle[0]}: includes itself in a circle: {' -> '.join(circle)}")
    elif circle := find_circle(by_module(includes)):
        found.append(f"{circle[0]}.*: needs itself in a circle: {' -> '.join(circle)}")
    return found


def notices():
    """Plants one violation at a time, and lawful includes that look alike."""
    cases = [
        (True, {"hvd/base/a.h": "hvd/types.h", "hvd/types.h": ""}),
        (True, {"hvd/base/a.cc": "hvd/negotiation/b.h", "hvd/negotiation/b.h": ""}),
        (True, {"hvd/config.h": "hvd/timeline/b.h", "hvd/timeline/b.h": ""}),
        (True, {"hvd/timeline/a.cc": "hvd/negotiation/values/b.h", "hvd/negotiation/values/b.h": ""}),
        (True, {"hvd/negotiation/leaders/a.cc": "hvd/timeline/b.h", "hvd/timeline/b.h": ""}),
        (True, {"hvd/negotiation/values/a.cc": "hvd/negotiation/board/b.h", "hvd/negotiation/board/b.h": ""}),
        (True, {"hvd/engine/progress/a.h": "hvd/engine/health/b.h", "hvd/engine/health/b.h": ""}),
        (False, {"hvd/engine/health/a.h": "hvd/engine/progress/b.h", "hvd/engine/progress/b.h": ""}),
        (True, {"hvd/negotiation/a.cc": "hvd/timeline/b.h", "hvd/timeline/b.h": ""}),
        (True, {"hvd/negotiation/a.h": "hvd/engine/b.h", "hvd/engine/b.h": ""}),
        (True, {"hvd/engine/a.cc": "hvd/api/b.h", "hvd/api/b.h": ""}),
        (True, {"hvd/engine/a.cc": "hvd/hvd.h", "hvd/hvd.h": ""}),
        (True, {"hvd/types.h": "hvd/hvd.h", "hvd/hvd.h": ""}),
        (True, {"ops/kernels/a.cc": "ops/shm/b.h", "ops/shm/b.h": ""}),
        (True, {"ops/shm/a.cc": "ops/mpi/b.h", "ops/mpi/b.h": ""}),
        (True, {"ops/gpu/kernels/a.cu": "ops/gpu/api/b.h", "ops/gpu/api/b.h": ""}),
        (True, {"ops/gpu/nccl/a.cc": "ops/gpu/ipc/b.h", "ops/gpu/ipc/b.h": ""}),
        (True, {"ops/gpu/api/a.cc": "ops/gpu/staged/b.h", "ops/gpu/staged/b.h": ""}),
        (True, {"ops/mpi/a.cc": "ops/init.h", "ops/init.h": ""}),
        (True, {"hvd/a.h": "hvd/b.h", "hvd/b.h": "hvd/c.h", "hvd/c.h": "hvd/a.h"}),
        (True, {"torch_bindings/a.h": "torch_bindings/b.h", "torch_bindings/b.h": "torch_bindings/a.h"}),
        (True, {"torch_bindings/gradients/a.h": "torch_bindings/optimizer/b.h", "torch_bindings/optimizer/b.h": ""}),
        (False, {"torch_bindings/optimizer/a.h": "torch_bindings/gradients/b.h", "torch_bindings/gradients/b.h": ""}),
        (True, {"ops/mpi/a.h": "", "ops/mpi/a.cc": "ops/mpi/b.h", "ops/mpi/b.h": "", "ops/mpi/b.cc": "ops/mpi/a.h"}),
        (True, {"hvd/engine/a.cc": "hvd/engine/b.h", "hvd/engine/b.h": "hvd/engine/c.h", "hvd/engine/c.h": "", "hvd/engine/c.cc":
                "hvd/engine/a.h", "hvd/engine/a.h": ""}),
        (False, {"ops/kernels/a.h": "", "ops/kernels/a.cc": "ops/kernels/a_kernel.h", "ops/kernels/a_kernel.h": "ops/kernels/a.h"}),
        (False, {"hvd/base/a.h": "", "hvd/base/a.cc": "hvd/base/b.h", "hvd/base/b.h": "", "hvd/base/b.cc": "hvd/base/b.h"}),
        (False, {"hvd/base/a.h": "hvd/base/b.h", "hvd/base/b.h": ""}),
        (False, {"hvd/engine/a.cc": "hvd/timeline/b.h", "hvd/timeline/b.h": ""}),
        (False, {"hvd/api/a.cc": "hvd/hvd.h", "hvd/hvd.h": "hvd/types.h", "hvd/types.h": ""}),
        (False, {"hvd/hvd.h": "hvd/types.h", "hvd/types.h": "", "hvd/api/a.h": "", "ops/shm/a.h": "hvd/types.h"}),
        (False, {"hvd/torch.h": "torch_bindings/optimizer/a.h", "torch_bindings/optimizer/a.h": "hvd/hvd.h", "hvd/hvd.h": ""}),
        (False, {"ops/init.cc": "ops/gpu/nccl/b.h", "ops/gpu/nccl/b.h": "ops/gpu/api/c.h", "ops/gpu/api/c.h": ""}),
        (False, {"torch_bindings/a.cc": "torch_bindings/a.h", "torch_bindings/a.h": ""}),
    ]
    for refused, files in cases:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, included in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(f'#pragma once\n// #include "hvd/api/none.h"\n#include "{included}"\n')
            found = violations(root)
        if bool(found) != refused:
            sys.exit(f"{'not noticed' if refused else 'wrongly refused'}: {files}\n" + "\n".join(found))
    print(f"{len(cases)} cases")


if sys.argv[1:] == ["--notices"]:
    notices()
else:
    broken = violations(pathlib.Path(sys.argv[1]))
    print("\n".join(broken))
    sys.exit(f"{len(broken)} violations of the rules within a floor" if broken else 0)
