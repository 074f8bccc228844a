#!/usr/bin/env python3
"""Holds the documents to what is there: links, anchors, paths, commands, options, knobs. Prints each error; fails if there is any.

    python3 tests/docs_check.py [BUILD_FOLDER]                  checks README, CONTRIBUTING, CHANGELOG, docs/*.md, docs/notes, docs/zh
    python3 tests/docs_check.py --notices [BUILD_FOLDER]        plants an error of each kind, and fails unless each is found

Checked are: relative links and their anchors; paths in backquotes; commands of the project in code blocks and backquotes, whose scripts,
programs, presets, targets and options must exist; names HVD_* and HOROVOD_*, which something must read; that every knob of
hvd/config.cc and every field of hvd::Config stands in docs/configuration.md; that the API reference has all public headers; that pictures
are small, and drawn of the figures beside them; and files of the project that comments speak of. Options are those of a program's --help where BUILD_FOLDER (default: build) has it, otherwise those that
its sources spell.
"""
import argparse
import fnmatch
import functools
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md"]
FLOORS = ("hvd", "ops", "torch_bindings", "tests", "examples", "tools", "docs", "cmake")
SUFFIXES = ("h", "cc", "cu", "sh", "py", "md", "cmake", "svg", "tsv", "sbatch", "txt")
# Programs of the project, and the sources that spell their options.
PROGRAMS = {
    "train": ("examples/train/trainer/options.cc",),
    "hvd_bench": ("tools/hvd_bench/options.cc",),
    "step_bench": ("tests/bench/step/options.cc", "tests/bench/step/main.cc"),
    "compression_table": ("tests/bench/compression_table.cc",),
    "hvdrun": ("tools/hvdrun/options.cc",),
    "hvd_scale_sim": ("tests/scale/options.cc",),
    "wrap_existing": (),
    "unit_tests": (),
    "torch_tests": (),
    "mpi_tests": (),
    "contract_tests": ("tests/contract/main.cc",),
}
DOCTEST = {"--source-file", "--test-case", "--test-case-exclude", "--list-test-cases"}
PASSED_ON = {"examples/train.sh": "train", "examples/train.sbatch": "train"}
LAUNCHERS = {"mpirun": {"-np", "-n", "-H", "-x", "--hostfile"}, "srun": {"-n", "-N"}, "sbatch": set(), "timeout": set(), "env": set(), "sudo": set()}
CTEST = {"-R", "-L", "-E", "-N", "-j", "--test-dir", "--output-on-failure", "--preset"}
FOREIGN_HEADERS = {"mpi.h", "nccl.h", "cuda.h", "cuda_runtime.h"}
PLACEHOLDERS = {"HVD_X", "HOROVOD_X"}
# What draws the pictures whose figures lie beside them, and how many lines all pictures may have.
DRAWN = {"allreduce": "tests/bench/plot.py FIGURES PICTURE", "strategies": "tests/bench/plot.py FIGURES PICTURE",
         "sweep": "tests/bench/heatmap.py PICTURE FIGURES"}
PICTURE_LINES = 400


@functools.lru_cache(maxsize=None)
def read(path):
    return (ROOT / path).read_text(errors="replace")


@functools.lru_cache(maxsize=None)
def files():
    """Returns the project's own files: what git knows or would take in, or all of the floors' where there is no git."""
    names = []
    if shutil.which("git"):
        listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True)
        names = listed.stdout.split("\n") if listed.returncode == 0 and listed.stdout else []
    if not names:
        names = [str(p.relative_to(ROOT)) for f in FLOORS for p in (ROOT / f).rglob("*")] + [p.name for p in ROOT.iterdir()]
    return frozenset(n for n in names if n and (ROOT / n).is_file())


@functools.lru_cache(maxsize=None)
def cmake_words():
    return "\n".join(read(f) for f in files() if f.endswith(("CMakeLists.txt", ".cmake", "CMakePresets.json")))


@functools.lru_cache(maxsize=None)
def known_variables():
    """Returns the names that something in the project reads or sets, HOROVOD_* of the knobs included."""
    names = set()
    for file in files():
        if file.endswith(".md") or file == "tests/docs_check.py":
            continue
        names |= set(re.findall(r"\b(?:HVD|HOROVOD)_[A-Z][A-Z0-9_]*", read(file)))
    for knob in knobs():
        names |= {"HVD_" + knob, "HOROVOD_" + knob}
    return names


