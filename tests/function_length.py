"""No function of the project is longer than a screen: 60 lines from its opening brace to its closing one. A test case may tell a story of
110 lines. No class has more than 40 functions besides constructors, and no type of the library more than 6 booleans.

  python3 tests/function_length.py [FOLDER]   prints those that are longer and fails if there are any
  python3 tests/function_length.py --notices  the check finds what it must, and nothing else

A lambda counts as part of the function that it is in; one that is not in a function is one itself.
"""

import pathlib
import re
import sys

LIMIT = 60
TEST_CASE_LIMIT = 110
# A list of options is as long as there are options, each a line or two.
LISTS = {
    "CommandLine parse_command_line(int argc, char** argv)": 100,
    "Options parse_command_line(int argc, char** argv)": 100,
    "void add_options(CLI::App& app, Options& options)": 100,
    "void add_options(CLI::App& app, Options& options, Words& words)": 100,
    "void fill_nccl(GpuApi& table)": 100,
    "void fill_sharing(GpuApi& table)": 100,
    "std::vector<Way> ways(const Plan& plan)": 100,
}
MOST_FUNCTIONS = 40
MOST_BOOLEANS = 6
FOLDERS = ("hvd", "ops", "torch_bindings", "examples", "tools", "tests")
SUFFIXES = (".h", ".cc", ".cu")

# What is not code: comments, texts, characters (an apostrophe within a number is none), directives of the preprocessor.
NOT_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/
    |R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"
    |"(?:[^"\\\n]|\\.)*"
    |(?<![0-9A-Za-z_])'(?:[^'\\\n]|\\.)+'
    |^[ \t]*\#(?:[^\n\\]|\\.|\\\n)*""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
TEMPLATE = re.compile(r"\btemplate\s*<[^{};]*?>(?=\s*(?:class|struct|union|requires|[A-Za-z_\[:]))")
CONTAINER = re.compile(r"^(?:(?:inline|export|typedef|static|const|constexpr)\s+)*(?:namespace|class|struct|union|enum)\b[^()=]*(?:\([^()]*\)[^()=]*)*$")


def blanked(text):
    """Returns the text with everything that is not code replaced by blanks; lines stay where they are."""
    keep_lines = lambda found: re.sub(r"[^\n]", " ", found.group())
    return NOT_CODE.sub(keep_lines, text)


def match_of(code, opening):
    """Returns the place of the brace that closes the one at `opening`."""
    depth = 0
    for place in re.finditer(r"[{}]", code[opening:]):
        depth += 1 if place.group() == "{" else -1
        if depth == 0:
            return opening + place.start()
    return len(code)


def is_container(head):
    head = TEMPLATE.sub(" ", head).strip()
    return head in ("extern", "") or bool(CONTAINER.match(re.sub(r"^(public|private|protected)\s*:\s*", "", head)))


def is_function(head, after):
    """Whether a brace after `head`, whose closing one is followed by `after`, opens the body of a function."""
    if re.search(r"=\s*\[[^\]]*\]\s*(?:\(|$)", head):
        return True  # a lambda
    if "(" not in head or head.endswith("="):
        return False
    in_initialisers = re.search(r"\)\s*(?:noexcept\s*)?:(?!:)", head)
    if in_initialisers and not head.endswith((")", "}")):
        return False  # the value of a member
    return not after.startswith((";", ",")) or head.endswith(")")


def functions(text):
    """Yields for each function the line of its opening brace, its length in lines, and its head."""
    code = blanked(text)
    place = head_from = 0
    while True:
        found = re.compile(r"[{};]").search(code, place)
        if not found:
            return
        place = found.end()
        if found.group() != "{":
            head_from = place
            continue
        head = " ".join(code[head_from : found.start()].split())
        if is_container(head):
            head_from = place
            continue
        end = match_of(code, found.start())
        place = end + 1
        if is_function(head, code[place : place + 40].lstrip()):
            first, last = (code.count("\n", 0, at) + 1 for at in (found.start(), end))
            yield first, last - first + 1, head
            head_from = place


CLASS = re.compile(r"\b(?:class|struct)\s+(?:HVD_\w+(?:\([^)]*\))?\s+|alignas\(\w+\)\s+)*(\w+)(?:\s+final)?\s*(?::[^;{()]*(?:\([^)]*\))?[^;{]*)?\{")
NO_FUNCTION = re.compile(r"(?:struct|class|enum|using|friend|static_assert|(?:static\s+)?(?:const\s+)?std::function\s*<|template\s*<[^>]*>\s*(?:struct|class))\b")


def members(body):
    """Yields the heads of a class's members, without what stands in braces."""
    depth, head = 0, ""
    for char in body:
        if char == "}":
            depth -= 1
            if depth == 0:
                yield head
                head = ""
        elif depth == 0 and char in "{;":
            if char == "{":
                depth = 1
            else:
                yield head
                head = ""
        elif char == "{":
            depth += 1
        elif depth == 0:
            head += char


