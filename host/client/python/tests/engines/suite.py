"""Runs the tests of one environment whole: each file in a process of its own, one more at a time than there are processors, since
tests wait more than they work. It ends with a table, and with 1 where anything failed or did not end.

  suite.py FILE...     or tests, as pytest names them"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import left_out
import zygote

HERE = Path(__file__).resolve().parent
#: These begin first, so that nothing waits for one of them in the end.
LONGEST = (
    "test_vllm_features", "test_vllm", "test_vllm_multi", "test_vllm_tier", "test_vllm_soak", "test_lmcache", "test_sglang_linker",
    "test_sglang_engine",
)


@dataclass
class File:
    """The tests of a file, and what became of them."""

    path: Path
    tests: list[str]
    log: Path
    report: Path
    seconds: float = 0
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # why, by test
    each: dict[str, float] = field(default_factory=dict)  # seconds, by test

    def start(self) -> None:
        self._began = time.monotonic()
        if self.path.name.startswith("test_"):
            main = find_spec("pytest.__main__")
            assert main is not None and main.origin is not None
            command = [main.origin, "-q", "-p", "no:cacheprovider", f"--junit-xml={self.report}", *self.tests]
        else:
            command = self.tests
        self._process = zygote.Fork(command, self.log, dict(os.environ))

    def ended(self) -> bool:
        code = self._process.poll()
        if code is None:
            return False
        self.seconds = time.monotonic() - self._began
        if not self.path.name.startswith("test_"):
            self.passed, self.failed = int(not code), [self.path.name] * bool(code)
            return True
        if self.report.exists():
            self._read()
        if code and not self.failed:
            self.failed.append(f"{self.path.name}: not whole, pytest ended with {code}")
        return True

    def _read(self) -> None:
        for case in xml.parse(self.report).iter("testcase"):
            name = f"{self.path.name}::{case.get('name')}"
            kinds = {child.tag: child for child in case}
            self.each[name] = float(case.get("time") or 0)
            if "failure" in kinds or "error" in kinds:
                self.failed.append(name)
            elif "skipped" in kinds:
                self.skipped[name] = kinds["skipped"].get("message") or ""
            else:
                self.passed += 1


def files(tests: Sequence[str], folder: Path) -> list[File]:
    by_path: dict[Path, list[str]] = {}
    for t in tests:
        by_path.setdefault(Path(t.partition("::")[0]).resolve(), []).append(t)
    made = [File(p, ts, folder / f"{p.stem}.log", folder / f"{p.stem}.xml") for p, ts in by_path.items()]
    return sorted(made, key=lambda f: LONGEST.index(f.path.stem) if f.path.stem in LONGEST else len(LONGEST))


def run(waiting: list[File], most: int) -> Iterator[File]:
    """All of them, so many at a time; yields each when it has ended."""
    running: list[File] = []
    while waiting or running:
        while waiting and len(running) < most:
            running.append(waiting.pop(0))
            running[-1].start()
        time.sleep(0.1)
        for f in [f for f in running if f.ended()]:
            running.remove(f)
            yield f


@contextmanager
def scratch() -> Iterator[Path]:
    """A zygote, and a folder for all temporary files. Engines that are killed leave files there, and shared memory: 4 GB in a run.
    Both are removed, but for memory that another process on the machine uses."""
    shared = Path("/dev/shm")
    there = set(os.listdir(shared))
    with tempfile.TemporaryDirectory(prefix="kv-", ignore_cleanup_errors=True) as name:  # a socket's path is short
        os.environ["TMPDIR"] = name
        os.environ["KVHOST_ZYGOTE"] = zygote.start()
        try:
            yield Path(name)
        finally:
            zygote.end()
    used = set(mapped(shared))
    for file in (shared / new for new in set(os.listdir(shared)) - there):
        if file.is_file() and str(file) not in used and file.stat().st_uid == os.getuid():
            file.unlink()


def mapped(folder: Path) -> Iterator[str]:
    """The files of a folder that processes have in their memory."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or it is another user's
            for line in (process / "maps").read_text().splitlines():
                if (at := line.find(f" {folder}/")) >= 0:
                    yield line[at + 1 :]


def again(failed: Sequence[str]) -> list[str]:
    """Those of the tests that fail alone, too. Both results are printed."""
    still = []
    with scratch() as folder:
        for f in run(files([str(HERE / t.partition(": ")[0]) for t in failed], folder), 1):
            if f.failed:
                print(f.log.read_text(errors="replace"))
            still += f.failed
    for t in failed:
        print(f"FAILED among others, and {'alone' if t in still else 'passed alone'}: {t}")
    return still


def main(tests: Sequence[str]) -> int:
    began, done = time.monotonic(), []
    with scratch() as folder:
        for f in run(files(tests, folder), 1 + len(os.sched_getaffinity(0))):
            done.append(f)
            if f.failed:
                print(f.log.read_text(errors="replace"))
            print(f"{f.path.name}: {f.passed} passed, {len(f.failed)} failed, {len(f.skipped)} skipped", flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\n{'':32}{'passed':>8}{'failed':>8}{'skipped':>8}{'seconds':>8}")
    for f in sorted(done, key=lambda f: -f.seconds):
        print(f"{f.path.name:32}{f.passed:8}{len(f.failed):8}{len(f.skipped):8}{f.seconds:8.0f}")
    passed, bad, skipped = (sum(n) for n in zip(*((f.passed, len(f.failed), len(f.skipped)) for f in done), strict=True))
    print(f"{passed} passed, {bad} failed, {skipped} skipped")  # as .ci/run adds it up
    print(f"{(time.monotonic() - began) / 60:.1f} minutes, {(used.ru_utime + used.ru_stime) / 60:.1f} of processors")
    print("\nThe slowest ten, in seconds:")
    for test, seconds in sorted((e for f in done for e in f.each.items()), key=lambda e: -e[1])[:10]:
        print(f"{seconds:8.0f} {test}")
    for (name, why), count in Counter((f.path.name, why) for f in done for why in f.skipped.values()).items():
        print(f"skipped: {count} of {name}: {why}")
    print(left_out.text())
    failed = [t for f in done for t in f.failed]
    if failed and os.environ.get("KVHOST_TRY_AGAIN") == "1":  # real engines take a machine's processors for seconds: CI looks twice
        failed = again(failed)
    for t in failed:
        print(f"FAILED {t}")
    if failed:
        print(f"Again, with the same target: make ... TEST='{HERE.relative_to(HERE.parents[4])}/{failed[0].partition(': ')[0]}'")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
