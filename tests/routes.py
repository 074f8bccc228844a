#!/usr/bin/env python3
"""Limits of the choice of ways stand in hvd/routes.h alone, how to wait in hvd/base/waits.h, and docs/routes.md has what hvd_bench --routes prints.

    python3 tests/routes.py                       checks that no other file of hvd/ and ops/ has a size or a number of ranks to choose by
    python3 tests/routes.py --page BUILD_FOLDER   checks the page; --write BUILD_FOLDER makes its tables anew
    python3 tests/routes.py --notices             checks that it finds what it must

Listed here is every other size in KiB and more, with what it is: memory or a message that is so large. Whoever adds one says so, or puts it into
the table, if a way is chosen by it.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
THE_TABLE = "hvd/routes.h"
# What holds sizes that choose no way: (file, name of the constant): what it is. Without a name: all of the file's.
SIZES = {
    ("hvd/api/result_pool.h", "kLeastBytes"): "memory of results: what is smaller the C library recycles as well",
    ("hvd/config.cc", ""): "bounds of knobs",
    ("hvd/config.h", ""): "defaults of knobs",
    ("hvd/engine/health/deadlocks.cc", "kRecordBytes"): "a record of the log",
    ("hvd/engine/peers/peer_links.cc", "kWirePiece"): "a message of the wire",
    ("hvd/engine/peers/peer_messages.cc", "kPartBytes"): "what is got at once",
    ("hvd/negotiation/board/board_view.h", "kLogBytes"): "the log",
    ("hvd/negotiation/board/layout.h", "k(?:All|Most)"): "rings",
    ("hvd/negotiation/leaders/direct_rounds.h", "kMostTogether"): "a message",
    ("ops/backends.cc", "kWholePages"): "pages of shared memory",
    ("hvd/timeline/timeline.h", "kCapacity"): "text that waits for the file",
    ("hvd/timeline/timeline_file.h", "kMostEventBytes"): "a line of the file",
    ("ops/gpu/", ""): "memory and launches of a GPU; which way its tensors take is placement.h's, by who has which GPU",
    ("ops/mpi/point_to_point.h", "piece_bytes"): "a message of MPI's",
    ("ops/p2p/chunks.h", ""): "messages, and those under way",
    ("hvd/base/message_memory.h", "kBlockBytes"): "memory of messages",
    ("hvd/base/message_memory.h", "kLeastBytes"): "memory of messages",
    ("hvd/base/message_memory.h", "kCachedBytes"): "memory of messages",
    ("ops/p2p/exchange.cc", "kPoolBytes"): "buffers that are kept",
    ("ops/p2p/reduce_execution.cc", "kLeastChunkBytes"): "messages",
    ("ops/p2p/reduce_execution.cc", "kMostChunkBytes"): "messages",
    ("ops/p2p/reduce_execution.cc", "kRoundBytes"): "messages under way",
    ("ops/mpi/meeting.cc", "ranks"): "nobody but this rank",
    ("ops/rendezvous/", ""): "messages while ranks meet, and nobody but this rank",
    ("ops/shm/memory/arena.cc", "kPagedFrom"): "alignment of memory",
    ("ops/shm/claimed_execution.cc", "kMostChunkBytes"): "what is claimed at once",
    ("ops/shm/claimed_execution.cc", "kLeastChunkBytes"): "what is claimed at once",
    ("ops/shm/memory/overflow.cc", "kLeastSegment"): "memory that is mapped at once",
    ("ops/shm/memory/peer_memory.cc", "kBytes"): "what init() copies to measure",
    ("ops/shm/pull_execution.cc", "kScratchBytes"): "what is brought here at once",
    ("ops/shm/pulled_blocks.cc", "kLeastBytes"): "blocks that are kept",
    ("ops/shm/pulled_blocks.h", "kMostBytes"): "blocks that are kept",
}
SIZE = re.compile(r"<<\s*(?:10|20|30)\b|\*\s*1024\b|(?:<=|>=|[<>])\s*\d{4,}\b|\bk\w*Bytes\w*\s*=\s*\d{4,}")
NUMBER = re.compile(r"\b\w*(?:ranks|domains|hosts|readers)\w*(?:\.size\(\)|\(\))?\s*(?:<=|>=|<|>|==)\s*(?:[2-9]|[1-9]\d+)\b")


def code_of(text):
    """Returns the lines without comments and texts."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group(0).count("\n"), text, flags=re.S)
    lines = []
    for line in text.split("\n"):
        line = re.sub(r'"(?:[^"\\]|\\.)*"', '""', line)
        lines.append(line.split("//")[0])
    return lines


