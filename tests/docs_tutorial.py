#!/usr/bin/env python3
"""Holds docs/tutorial.md to examples/tutorial/, README's loop to examples/wrap_existing.cc, the tables for those who come from elsewhere to
the public headers, and the Chinese pages to the English ones.

    python3 tests/docs_tutorial.py                              prints each error; fails if there is any
    python3 tests/docs_tutorial.py --notices                    plants an error of each kind, and fails unless each is found
    python3 tests/docs_tutorial.py --compile COMPILE_COMMANDS   compiles the C++ code of the tables, with the flags of the tutorial's programs

Checked are: no file of the tutorial is longer than 80 lines; each program is in its CMakeLists.txt and has a place in docs/tutorial.md; what
stands there in a block of C++, or in a column of that name, stands in one of the files that its section links to, but for white space; that
the lines that README numbers stand in wrap_existing.cc; that names `hvd::...` and fields `.name =` are declared in a header that is installed;
and that a translation has, section by section, the code, the names in backquotes and the links of its original, comments aside.
"""
import json
import pathlib
import posixpath
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TUTORIAL = "examples/tutorial"
TABLES = ["docs/from-horovod.md", "docs/from-pytorch-ddp.md"]
TRANSLATIONS = {
    "README.zh.md": "README.md",
    "docs/zh/tutorial.md": "docs/tutorial.md",
    "docs/zh/why-data-parallel.md": "docs/why-data-parallel.md",
}
NAMED = ["docs/tutorial.md", "docs/which-wrapper.md", "README.md", *TABLES, *TRANSLATIONS]
LINES = 80

# What the code of the tables is about.
PREAMBLE = """
#include <hvd/torch.h>
#include <torch/torch.h>
inline int train() { return 0; }
[[maybe_unused]] static void tables(torch::nn::Sequential model, torch::optim::SGD& sgd, hvd::DistributedOptimizer& optimizer, at::Tensor tensor,
    at::Tensor output, at::Tensor splits, at::Tensor loss, at::Tensor indices, std::vector<at::Tensor> tensors, hvd::ProcessSet set,
    hvd::Handle<at::Tensor> handle, std::vector<int> ranks, int root, int epoch, int seed, double x, std::string text, std::size_t items,
    hvd::GradScaler& scaler, torch::nn::Linear layer, hvd::ElasticSampler& sampler, hvd::DistributedDataParallel<torch::nn::SequentialImpl>& ddp,
    std::vector<std::vector<at::Tensor>> lists, hvd::Checkpoint& file) {
"""


def read(path):
    return (ROOT / path).read_text()


def squeezed(code):
    return re.sub(r"\s+", " ", code).strip()


def split_row(line):
    """Returns the cells of a table's row; a bar in backquotes is none."""
    cells = re.split(r"\|(?=(?:[^`]*`[^`]*`)*[^`]*$)", line.strip().strip("|"))
    return [cell.strip() for cell in cells]


def column(text, title):
    """Returns the code spans, by cells, of all columns that are called so."""
    found, place = [], None
    for line in text.split("\n"):
        if not line.startswith("|"):
            place = None
            continue
        cells = split_row(line)
        if place is None:
            place = cells.index(title) if title in cells else -1
        elif 0 <= place < len(cells) and not set(line) <= set("|-: "):
            found.append(re.findall(r"`([^`]+)`", cells[place]))
    return found


def sections(text):
    return re.split(r"^(?=## )", text, flags=re.M)


def check_files(files):
    """`files`: text by name."""
    programs = [name for name in files if name.endswith(".cc")]
    for name, text in files.items():
        lines = text.count("\n")
        if lines > LINES:
            yield f"{TUTORIAL}/{name} has {lines} lines, more than {LINES}"
    for name in programs:
        if not re.search(rf"\b{name[:-3]}\b", files["CMakeLists.txt"]):
            yield f"{TUTORIAL}/CMakeLists.txt does not build {name}"


def check_tutorial(text, files, page="docs/tutorial.md"):
    """Each piece of C++ code is in a file that its section links to."""
    linked = set()
    for section in sections(text):
        own = set(re.findall(rf"\]\((?:\.\./)+{TUTORIAL}/([\w.]+)\)", section))
        linked |= own
        code = [block for block in re.findall(r"^```cpp\n(.*?)^```", section, re.M | re.S)]
        code += [span for cell in column(section, "C++") for span in cell]
        texts = [squeezed(files[name]) for name in own if name in files]
        for piece in code:
            if not any(squeezed(piece) in whole for whole in texts):
                yield f"{page}: `{squeezed(piece)}` is in none of {', '.join(sorted(own)) or 'no files that its section links to'}"
    for name in files:
        if name.endswith((".cc", ".sbatch")) and name not in linked:
            yield f"{page} does not link to {name}"


