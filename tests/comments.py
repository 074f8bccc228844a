"""Comments say what a thing is or does, in sentences and in the field's words; and a reader finds the test of each source file.

  python3 tests/comments.py [FOLDER...]   checks the library, or these folders of it; prints what is wrong and fails if there is anything
  python3 tests/comments.py --notices     the check finds what it must, and nothing else

- The first sentence of a doc comment (///) has a subject or a verb. One on a type names what it is ("The engine of one rank: takes
  submissions, ..."), one on a function says what that does ("Returns ...", "Blocks until ...", "True if ...").
- A source file X has a test X_test (or X_mpi_test, X_gpu_test, X_torch_test, X_fuzz) in the folder of tests/ where its own folder would
  lie, or above or below that. Otherwise its header, or the .cc file if there is no header, has a line near its top or
  at the end of its first comment:
  // Tested in tests/FOLDER/FILE, tests/FOLDER/FILE
- Words that are out of use are in no comment and no message (DEAD_WORDS).
- No folder, also of tests, tools and examples, holds more files than a reader looks through.
"""

import pathlib
import re
import sys
import tempfile
from collections import Counter

MOST_FRAGMENTS = 5  # that are still there
MOST_FILES = 25  # in one folder
FOLDERS = ("hvd", "ops", "torch_bindings")
ALSO_COUNTED = ("cmake", "docs", "examples", "tests", "tools")
SUFFIXES = (".h", ".cc", ".cu")
COUNTED = (*SUFFIXES, ".cmake", ".md", ".py", ".sh")
# How a comment begins that has no subject and no verb.
OPENINGS = r"(?:What|Whether|Of|Where|How|Why|Is|As|Also|Which|Who|Those|That of|Likewise|To|Up to where)\b"
# As these begin, the subject comes after a comma, or not at all.
PREPOSITIONS = r"(?:After|At|Before|By|For|From(?! now on)|If|In|Never|Not|On|Once|Through|Under|When|While|With|Without)\b"
# Said before the sentence: "Collective. ", "After an arrival: ", "Alltoall: ". What says only what a parameter is, "`rank`: ...", may do so.
LABEL = rf"(?:(?:Not )?\w+\.\s+(?=\w))?(?:(?:{PREPOSITIONS}[^.,:;]{{1,60}}|\w+):\s+)?"
FRAGMENT = re.compile(rf"{LABEL}{OPENINGS}", re.IGNORECASE)
UNFINISHED = re.compile(rf"{PREPOSITIONS}[^,:;]*$")
# Words that only this library used, as patterns of whole words in small letters, and what the field says. `Code` in a comment may have them.
DEAD_WORDS = {
    "the long way": "negotiation",
    "operations? that comes? back": "a repeated operation",
    "pulled": "one-sided, got",
    "promis(?:e|es|ed|ing)": "prepared, as in a two-phase commit; of others, guarantee",
    "pledg(?:e|es|ed|ing)": "reservation",
    "doubt(?:s|ed|ing)?": "query",
    "relays?": "ring",
}
# Lists of includes, with nothing in them to test.
UNTESTED = ("hvd/torch.h",)
NEAR_THE_TOP = 40
TESTED_IN = re.compile(r"^\s*//[/ ]\s*Tested in ((?:.*,\n\s*//[/ ]\s*)*.*?)\.?$", re.MULTILINE)
TEST_SUFFIX = re.compile(r"(?:_(?:mpi|gpu|torch))?_test$|_fuzz$")
NOT_CODE = re.compile(
    r"""(?P<include>^[ \t]*\#[ \t]*include[^\n]*)
    |(?P<comment>//[^\n]*|/\*.*?\*/)
    |R"(?P<mark>[^()\\\s]{0,16})\((?P<raw>.*?)\)(?P=mark)"
    |"(?P<text>(?:[^"\\\n]|\\.)*)"
    |(?<![0-9A-Za-z_])'(?:[^'\\\n]|\\.)+'""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def doc_comments(text):
    """Yields the line and the text of each doc comment that stands on lines of its own."""
    lines = text.split("\n")
    first = None
    for number, line in enumerate(lines + [""], 1):
        found = re.match(r"\s*///(?!<|/)\s?(.*)", line)
        if found and first is None:
            first, said = number, [found[1]]
        elif found:
            said.append(found[1])
        elif first is not None:
            yield first, " ".join(said)
            first = None


def fragments(text):
    """Yields the line and the first sentence of each doc comment that is a fragment."""
    for line, said in doc_comments(text):
        sentence = re.split(r"(?<!\be\.g)(?<!\bi\.e)\.(?:\s|$)", said, maxsplit=1)[0]
        if re.fullmatch(r"(?:Not )?\w+", sentence):  # "Collective."
            sentence = ". ".join(re.split(r"\.\s+", said, maxsplit=2)[:2])
        if FRAGMENT.match(sentence) or UNFINISHED.match(sentence.rstrip(".")):
            yield line, sentence


def dead_words(text, words):
    """Yields the line of each word that is out of use, the word, and what is said instead."""
    for found in NOT_CODE.finditer(text):
        said = re.sub(r"`[^`]*`", lambda code: " " * len(code[0]), found["comment"] or found["raw"] or found["text"] or "")
        for pattern, instead in words.items():
            for word in re.finditer(rf"\b(?:{pattern})\b", said):
                yield text.count("\n", 0, found.start() + word.start()) + 1, word[0], instead


def top_of(text):
    """Returns the first lines of a file, its first comment whole."""
    lines = text.split("\n")
    first = next((number for number, line in enumerate(lines) if line.startswith("//")), len(lines))
    after = next((number for number, line in enumerate(lines) if number > first and not line.startswith("//")), len(lines))
    return "\n".join(lines[: max(after, NEAR_THE_TOP) if first < NEAR_THE_TOP else NEAR_THE_TOP])


def without_test(root, sources):
    """Yields each source file of which nobody can tell where it is tested, and why."""
    tests = {}
    for file in (root / "tests").rglob("*"):
        if TEST_SUFFIX.search(file.stem) and file.suffix in SUFFIXES:
            tests.setdefault(TEST_SUFFIX.sub("", file.stem), []).append(file.parent.relative_to(root / "tests").as_posix() + "/")
    units = {}
    for file in sources:
        units.setdefault(file.with_suffix(""), []).append(file)
    for unit, files in units.items():
        spoken_for = next((file for file in files if file.suffix == ".h"), files[0])
        name = spoken_for.relative_to(root).as_posix()
        named = [test for line in TESTED_IN.findall(top_of(spoken_for.read_text(encoding="utf-8"))) for test in re.split(r",? and |, ", re.sub(r"\s*\n\s*//[/ ]\s*", " ", line))]
        missing = [test for test in named if not test.startswith("tests/") or not (root / test).is_file()]
        folder = unit.parent.relative_to(root).as_posix() + "/"
        if missing:
            yield name, f"is said to be tested in {', '.join(missing)}, which does not exist"
        elif not named and name not in UNTESTED:
            if not any(folder.startswith(place) or place.startswith(folder) or place in ("fuzz/", "gpu/") for place in tests.get(unit.name, ())):
                yield name, f'has no test of its name and no line "Tested in tests/..." near its top'


def files_of(root, folders, suffixes):
    """Returns the files below these folders that end so."""
    return sorted(file for folder in folders for file in (root / folder).rglob("*") if file.suffix in suffixes)


def overfull(counted):
    """Yields each folder that holds more files than a reader looks through, and how many."""
    for folder, files in Counter(file.parent for file in counted).items():
        if files > MOST_FILES:
            yield folder, files


def problems(root, folders, words=None):
    """Returns the errors but the fragments, and the fragments."""
    errors, unfinished, sources = [], [], files_of(root, folders, SUFFIXES)
    for file in sources:
        text, name = file.read_text(encoding="utf-8"), file.relative_to(root).as_posix()
        unfinished += [f"{name}:{line}: no sentence: {said[:100]}" for line, said in fragments(text)]
        for line, word, instead in dead_words(text, DEAD_WORDS if words is None else words):
            errors.append(f'{name}:{line}: "{word}" is out of use: {instead}')
    errors += [f"{name}: {why}" for name, why in without_test(root, sources)]
    counted = files_of(root, {*folders, *ALSO_COUNTED}, COUNTED)
    errors += [f"{folder.relative_to(root).as_posix()}: {files} files, {MOST_FILES} at most" for folder, files in overfull(counted)]
    return errors, unfinished


def notices():
    refused = (
        "What the forms share.", "Whether this is so.", "Of one device, the first one's.", "Is an operation.", "As Board::lock.",
        "Where it is, in this process.", "Collective. What a rank says.", "After an arrival: whether it is the last.", "Before the memory.",
        "Not collective: what an `init()` calls first.", "Once with each. Where there is none it is a buffer.", "After the last of the batch\n/// was enqueued.",
    )
    for said in refused:
        assert list(fragments(f"int a;\n  /// {said}\nint b;\n")), f"not noticed: {said}"
    for said in (
        "Returns whether this is so.", "The engine of one rank: what drives it.", "True if it is.", "Collective. Returns what a rank says.", "From now on it is so.",
        "After a failure, tells the others.", "While it lives, all is as it was.", "For tests: the thread ends.", "`ranks`: the global ones.", "A list of what is, e.g. of who.",
    ):
        assert not list(fragments(f"/// {said}\nint b; ///< what it is\n// What else.\n")), f"wrongly refused: {said}"
    full = [pathlib.Path("a", f"{number}.cc") for number in range(MOST_FILES)]
    assert not list(overfull(full)) and list(overfull(full + [pathlib.Path("a/b.h")])) == [(pathlib.Path("a"), MOST_FILES + 1)]
    words = {"lanes?": "queue"}
    assert [line for line, _, _ in dead_words('#include "lane"\nint lane; // a lane\nf("lanes");\n/// planes, lane_, `lane`\n', words)] == [2, 3]
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        files = {
            "hvd/a/named.h": "", "hvd/a/named.cc": "", "tests/hvd/named_mpi_test.cc": "", "hvd/elsewhere.cc": "", "tests/ops/elsewhere_test.cc": "",
            "hvd/says.h": "#pragma once\n/// Says.\n///\n/// Tested in tests/hvd/named_mpi_test.cc, tests/ops/elsewhere_test.cc.\n", "hvd/says.cc": "",
            "hvd/lies.cc": "// Tested in tests/hvd/gone_test.cc\n", "hvd/late.cc": "\n" * NEAR_THE_TOP + "// Tested in tests/hvd/named_mpi_test.cc\n",
            "hvd/long.cc": "// It is.\n" * NEAR_THE_TOP + "// Tested in tests/hvd/named_mpi_test.cc\n",
        }
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        found = [error.split(":")[0] for error in problems(root, ["hvd"], {})[0]]
        assert found == ["hvd/elsewhere.cc", "hvd/late.cc", "hvd/lies.cc"], found


if __name__ == "__main__":
    if sys.argv[1:] == ["--notices"]:
        notices()
        sys.exit(0)
    root = pathlib.Path(__file__).resolve().parent.parent
    errors, unfinished = problems(root, sys.argv[1:] or FOLDERS)
    if sys.argv[1:] or len(unfinished) > MOST_FRAGMENTS:
        print("\n".join(unfinished))
    print("\n".join(errors + [f"{len(unfinished)} fragments ({MOST_FRAGMENTS} at most), {len(errors)} other errors"]))
    sys.exit(1 if errors or len(unfinished) > MOST_FRAGMENTS else 0)