def knobs():
    text = read("hvd/config.cc")
    named = dict(re.findall(r'string_view (k\w+) = "([A-Z_]+)";', text))
    return re.findall(r'variable\("([A-Z_]+)"\)', text) + [named.get(k, k) for k in re.findall(r'\bnumber\("?(\w+)"?, "', text)]


@functools.lru_cache(maxsize=None)
def options_of(program, build):
    """Returns the options of a program, from its --help or from its sources."""
    if program.endswith("_tests"):
        return DOCTEST | options_in("".join(read(s) for s in PROGRAMS[program]))
    for folder in ("examples", "tools", "tests"):
        binary = build / folder / program
        if binary.exists() and PROGRAMS[program]:
            said = subprocess.run([binary, "--help"], capture_output=True, text=True, timeout=60)
            if said.returncode == 0:
                return options_in(said.stdout)
    return options_in("".join(read(s) for s in PROGRAMS[program])) | {"--help"}


def options_in(text):
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][a-z0-9-]*", text))


def slug(heading):
    """Returns the anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(text):
    return {slug(h) for h in re.findall(r"^#{1,6} +(.*)$", without_code(text), re.M)}


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def exists(path):
    """Whether a file or folder of the project is called so; * and <NAME> stand for anything but a slash."""
    pattern = re.sub(r"<[^>]*>", "*", path.rstrip("/"))
    if "*" not in pattern:
        return pattern in files() or any(f.startswith(pattern + "/") for f in files())
    shape = re.compile("[^/]*".join(re.escape(part) for part in pattern.split("*")) + r"(/.*)?$")
    return any(shape.match(f) for f in files())


def check_links(name, text):
    own = pathlib.PurePosixPath(name).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "``", without_code(text))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        resolved = pathlib.Path(*(own / path).parts) if path else pathlib.Path(name)
        place = (ROOT / resolved).resolve()
        if not place.is_relative_to(ROOT):
            yield f"the link {target} leads out of the project"
        elif path and not place.exists():
            yield f"the link {target} leads nowhere"
        elif anchor and anchor not in anchors(text if not path else place.read_text()):
            yield f"the link {target}: there is no such heading"


def spans(text):
    """Returns what stands in backquotes outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", without_code(text))


def check_paths(text):
    names = {pathlib.PurePosixPath(f).name for f in files()}
    for span in spans(text):
        for word in span.split():
            word = re.sub(r"^<(.*)>$", r"\1", word.strip("\"',;:()"))
            if re.fullmatch(r"(?:%s)(?:/[\w.*<>-]+)+/?" % "|".join(FLOORS), word):
                if not exists(word):
                    yield f"`{word}`: there is no such file"
            elif re.fullmatch(r"[\w-]+\.(?:%s)" % "|".join(SUFFIXES), word) and word not in names:
                yield f"`{word}`: no file of the project is called so"


def commands(text):
    """Returns the lines of code blocks that may be commands, and what stands in backquotes."""
    lines = []
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        if kind in ("", "bash", "sh", "console"):
            lines += block.split("\n")
    lines += [line for line in without_code(text).split("\n") if line.startswith("    ")]
    for line in lines + spans(text):
        for part in re.split(r"&&|\|\||;|\|", re.sub(r"\s#.*$", "", line)):
            if part.strip():
                yield part.strip()