def classes(text):
    """Yields for each class its line, its name, how many functions it declares, and how many booleans it has."""
    code = blanked(text)
    for found in CLASS.finditer(code):
        opening = found.end() - 1
        functions_of, booleans = 0, 0
        for head in members(code[opening + 1 : match_of(code, opening)]):
            head = re.sub(r"\b(?:public|private|protected)\s*:(?!:)|HVD_\w+(?:\([^()]*\))?|\[\[\w+\]\]", "", head).strip()
            if not head or NO_FUNCTION.match(head) or re.search(r"=\s*(?:delete|default)$", head):
                continue
            declared = head if "operator" in head else head.split("=")[0]
            if re.search(r"(?:[~\w]+|operator\S+)\s*\(", declared):
                functions_of += not re.search(rf"(?:^|\s|>)~?{found[1]}\s*\(", declared)
            elif re.match(r"(?:mutable\s+|const\s+)*(?:bool|std::atomic<bool>)\s", head):
                booleans += 1 + head.count(",")
        yield code.count("\n", 0, found.start()) + 1, found[1], functions_of, booleans


def too_large(root):
    for folder in FOLDERS[:-1]:  # the tests' doubles are as large as what they stand for
        for file in sorted((root / folder).rglob("*.h")):
            for line, name, functions_of, booleans in classes(file.read_text(encoding="utf-8")):
                if functions_of > MOST_FUNCTIONS:
                    yield f"{file.relative_to(root)}:{line}: {functions_of} functions: {name}"
                # What a command line may say is as much as there are options.
                if booleans > MOST_BOOLEANS and folder in ("hvd", "ops", "torch_bindings"):
                    yield f"{file.relative_to(root)}:{line}: {booleans} booleans: {name}"


def too_long(root):
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix not in SUFFIXES:
                continue
            for line, length, head in functions(file.read_text(encoding="utf-8")):
                limit = TEST_CASE_LIMIT if head.startswith("TEST_CASE") else LISTS.get(head, LIMIT)
                if length > limit:
                    yield f"{file.relative_to(root)}:{line}: {length} lines: {head[-100:]}"


def notices():
    body = "  f();\n" * LIMIT
    long, short = "{\n" + body + "}", "{\n" + "  f();\n" * (LIMIT - 2) + "}"
    in_a_class = lambda code: "namespace a {\nclass B final : public C {\n public:\n  int d{0};\n" + code + "\n};\n}\n"
    heads = (
        "void f(int a)",
        "std::vector<int> B::f(std::span<const int> a) const noexcept",
        "template <class T>\nrequires std::is_same_v<T, int> T f(T a)",
        "B::B(int a)\n    : a_(a),\n      b_{1, 2},\n      c_([this] { return a_; })",
        "B::B(int a) : B{a}, b_{a}",
        "auto f() -> decltype(g())",
        "bool operator()(const A& a) const",
        'TEST_CASE("a { in a text, and \' too")',
        "void f() HVD_REQUIRES(mutex)",
        'extern "C" int f(const char* a)',
        "const auto f = [](int a)",
        "static const std::function<int(int)> f = [](int a) -> int",
    )
    for head in heads:
        end = ";" if "= [" in head else ""
        for text in (f"{head} {long}{end}\n", in_a_class(f"{head} {long}{end}"), f"int a = 1'000'000; // it's {{\n#define A {{\n{head} {long}{end}\n"):
            found = [length for _, length, _ in functions(text) if length > LIMIT]
            assert found == [LIMIT + 2], f"not noticed, {found}: {text[:200]}"
        for text in (f"{head} {short}{end}\n{head} {short}{end}\n", in_a_class(f"{head} {short}{end}\n{head} {short}{end}")):
            found = [length for _, length, _ in functions(text)]
            assert found == [LIMIT] * 2, f"wrongly refused, {found}: {text[:200]}"
    others = ("int a[] = ", "std::vector<int> a", "const std::map<int, F (*)(int)> a", "class B : public C<int (*)(int)> ", "struct alignas(64) B ",
              "enum class A : int ", "class HVD_CAPABILITY(x) B ")
    for head in others:
        text = head + "{\n" + "  1,\n" * 100 + "};\n" + f"void g() {short}\n"
        found = [length for _, length, _ in functions(text) if length > LIMIT]
        assert not found, f"wrongly refused, {found}: {text[:200]}"
    inner = "  struct Inner { int f(); int g(); };\n  using F = int (*)();\n  B(const B&) = delete;\n  int a = f();\n  int b{g()};\n  std::function<int()> c;\n"
    declared = "  B(int a) : a_(f(a)) { g(); }\n  ~B();\n  int f() const;\n  bool operator==(const B&) const;\n  template <class T>\n  T g(T t) { return t; }\n"
    large = "class B final : public C<int(int)> {\n public:\n" + inner + declared + "  bool d = false, e = true;\n  std::atomic<bool> h{false};\n};\n"
    assert [found[1:] for found in classes(large)] == [("B", 3, 3), ("Inner", 2, 0)], list(classes(large))


if __name__ == "__main__":
    if sys.argv[1:] == ["--notices"]:
        notices()
        sys.exit(0)
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent
    found = list(too_long(root)) + list(too_large(root))
    print("\n".join(found))
    sys.exit(1 if found else 0)
