#!/usr/bin/env python3
"""Reads what nvcc makes of the kernels, for each architecture of the build: nothing flushes denormals, no sum is fused with a product, and
floats are read and written 16 bytes at a time. (That nothing spills or has a stack frame is an error of the build.)

    python3 tests/gpu/device_code.py BUILD_FOLDER              prints each error; fails if there is any
    python3 tests/gpu/device_code.py BUILD_FOLDER --notices    compiles as it must not be, and fails unless that is found

The commands are those of the build's compile_commands.json. What comes after PTX, ptxas', is not read.
"""
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

WIDE = re.compile(r"kernelI(6__half|13__nv_bfloat16|[fd]).*FoldFloats|copy_kernelI.*5Plain|copy_kernelI(6__halfS|13__nv_bfloat16S|ff|dd)")


def compiled(entry, architecture, extra):
    """Returns the PTX of a file of the build."""
    words = shlex.split(entry["command"])
    kept = []
    skipped = False
    for word in words:
        if skipped or word == "-c" or word.startswith("--generate-code"):
            skipped = False
        elif word in ("-o", "-MF", "-MT"):
            skipped = True
        elif word != "-MD":
            kept.append(word)
    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        subprocess.run([*kept, *extra, f"-arch={architecture}", "-ptx", "-o", file.name], cwd=entry["directory"], check=True)
        return pathlib.Path(file.name).read_text()


def kernels_in(ptx):
    """Returns [(name, code)]."""
    return [(re.match(r"\w+", kernel).group(), kernel) for kernel in re.split(r"\.entry\s+", ptx)[1:]]


def errors_in(kernels):
    """Returns [(kernel, what is wrong with it)]."""
    found = []
    for name, code in kernels:
        found += [(name, wrong) for wrong in sorted(set(re.findall(r"\b\w+(?:\.\w+)*\.ftz\b|\bfma\.\w+", code)))]
        if WIDE.search(name):
            found += [(name, f"no {access}") for access in (r"ld\.global\.cs\.v4", r"st\.global(?:\.wb)?\.v4") if not re.search(access, code)]
    return found


def planted(entry, architecture):
    """Returns whether each kind of error is found in what is compiled as it must not be."""
    ptx = compiled(entry, architecture, ["--fmad=true", "--ftz=true"]).replace(".v4", ".v2")
    wrong = {what for _, what in errors_in(kernels_in(ptx))}
    print(f"compiled as it must not be: {len(wrong)} kinds of errors")
    return all(any(kind in what for what in wrong) for kind in ("fma.", ".ftz", "no ld", "no st"))


def main():
    commands = json.loads((pathlib.Path(sys.argv[1]) / "compile_commands.json").read_text())
    entries = {pathlib.Path(entry["file"]).name: entry for entry in commands
               if "/ops/gpu/kernels/" in entry["file"] and entry["file"].endswith(".cu")}
    architectures = sorted(set(re.findall(r"arch=(compute_\d+\w?)", entries["shared_reduce.cu"]["command"])))
    if "--notices" in sys.argv:
        return 0 if planted(entries["shared_reduce.cu"], architectures[0]) else 1
    count, wide, errors = 0, 0, 0
    for name, entry in entries.items():
        for architecture in architectures:
            kernels = kernels_in(compiled(entry, architecture, []))
            count += len(kernels)
            wide += sum(1 for kernel, _ in kernels if WIDE.search(kernel))
            for kernel, what in errors_in(kernels):
                print(f"{name}, {architecture}: {kernel}: {what}")
                errors += 1
    print(f"{count} kernels, {wide} of them with 16 bytes at a time, {errors} errors")
    return 1 if errors or not wide else 0


sys.exit(main())