def check_command(command, build):
    try:
        words = shlex.split(command)
    except ValueError:
        return
    while words and (re.match(r"[A-Z_]+=", words[0]) or words[0] in LAUNCHERS):
        launcher = words.pop(0)
        while launcher in LAUNCHERS and words and words[0].startswith("-"):
            option = words.pop(0)
            if option in LAUNCHERS[launcher] and words:
                words.pop(0)
    if not words:
        return
    yield from check_selection(command, build)
    if words[0] in ("bash", "sh", "source", ".", "python3", "sbatch") and len(words) > 1:
        words.pop(0)
    program, rest = words[0], words[1:]
    given = [w.split("=")[0] for w in rest if re.match(r"--?[A-Za-z]", w)]
    if program == "cmake":
        yield from check_cmake(rest)
    elif program == "ctest":
        yield from (f"`{command}`: ctest has no {o} here" for o in given if o not in CTEST)
    elif re.match(r"(?:%s)/\S+\.(sh|py|sbatch)$" % "|".join(FLOORS), program):
        yield from check_script(program, given, command, build)
    else:
        name = re.sub(r"^build[\w-]*/(examples|tools|tests)/", "", program)
        if name in PROGRAMS:
            known = options_of(name, build)
            yield from (f"`{command}`: {name} has no option {o}" for o in given if o not in known)
        elif name != program and name not in cmake_words() and not any(f.endswith(f"/{name}.cc") for f in files()):
            yield f"`{command}`: there is no program {name}"


def check_selection(command, build):
    """Tests that are chosen by name or by file are there; names only where BUILD_FOLDER has ctest's list."""
    listed = build / "tests" / "CTestTestfile.cmake"
    for name in re.findall(r" -R (\S+)", command):
        name = name.strip("'")
        wanted = re.escape(name.removesuffix("$")) + (r"\]" if name.endswith("$") else "")
        if listed.exists() and not re.search(rf"add_test\(\S*{wanted}", listed.read_text()):
            yield f"`{command}`: no test is called {name}"
    for pattern in re.findall(r"--source-file='?([^'\s]+)", command):
        if not any(fnmatch.fnmatch(f"/{f}", pattern) for f in files()):
            yield f"`{command}`: no test file is called {pattern}"


def check_script(script, given, command, build):
    if re.search("[<*]", script):
        return  # a path that stands for several
    if script not in files():
        yield f"`{command}`: there is no {script}"
        return
    known = options_in(read(script)) | (CTEST if script == "tests/run.sh" else set())
    if script in PASSED_ON:
        known |= options_of(PASSED_ON[script], build)
    yield from (f"`{command}`: {script} has no option {o}" for o in given if o not in known)


def check_cmake(rest):
    for option, value in zip(rest, rest[1:]):
        if option == "--preset" and f'"name": "{value}"' not in read("CMakePresets.json"):
            yield f"cmake has no preset {value}"
        if option == "--target" and not re.search(rf"\b{re.escape(value)}\b", cmake_words()):
            yield f"cmake has no target {value}"
        if option == "-P" and value not in files():
            yield f"there is no {value}"


def check_options(text, build):
    known = set(CTEST)
    for program in PROGRAMS:
        known |= options_of(program, build)
    for file in files():
        if file.endswith((".sh", ".py", ".sbatch")) and file != "tests/docs_check.py":
            known |= options_in(read(file))
    for span in spans(text):
        option = re.match(r"(--[a-z][a-z0-9-]*)", span)
        if option and option[1] not in known:
            yield f"`{span}`: nothing in the project has the option {option[1]}"


def check_variables(text):
    for name in sorted(set(re.findall(r"\b(?:HVD|HOROVOD)_[A-Z][A-Z0-9_]*", text)) - PLACEHOLDERS):
        if name not in known_variables() and not name.endswith("_"):
            yield f"{name}: nothing in the project reads it"


def check_document(name, text, build):
    yield from check_links(name, text)
    yield from check_paths(text)
    for command in commands(text):
        yield from check_command(command, build)
    yield from check_options(text, build)
    yield from check_variables(text)


def check_configuration(text):
    """Every knob has a row with its variable and its field, and every field of hvd::Config is one of them."""
    rows = dict(re.findall(r"^\| `HVD_(\w+)` \| `(\w+)` \|", text, re.M))
    config = re.search(r"struct Config \{(.*?)\n\};", read("hvd/config.h"), re.S)[1]
    fields = set(re.findall(r"^  [\w:<>, ]+ (\w+)(?: = [^;]*|\{[^}]*\})?;", config, re.M))
    for knob in knobs():
        if knob not in rows:
            yield f"HVD_{knob} has no row in the table of knobs"
    for knob, field in rows.items():
        if knob not in knobs():
            yield f"HVD_{knob} is no knob of hvd/config.cc"
        if field not in fields:
            yield f"`{field}` is no field of hvd::Config"
    for field in sorted(fields - set(rows.values())):
        if f"Config::{field}" not in text:
            yield f"the field {field} of hvd::Config is not there"