def check_readme(text, program):
    """The lines that README numbers, in its first block of code, stand in the program."""
    block = re.search(r"^```cpp\n(.*?)^```", text, re.M | re.S)[1]
    numbered = re.findall(r"^(.*;) +// (\d+)$", block, re.M)
    if [int(number) for _, number in numbered] != list(range(1, len(numbered) + 1)) or not numbered:
        yield "README.md: the marked lines are not numbered one after the other"
    for line, _ in numbered:
        if squeezed(line) not in squeezed(program):
            yield f"README.md: `{squeezed(line)}` is not in examples/wrap_existing.cc"


def code_of(text):
    """Returns the blocks of code and the lines of commands, without comments, and the columns of C++, in their order."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    code = [re.sub(r"(?:^|\s)(?://|#\s).*$", "", block, flags=re.M) for block in blocks + re.findall(r"^    (.*)$", outside, re.M)]
    return [squeezed(piece) for piece in code + [span for cell in column(text, "C++") for span in cell]]


def names_of(text):
    return sorted(set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))))


def links_of(text, page):
    """Returns the files that the page links to; of a translated one the original."""
    targets = [re.sub("#.*", "", target) for target in re.findall(r"\]\(([^)\s#][^)\s]*)\)", re.sub(r"`[^`\n]*`", "", text))]
    files = [posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) for target in targets]
    return sorted({TRANSLATIONS.get(file, file) for file in files})


def check_translation(page, text, original, whole):
    ours, theirs = sections(text), sections(whole)
    if len(ours) != len(theirs):
        yield f"{page} has {len(ours)} sections, {original} {len(theirs)}"
    for own, other in zip(ours, theirs):
        title = own.split("\n")[0]
        for what, here, there in (
            ("the code", code_of(own), code_of(other)),
            ("the name", names_of(own), names_of(other)),
            ("the link", links_of(own, page), links_of(other, original)),
        ):
            for piece in [p for p in there if p not in here]:
                yield f"{page}, '{title}' lacks {what} `{piece}` of {original}"
            for piece in [p for p in here if p not in there]:
                yield f"{page}, '{title}' has {what} `{piece}`, which {original} has not"
            if here != there and sorted(here) == sorted(there):
                yield f"{page}, '{title}' has {what} in another order than {original}"


def declarations():
    """Returns the code, without comments, of the headers that <hvd/torch.h> and <hvd/spawn.h> bring along."""
    todo, seen, code = ["hvd/torch.h", "hvd/spawn.h"], set(), ""
    while todo:
        header = todo.pop()
        if header not in seen and (ROOT / header).exists():
            seen.add(header)
            text = read(header)
            todo += re.findall(r'^#include "([^"]+)"', text, re.M)
            code += re.sub(r"//[^\n]*", "", text)
    return code


def check_names(name, text, code):
    for full in sorted(set(re.findall(r"\bhvd::(?:\w+::)*~?\w+", text))):
        for part in full.split("::")[1:]:
            if part not in CMAKE_TARGETS and not re.search(rf"\b{part}\b", code):
                yield f"{name}: {full}: no public header declares {part}"
    spans = " ".join(re.findall(r"`([^`\n]+)`", text) + re.findall(r"^```cpp\n(.*?)^```", text, re.M | re.S))
    for field in sorted(set(re.findall(r"[{,]\s*\.(\w+) =", spans))):
        if not re.search(rf"\b{field}\b", code):
            yield f"{name}: no public header has a field {field}"


CMAKE_TARGETS = {"torch", "core", "ops", "torch_cuda"}  # hvd::torch


def problems():
    files = {p.name: p.read_text() for p in sorted((ROOT / TUTORIAL).iterdir()) if p.is_file()}
    yield from check_files(files)
    yield from check_tutorial(read("docs/tutorial.md"), files)
    yield from check_readme(read("README.md"), read("examples/wrap_existing.cc"))
    yield from check_tutorial(read("docs/zh/tutorial.md"), files, "docs/zh/tutorial.md")
    for page, original in TRANSLATIONS.items():
        yield from check_translation(page, read(page), original, read(original))
    code = declarations()
    for name in NAMED:
        yield from check_names(name, read(name), code)


def pieces(text):
    """Returns what of the tables' C++ columns is compiled: code with a call or an initialiser, by cells."""
    return [[span for span in cell if re.search(r"[({]", span)] for cell in column(text, "C++")]


