#!/usr/bin/env python3
"""Compiles the code of CONTRIBUTING.md, "A new backend": its file pair, and ops/backends.cc with its two lines.

    python3 tests/docs_exercise.py [BUILD_FOLDER]     default: build; skipped (77) where that has no compile_commands.json

So the text stays true: a backend is one file pair and two lines.
"""
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def compiler(build):
    """Returns the compiler and the flags of a file of hvd_ops, without what belongs to that file alone."""
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if "/hvd_ops.dir/" not in entry["command"] or "/kernels/" in entry["file"]:
            continue
        words, kept = shlex.split(entry["command"]), []
        first = next(i for i, word in enumerate(words) if re.search(r"(\+\+|g\+\+-\d+|clang\+\+-\d+)$", word))
        pairs = iter(words[first + 1:])
        for word in pairs:
            if word in ("-o", "-c"):
                next(pairs)
            elif word == "-isystem":
                kept += [word, next(pairs)]
            elif not word.startswith(("-M", "-Winvalid-pch")):
                kept.append(word)
        return [words[first], *kept]
    return None


def main():
    build = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build")
    if not (build / "compile_commands.json").exists():
        print(f"SKIP: {build} has no compile_commands.json")
        return 77
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("## A new backend"):]
    section = section[: section.index("\n## ", 1)]
    *pair, lines = re.findall(r"^```cpp\n(.*?)^```", section, re.M | re.S)
    include, registration = lines.splitlines()
    backends = (ROOT / "ops/backends.cc").read_text()
    first = re.compile(r"  made\.all\.push_back\(\s*std::make_unique<ShmBackend>")
    if len(first.findall(backends)) != 1:
        print("ops/backends.cc: the place of the second line is not found")
        return 1
    changed = backends.replace('#include "ops/shm/', include + '\n#include "ops/shm/', 1)
    changed = first.sub(lambda found: registration + "\n" + found.group(), changed)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        files = {"ops/backends.cc": changed}
        for code in pair:
            files[re.match(r"// (\S+)\n", code)[1]] = code
        for name, code in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(code)
        for name in files:
            if name.endswith(".cc"):
                command = [*compiler(build), "-I", str(folder), "-fsyntax-only", str(folder / name)]
                if subprocess.run(command, check=False).returncode != 0:
                    print(f"{name}, as CONTRIBUTING.md has it, does not compile")
                    return 1
                print(f"{name} compiles")
    return 0


if __name__ == "__main__":
    sys.exit(main())