def check_reference(doxyfile):
    """The API reference has all public headers: those directly in hvd/, and what <hvd/torch.h> includes of torch_bindings/."""
    included = re.findall(r'#include "torch_bindings/\w+/(\w+\.h)"', read("hvd/torch.h"))
    public = included + [f[len("hvd/"):] for f in files() if re.fullmatch(r"hvd/\w+\.h", f)]
    yield from (f"{header} is public, and not among its headers" for header in sorted(public) if not re.search(rf"\b{header}\b", doxyfile))


def check_pictures(pictures):
    """`pictures`: text by path."""
    lines = sum(text.count("\n") for text in pictures.values())
    if lines > PICTURE_LINES:
        yield f"the pictures have {lines} lines together, more than {PICTURE_LINES}"
    for figures in sorted(f for f in files() if re.fullmatch(r"docs/\w+\.tsv", f)):
        name = pathlib.PurePosixPath(figures).stem
        with tempfile.TemporaryDirectory() as folder:
            made = pathlib.Path(folder) / "made.svg"
            words = DRAWN[name].replace("FIGURES", str(ROOT / figures)).replace("PICTURE", str(made)).split()
            subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
            if pictures.get(f"docs/{name}.svg") != made.read_text():
                yield f"docs/{name}.svg is not what {DRAWN[name].split()[0]} draws of {figures}"


def check_source(text):
    """Files of the project that comments speak of: by a path from its root, or by their bare names."""
    names = {pathlib.PurePosixPath(f).name for f in files()} | FOREIGN_HEADERS
    endings = r"\.(?:h|cc|cu|sh|py|md|cmake|sbatch)\b"
    for line in text.split("\n"):
        comment = re.search(r"(?:^|\s)(?://+|#)\s.*$", line)
        said = comment[0] if comment else ""
        for path in re.findall(r"(?<![\w./$}-])(?:%s)/[\w/.-]+%s" % ("|".join(FLOORS), endings), said):
            if path not in files():
                yield f"a comment speaks of {path}, which is not there"
        for bare in re.findall(rf"(?<![\w./<>*$}}-])[a-z]\w*{endings}", said):
            if bare not in names:
                yield f"a comment speaks of {bare}, which is not there"


def pictures():
    return {f: read(f) for f in files() if f.endswith(".svg")}


def problems(build):
    documents = DOCUMENTS + sorted(f for f in files() if re.fullmatch(r"docs/(?:(?:zh|notes)/)?[\w-]+\.md", f))
    for name in documents:
        for problem in check_document(name, read(name), build):
            yield f"{name}: {problem}"
    for problem in check_configuration(read("docs/configuration.md")):
        yield f"docs/configuration.md: {problem}"
    for problem in check_reference(read("docs/Doxyfile")):
        yield f"docs/Doxyfile: {problem}"
    yield from check_pictures(pictures())
    for name in sorted(files()):
        if name.endswith((".h", ".cc", ".cu", ".sh", ".cmake", "CMakeLists.txt", ".sbatch")) and not name.startswith("tests/layering"):
            for problem in check_source(read(name)):
                yield f"{name}: {problem}"