def may_have(file, line):
    for (path, name), _ in SIZES.items():
        if (file == path or (path.endswith("/") and file.startswith(path))) and (not name or re.search(rf"\b{name}\b", line)):
            return True
    return False


# Who may spin or give way apart from hvd/base/waits.h: it is no rank of the host that is waited for.
WAITS = {"hvd/base/waits.h", "ops/ucx/wire.cc", "ops/gpu/nccl/communicator.cc"}
WAIT = re.compile(r"\bcpu_relax\s*\(|\bthis_thread::yield\b|\bsched_yield\b")


def violations(root):
    found = []
    for floor in ("hvd", "ops"):
        for path in sorted((root / floor).rglob("*")):
            file = path.relative_to(root).as_posix()
            if path.suffix not in (".h", ".cc", ".cu") or file == THE_TABLE or file.startswith("hvd/launch/"):
                continue
            for number, line in enumerate(code_of(path.read_text()), 1):
                if WAIT.search(line) and file not in WAITS:
                    found.append(f"{file}:{number}: {line.strip()}: how to wait for another rank is hvd/base/waits.h's")
                if (SIZE.search(line) or NUMBER.search(line)) and not may_have(file, line):
                    found.append(f"{file}:{number}: {line.strip()}: a limit by which a way is chosen stands in {THE_TABLE}; "
                                 f"what is none is listed in tests/routes.py")
    return found


def notices():
    cases = [
        (True, "hvd/engine/a.cc", "constexpr std::size_t kSmall = 64 << 10;"),
        (True, "ops/shm/claimed_execution.cc", "constexpr std::size_t kOther = std::size_t{2} << 20;"),
        (True, "ops/p2p/a.cc", "if (bytes <= 65536) return true;"),
        (True, "ops/p2p/a.cc", "if (ranks.size() > 8) return true;"),
        (True, "hvd/engine/a.cc", "return domains <= 8;"),
        (True, "ops/shm/a.cc", "std::this_thread::yield();"),
        (True, "hvd/engine/a.cc", "cpu_relax();"),
        (False, "hvd/base/waits.h", "cpu_relax();"),
        (False, "hvd/engine/a.cc", "// up to 64 << 10"),
        (False, "hvd/engine/a.cc", "if (ranks > 1) return true;"),
        (False, "ops/shm/claimed_execution.cc", "constexpr std::size_t kMostChunkBytes = 256 << 10;"),
        (False, "hvd/routes.h", "{Limit::SlotBytes, std::size_t{16} << 10}"),
    ]
    for refused, file, line in cases:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / file
            path.parent.mkdir(parents=True)
            path.write_text(line + "\n")
            if bool(violations(pathlib.Path(folder))) != refused:
                print(f"{'not noticed' if refused else 'wrongly refused'}: {file}: {line}")
                return 1
    return 0


# What the page has: the machine is given, so that it is the same everywhere.
RUNS = ["--ranks 4 --hosts 1 --cores 4", "--ranks 4 --hosts 2 --cores 4"]


def printed(build, options):
    program = build / "tools" / "hvd_bench"
    said = subprocess.run([program, "--routes", *options.split()], capture_output=True, text=True, timeout=60, check=True,
                          env={**os.environ, "HVD_DIRECT_COPIES": "on"})
    return said.stdout


def with_tables(text, build):
    for number, options in enumerate(RUNS, 1):
        tables, _, limits = printed(build, options).partition("\n| limit |")
        for part, body in ((f"run {number}", tables), ("limits", "| limit |" + limits)):
            text = re.sub(rf"(<!-- {part}: begin -->\n).*?(<!-- {part}: end -->)", lambda m: m.group(1) + body.strip("\n") + "\n" + m.group(2),
                          text, flags=re.S)
    return text


def main():
    if sys.argv[1:2] == ["--notices"]:
        return notices()
    page = ROOT / "docs" / "routes.md"
    if sys.argv[1:2] in (["--page"], ["--write"]):
        build = pathlib.Path(sys.argv[2])
        if not (build / "tools" / "hvd_bench").exists():
            print(f"SKIP: {build}/tools/hvd_bench is missing")
            return 77
        text = page.read_text()
        now = with_tables(text, build)
        if sys.argv[1] == "--write":
            page.write_text(now)
        elif now != text:
            print("docs/routes.md is not what hvd_bench --routes prints; python3 tests/routes.py --write BUILD_FOLDER makes it so")
            return 1
        return 0
    found = violations(ROOT)
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