def compile_tables(commands):
    """Returns the compiler's exit code for all C++ code of the tables, each cell in a scope of its own."""
    code = PREAMBLE
    for table in TABLES:
        for line, cell in enumerate(pieces(read(table))):
            if cell:
                given_away = any("std::move(sgd)" in span for span in cell)
                own = "    auto sgd = std::make_unique<torch::optim::SGD>(model->parameters(), 0.1);\n" if given_away else ""
                code += f"  {{  // {table}, row {line + 1}\n{own}" + "".join(f"    {span.rstrip(';')};\n" for span in cell) + "  }\n"
    code += "}\n"
    entry = next(e for e in json.loads(pathlib.Path(commands).read_text()) if e["file"].endswith("/distributed_data_parallel.cc"))
    words, command = iter(shlex.split(entry["command"])), []
    for word in words:
        if word in ("-o", "-c", "-MF", "-MT"):
            next(words)
        elif word not in ("-MD", "-Werror") and not word.endswith("/distributed_data_parallel.cc"):
            command.append(word)
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "tables.cc"
        source.write_text(code)
        done = subprocess.run([*command, "-w", "-fsyntax-only", str(source)], cwd=entry["directory"], check=False)
        if done.returncode != 0:
            print(code)
    return done.returncode


def notices():
    """Yields what the checks above fail to notice, or refuse wrongly."""
    files = {"CMakeLists.txt": "single\n", "single.cc": "int a =\n  1;\nint b;\n"}
    page = f"## One\n[single.cc](../{TUTORIAL}/single.cc)\n"
    right = page + "```cpp\nint a = 1;\n```\n| PyTorch | C++ |\n|---|---|\n| `a = 1 | 2` | `int b;` |\n"
    chinese = right.replace("One", "一").replace("(../", "(../../").replace("int a = 1;", "int a = 1;  // 注释").replace("PyTorch |", "代码 |")
    same = check_translation("docs/zh/x.md", chinese, "docs/x.md", right)
    for found in list(check_files(files)) + list(check_tutorial(right, files)) + list(same):
        yield f"wrongly refused: {found}"
    wrong = [
        (check_files(files | {"single.cc": "\n" * 81}), "more than 80"),
        (check_files(files | {"other.cc": ""}), "does not build other.cc"),
        (check_tutorial(right, files | {"other.cc": ""}), "does not link to other.cc"),
        (check_tutorial(right.replace("int a = 1;", "int a = 2;"), files), "`int a = 2;`"),
        (check_tutorial(right.replace("`int b;`", "`int c;`"), files), "`int c;`"),
        (check_tutorial(right + "## Two\n```cpp\nint b;\n```\n", files), "no files that"),
        (check_translation("docs/zh/x.md", chinese.replace("a = 1;", "a = 2;"), "docs/x.md", right), "lacks the code `int a = 1;`"),
        (check_translation("docs/zh/x.md", chinese.replace("`int b;`", "`int c;`"), "docs/x.md", right), "has the code `int c;`"),
        (check_translation("docs/zh/x.md", chinese.replace("`a = 1 | 2`", "`a = 3`"), "docs/x.md", right), "lacks the name `a = 1 | 2`"),
        (check_translation("docs/zh/x.md", chinese + "[b](../b.md)\n", "docs/x.md", right), "has the link `docs/b.md`"),
        (check_translation("docs/zh/x.md", chinese + "## 二\n", "docs/x.md", right), "3 sections, docs/x.md 2"),
        (check_readme("```cpp\nf(x);  // 1\ng(y);   // 2\n```\n", "f(x);\ng(x);\n"), "`g(y);`"),
        (check_readme("```cpp\nf(x);  // 1\nf(x);   // 3\n```\n", "f(x);\n"), "not numbered"),
        (check_names("x", "`hvd::no_such_name()`", declarations()), "no_such_name"),
        (check_names("x", "`hvd::Compression::no_such_kind()`", declarations()), "no_such_kind"),
        (check_names("x", "`f({.no_such_field = 1})`", declarations()), "no_such_field"),
    ]
    for found, expected in wrong:
        if not any(expected in problem for problem in found):
            yield f"not noticed: {expected}"
    yield from (f"wrongly refused: {p}" for p in check_names("x", "`hvd::allreduce_(tensor, {.op = hvd::ReduceOp::Sum})`", declarations()))
    if pieces("| Horovod | C++ |\n|---|---|\n| `f()` | `g(1)`, `HVD_X` |\n| `f()` | none |\n") != [["g(1)"], []]:
        yield "a table is read wrongly"


def main():
    if sys.argv[1:2] == ["--compile"]:
        return compile_tables(sys.argv[2])
    found = list(notices() if sys.argv[1:] == ["--notices"] else problems())
    for problem in found:
        print(problem)
    print(f"{len(found)} errors" if found else "nothing is wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