# ---- What must be found, and what must not.
WRONG = [
    ("[a](nowhere.md)", "leads nowhere"),
    ("![a](nowhere.svg)", "leads nowhere"),
    ("[a](../../elsewhere/a.md)", "leads out"),
    ("[a](semantics.md#no-such-heading)", "no such heading"),
    ("[a](#nothing)", "no such heading"),
    ("`hvd/none.h`", "no such file"),
    ("`tests/hvd/none_*_test.cc`", "no such file"),
    ("`none_such.cc`", "no file of the project"),
    ("    bash examples/none.sh", "there is no examples/none.sh"),
    ("    bash tests/run.sh --none", "has no option --none"),
    ("    HVD_NP=2 bash examples/train.sh --epoch 3", "has no option --epoch"),
    ("```bash\nmpirun -np 4 build/tools/hvd_bench --models resnet50\n```", "hvd_bench has no option --models"),
    ("`mpirun -np 4 build/tests/step_bench --round 3`", "step_bench has no option --round"),
    ("`hvd_scale_sim --rank 8`", "hvd_scale_sim has no option --rank"),
    ("    bash tests/run.sh -R unit.no_such", "no test is called"),
    ("    build/tests/unit_tests --source-file='*/no_such_test.cc'", "no test file"),
    ("    build/examples/no_program", "there is no program"),
    ("    cmake --preset fast", "no preset fast"),
    ("    cmake --build build --target no_such_target", "no target"),
    ("`--no-such-option`", "nothing in the project has the option"),
    ("`HVD_NO_SUCH_KNOB`", "nothing in the project reads"),
    ("HOROVOD_NO_SUCH_KNOB", "nothing in the project reads"),
]
RIGHT = [
    "[a](semantics.md#collectives) [b](../hvd/hvd.h) [c](https://example.org/x#y) ![d](allreduce.svg) [e](#there)\n\n# There",
    "`<hvd/torch.h>` `tests/torch_bindings/what_if/*_test.cc` `tests/system/scripts/<name>.sh` `HVD_X` `run.json` `max(a, b)`",
    "    HVD_NP=2 bash examples/train.sh --epochs 3     # --none of this",
    "`mpirun -np 4 -x HVD_LOG_LEVEL build/tools/hvd_bench --model resnet50 --wire fp16`",
    "    cmake --preset tsan && cmake --build build-tsan --target unit_tests",
    "    sbatch --ntasks=8 --nodes=2 examples/train.sbatch --resume",
    "`HOROVOD_FUSION_THRESHOLD` `--strategy hvd`",
]


def notices(build):
    """Yields what the checks above fail to notice, or refuse wrongly."""
    for text, expected in WRONG:
        if expected == "no test is called" and not (build / "tests" / "CTestTestfile.cmake").exists():
            continue
        found = list(check_document("docs/planted.md", text, build))
        if not any(expected in problem for problem in found):
            yield f"not noticed: {text!r} ({expected}); found {found}"
    for text in RIGHT:
        yield from (f"wrongly refused: {text!r}: {problem}" for problem in check_document("docs/planted.md", text, build))
    table = read("docs/configuration.md")
    row = re.search(r"^\| `HVD_LOG_LEVEL`.*\n", table, re.M)[0]
    for changed, expected in [(table.replace(row, ""), "HVD_LOG_LEVEL has no row"), (table.replace(row, ""), "log_level"),
                              (table + row.replace("LOG_LEVEL", "LOUDNESS"), "HVD_LOUDNESS is no knob"),
                              (table.replace("`log_level`", "`loglevel`"), "`loglevel` is no field")]:
        if not any(expected in problem for problem in check_configuration(changed)):
            yield f"not noticed in the table of knobs: {expected}"
    if not list(check_reference(read("docs/Doxyfile").replace("sampler.h", ""))):
        yield "not noticed: a public header that the API reference leaves out"
    changed = pictures()
    changed["docs/sweep.svg"] = changed["docs/sweep.svg"].replace("1.08", "1.09", 1) + "\n" * PICTURE_LINES
    found = list(check_pictures(changed))
    for expected in ("lines together", "docs/sweep.svg is not what"):
        if not any(expected in problem for problem in found):
            yield f"not noticed: {expected}"
    for text in ("int a;  // see hvd/none.h", "/// See none_such.cc."):
        if not list(check_source(text)):
            yield f"not noticed: {text!r}"
    if list(check_source('#include "hvd/made_at_build_time.h"\n// see hvd/hvd.h, ledger.h and docs/semantics.md')):
        yield "wrongly refused: a comment that speaks of files that are there"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notices", action="store_true", help="plant errors, and find them")
    parser.add_argument("build", nargs="?", default=ROOT / "build", type=pathlib.Path)
    arguments = parser.parse_args()
    found = list((notices if arguments.notices else problems)(arguments.build))
    for problem in found:
        print(problem)
    print(f"{len(found)} errors" if found else "nothing is wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
