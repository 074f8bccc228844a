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


def errors_in(ptx):
    """Yields (kernel, what is wrong with it); counts the kernels that access 16 bytes at a time."""
    for kernel in re.split(r"\.entry\s+", ptx)[1:]:
        name = re.match(r"\w+", kernel).group()
        for wrong in sorted(set(re.findall(r"\b\w+(?:\.\w+)*\.ftz\b|\bfma\.\w+", kernel))):
            yield name, wrong
        if WIDE.search(name):
            for access in (r"ld\.global\.cs\.v4", r"st\.global(?:\.wb)?\.v4"):
                if not re.search(access, kernel):
                    yield name, f"no {access}"


def main():
    folder = pathlib.Path(sys.argv[1])
    entries = [entry for entry in json.loads((folder / "compile_commands.json").read_text()) if entry["file"].endswith(".cu")
               and "/ops/gpu/kernels/" in entry["file"]]
    found, kernels, wide = 0, 0, 0
    for entry in entries:
        name = pathlib.Path(entry["file"]).name
        architectures = sorted(set(re.findall(r"arch=(compute_\d+\w?)", entry["command"])))
        if "--notices" in sys.argv:
            if "--fmad=false" in entry["command"]:
                wrong = {what for _, what in errors_in(compiled(entry, architectures[0], ["--fmad=true", "--ftz=true"]).replace(".v4", ".v2"))}
                print(f"{name}, compiled as it must not be: {len(wrong)} kinds of errors")
                found += any(what.startswith("fma.") for what in wrong) and any(".ftz" in what for what in wrong)
                found += any(what.startswith("no ") for what in wrong)
            continue
        for architecture in architectures:
            ptx = compiled(entry, architecture, [])
            kernels += len(re.findall(r"\.entry\s", ptx))
            wide += len([1 for kernel in re.findall(r"\.entry\s+(\w+)", ptx) if WIDE.search(kernel)])
            for kernel, what in errors_in(ptx):
                print(f"{name}, {architecture}: {kernel}: {what}")
                found += 1
    if "--notices" in sys.argv:
        return 0 if found == 2 else 1
    print(f"{kernels} kernels, {wide} of them with 16 bytes at a time, {found} errors")
    return 1 if found or not wide else 0


sys.exit(main())
