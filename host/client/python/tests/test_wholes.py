"""Models that differ between all samples: what this machine remembers of whole files."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from test_tensors import safetensors

from kvhost import content, wholes
from kvhost.content import Changing, Unread, fingerprint
from kvhost.tensors import samples
from kvhost.wholes import Known


class Machine:
    """A model, copies of it, and what one machine remembers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known = folder / "known"
        self.model("model")

    def model(self, name: str) -> Path:
        (self.folder / name).mkdir()
        safetensors(self.folder / name / "model.safetensors", {"w": (1024, 1024)})
        return self.folder / name / "model.safetensors"

    def copy(self, of: str, name: str) -> None:
        shutil.copytree(self.folder / of, self.folder / name)

    def edit(self, name: str) -> None:
        """Changes a byte that no sample has."""
        file = self.folder / name / "model.safetensors"
        with file.open("r+b") as f:
            (at, n), (after, _), *_ = samples(f.fileno(), file.stat().st_size, file.name)
            assert after > at + n
            os.pwrite(f.fileno(), b"\1", at + n)

    def name(self, of: str, wait: float | None = None, since: float = float("inf")) -> str:
        return fingerprint(str(self.folder / of), since, Known(wait, self.known))

    def settled(self) -> None:
        """Returns when nothing is read in the background any more."""
        for t in threading.enumerate():
            if t.name == "kvhost-weights":
                t.join()

    def files(self, of: str) -> list[str]:
        return [str(self.folder / of / "model.safetensors")]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(content, "_READ_WHOLE", 0)
    return Machine(tmp_path)


def test_the_first_files_are_known_by_their_samples_in_every_life(machine: Machine) -> None:
    want = fingerprint(str(machine.folder / "model"))
    for _ in range(3):
        assert machine.name("model") == want
        machine.settled()


def test_a_background_read_rests_and_has_the_engines_priority(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of a lower one that holds Python's lock, or the memory of a killed process, would stop the engine on a busy machine."""
    read = wholes._whole
    priorities: list[int] = []
    rests: list[float] = []

    def whole(name: str, due: float | None, rest: float) -> bytes:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        rests.append(rest)
        return read(name, due, rest)

    monkeypatch.setattr(wholes, "_whole", whole)
    machine.name("model")
    machine.settled()
    assert priorities == [os.getpriority(os.PRIO_PROCESS, os.getpid())] and rests == [wholes._REST]
    machine.copy("model", "copy")
    machine.name("copy")
    assert rests[1:] == [0], "want files that an engine waits for read without rests"


def test_the_same_bytes_elsewhere_are_the_same_model(machine: Machine) -> None:
    first = machine.name("model")
    machine.copy("model", "copy")
    os.utime(machine.files("copy")[0], (1, 1))
    for _ in range(2):
        assert machine.name("copy") == first
        assert machine.name("model") == first


@pytest.mark.parametrize("settled", [False, True], ids=["at once", "after the first was read"])
def test_an_edit_between_all_samples_is_another_model(machine: Machine, settled: bool) -> None:
    machine.copy("model", "edited")
    machine.edit("edited")
    assert fingerprint(str(machine.folder / "edited")) == fingerprint(str(machine.folder / "model"))
    first = machine.name("model")
    if settled:
        machine.settled()
    other = machine.name("edited")
    assert other != first
    machine.copy("edited", "edited copy")
    for _ in range(2):
        assert [machine.name(n) for n in ("model", "edited", "edited copy")] == [first, other, other]


def test_an_edit_in_place_is_another_model(machine: Machine) -> None:
    machine.copy("model", "copy")
    first = machine.name("model")
    machine.settled()
    machine.edit("model")
    assert machine.name("model") != first
    assert machine.name("copy") == first


def test_files_that_went_before_they_were_read_count_as_different(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.copy("model", "copy")
    with monkeypatch.context() as m:
        m.setattr(Known, "_quietly", lambda *args: None)  # the engine ended before
        first = machine.name("model")
    shutil.rmtree(machine.folder / "model")
    other = machine.name("copy")
    assert other != first and machine.name("copy") == other


def test_what_another_process_reads_is_waited_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine.name("model")
    machine.settled()
    machine.copy("model", "copy")
    lock = machine.known / f"reading-{wholes._stamp(machine.files('copy'))}"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Unread, match="another process reads them"):
            machine.name("copy", wait=0)
        names: list[str] = []
        polled = threading.Event()
        monkeypatch.setattr("kvhost.wholes.time.sleep", lambda seconds: polled.set())
        waiting = threading.Thread(target=lambda: names.append(machine.name("copy")))
        waiting.start()
        polled.wait()
        assert not names
    waiting.join()
    assert names == [first]


def test_files_that_are_too_large_to_be_read_in_time(machine: Machine) -> None:
    machine.name("model")
    machine.settled()
    machine.copy("model", "copy")
    with pytest.raises(Unread, match="was not read whole in time"):
        machine.name("copy", wait=1e-9)


def test_files_that_change_while_they_are_read_are_not_remembered(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.name("model")
    machine.settled()
    machine.copy("model", "copy")
    real: Any = wholes._whole

    def changing(name: str, due: float | None, rest: float) -> bytes:
        digest = real(name, due, rest)
        os.utime(name, (5, 5))
        return bytes(digest)

    monkeypatch.setattr(wholes, "_whole", changing)
    with pytest.raises(Changing, match="changed while it was read"):
        machine.name("copy")
    monkeypatch.undo()
    monkeypatch.setattr(content, "_READ_WHOLE", 0)
    assert machine.name("copy") == machine.name("model")


def test_a_machine_that_cannot_remember_goes_by_samples(machine: Machine) -> None:
    machine.known.write_text("no directory")
    machine.copy("model", "edited")
    machine.edit("edited")
    assert machine.name("edited") == machine.name("model") == fingerprint(str(machine.folder / "model"))


def test_a_damaged_note_makes_other_models(machine: Machine) -> None:
    samples = machine.name("model")
    machine.settled()
    (machine.known / f"samples-{samples}").write_text("{")
    assert machine.name("model") == machine.name("model") != samples


def test_what_is_remembered_is_bounded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wholes, "_REMEMBERED", 5)
    for i in range(8):
        machine.copy("model", f"copy{i}")
        os.utime(machine.files(f"copy{i}")[0], (i, i))
        machine.name(f"copy{i}")
        machine.settled()
    assert len(list(machine.known.iterdir())) <= 9
    assert machine.name("copy0") == machine.name("model")


def test_small_models_are_read_whole(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_READ_WHOLE", 1 << 30)
    machine.copy("model", "edited")
    machine.edit("edited")
    assert machine.name("edited") != machine.name("model") and not machine.known.exists()


def test_no_one_else_writes_what_is_remembered(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory above it has compiled policies, too, which a host runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine.folder / "cache"))
    before = os.umask(0o002)
    try:
        Known().settle("s", machine.files("model"))
        machine.settled()
    finally:
        os.umask(before)
    modes = {str(d.relative_to(machine.folder)): oct(d.stat().st_mode & 0o777) for d in (machine.folder / "cache" / "kvhost").glob("**/")}
    assert modes == {"cache/kvhost": "0o700", "cache/kvhost/weights": "0o700"}
