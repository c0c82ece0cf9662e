"""Hosts that engines start for themselves: by two processes at once, after a kill, and until the last engine is gone."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import kvhost
import pytest
from kvhost import own, wire
from kvhost.errors import HostGoneError
from kvhost.objects import Options
from kvhost.own import OwnHost
from kvhost.wire import unreachable
from waits import left, until

PAGE = 64 << 10
SPACE = kvhost.Namespace(
    model="m", dtype="bf16", key_bytes=32, tokens_per_block=16, groups=[kvhost.Group.uniform(0, blocks=1, layers=1, parts=1, page_bytes=PAGE)]
)
KEY = hashlib.sha256(b"key").digest()


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    run = Path("/tmp", f"kvhost-own-{os.getpid()}")  # a socket's path is short
    run.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    monkeypatch.delenv("KVHOST_SOCKET", raising=False)
    yield tmp_path
    for log in run.rglob("*.log"):
        for pid in pids(log):
            os.kill(pid, signal.SIGKILL) if alive(pid) else None
    shutil.rmtree(run)


def pids(log: Path) -> list[int]:
    return [int(line.split('"pid":')[1].split(",")[0]) for line in log.read_text().splitlines() if '"pid":' in line]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def host_of(host: OwnHost) -> int:
    (pid,) = pids(Path(host.socket).with_suffix(".log"))
    return pid


def store(host: OwnHost) -> None:
    with kvhost.Arena(2 * PAGE) as arena, kvhost.Session(host.socket, "e", SPACE) as s:
        s.register(0, arena, [kvhost.Region(0, PAGE, 2)])
        arena.view[:PAGE] = KEY * (PAGE // len(KEY))
        done = s.store([kvhost.StoreChunk(KEY, [0])], request=1).published()
        assert done.chunks[0].result == kvhost.Result.STORED


def load(host: OwnHost) -> bytes:
    with kvhost.Arena(2 * PAGE) as arena, kvhost.Session(host.socket, "f", SPACE) as s:
        s.register(0, arena, [kvhost.Region(0, PAGE, 2)])
        arena.view[:] = b"\xa5" * len(arena.view)
        hit = s.lookup([KEY], request=1)
        assert hit.hits == 1
        assert not s.load(hit, [kvhost.LoadChunk(0, [1])]).wait().failed
        return bytes(arena.view[PAGE : 2 * PAGE])


def test_its_chunks_outlive_it(place: Path) -> None:
    host = OwnHost(f"{place}/kv=64MiB")
    host.ensure()
    first = host_of(host)
    stat = Path(f"/proc/{first}/stat").read_text()
    assert int(stat.rpartition(")")[2].split()[1]) != os.getpid(), "an engine that ends would kill its descendants"
    host.ensure()
    assert host_of(host) == first, "one that answers is kept"
    store(host)
    os.kill(first, signal.SIGKILL)
    until("the host is dead, and all its threads", lambda: unreachable(host.socket) != "")
    host.ensure()
    assert host_of(host) != first
    assert load(host) == KEY * (PAGE // len(KEY))


def test_processes_that_start_at_once_share_one(place: Path) -> None:
    code = f"from kvhost.own import OwnHost; h = OwnHost({str(place)!r} + '/kv=64MiB'); h.ensure(); print(h.socket)"
    engines = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    sockets = {e.communicate(timeout=left())[0] for e in engines}
    assert {e.returncode for e in engines} == {0} and sockets == {OwnHost(f"{place}/../{place.name}/kv=1GiB").socket + "\n"}
    assert len(pids(Path(next(iter(sockets)).strip()).with_suffix(".log"))) == 1
    assert hits(OwnHost(f"{place}/kv")) == 0, "a host of another capacity of the root is the same"


def hits(host: OwnHost) -> int:
    with kvhost.Session(host.socket, "e", SPACE) as s:
        return s.lookup([KEY], request=1).hits


def test_it_ends_after_the_last_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHOST_SESSION_IDLE_EXIT", "2s")
    host = OwnHost(memory="64MiB")
    while True:
        host.ensure()
        try:
            s = kvhost.Session(host.socket, "e", SPACE)
            break
        except HostGoneError:  # a slow machine: it ended before there was a session
            continue
    pid = host_of(host)
    with s:
        time.sleep(3)
        assert alive(pid) and s.lookup([KEY], request=1).hits == 0
    until("the host has ended", lambda: not alive(pid))


def test_why_it_does_not_start(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    running = OwnHost(f"{place}/kv=64MiB")
    running.ensure()
    os.environ["XDG_RUNTIME_DIR"] += "/another"
    os.mkdir(os.environ["XDG_RUNTIME_DIR"])
    other = OwnHost(f"{place}/kv=64MiB")
    with pytest.raises(HostGoneError, match=rf"did not start: root is in use: {place}/kv.*process {host_of(running)}"):
        other.ensure()
    until("the engine's log has it, too", lambda: any("root is in use" in r.message for r in caplog.records))
    (place / "empty").mkdir()
    os.chmod(Path(other.socket).parent, 0o755)
    with pytest.raises(ValueError, match="mode 0700"):
        OwnHost(memory="1GiB")


@pytest.mark.parametrize(
    ("root", "why"),
    [("kv=64MB1", 'size "64MB1": want bytes'), ("kv=64", "64 bytes: a root needs at least"), ("no/kv=64MiB", "mkdir -p")],
)
def test_a_setting_that_is_wrong_is_the_reason(place: Path, root: str, why: str) -> None:
    with pytest.raises(HostGoneError) as e:
        OwnHost(f"{place}/{root}").ensure()
    assert why in str(e.value) and "--help" not in str(e.value)


def test_another_size_is_told_which_one_holds(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    OwnHost(f"{place}/kv=64MiB").ensure()
    OwnHost(f"{place}/kv=64MiB").ensure()
    assert not [r for r in caplog.records if "which holds" in r.message]
    other = OwnHost(f"{place}/kv=1GiB")
    other.ensure()
    other.ensure()
    (said,) = [r.message for r in caplog.records if "which holds" in r.message]
    assert f"asks for {place}/kv=1GiB" in said and f"asked for {place}/kv=64MiB" in said


def test_the_engines_log_says_how_it_runs(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    host = OwnHost(f"{place}/kv=64MiB")
    host.ensure()
    assert f"a host of its own, process {host_of(host)}" in caplog.text and f"--root {place}/kv=64MiB" in caplog.text
    until("the host's own words", lambda: "kvhost: ready socket=" in caplog.text)
    assert "KVHOST_BIN is not a setting" not in caplog.text


def test_a_line_with_a_key_twice_has_its_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    own._say('{"time":"2026","level":"INFO","msg":"copied","entries":3,"level":1,"path":"/a"}', logging.getLogger("kvhost"))
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.INFO, "kvhost: copied entries=3 path=/a")


def test_where_the_program_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own.program() == os.environ["KVHOST_BIN"]
    monkeypatch.delenv("KVHOST_BIN")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostGoneError, match="installed from its sources"):
        own.program()


def test_settings_name_one_or_the_other() -> None:
    o = Options.parse("extra", {"root": "/nowhere/kv=1GiB", "memory": "1GiB"})
    assert o.own is not None and o.socket == OwnHost("/nowhere/kv").socket
    assert Options.parse("extra", {}).own is None
    with pytest.raises(ValueError, match="extra.socket: .*want one of them"):
        Options.parse("extra", {"root": "/nowhere/kv", "socket": "/s"})


@pytest.mark.parametrize("root, path", [
    ("/x/kv=64MiB", "/x/kv"), ("/x/kv", "/x/kv"), ("/x/dt=2026/kv=64MiB", "/x/dt=2026/kv"), ("/x/dt=2026/kv", "/x/dt=2026/kv"),
    ("/x/kv/=1GiB", "/x/kv"),
])
def test_a_root_is_cut_as_the_host_cuts_it(root: str, path: str) -> None:
    """Engines that spell a root in two ways share its host."""
    assert OwnHost(root=root).socket == OwnHost(root=path).socket, f"{root} and {path}"


def as_nobody(path: Path) -> subprocess.Popen[bytes]:
    """Another user's process, which listens at a path."""
    code = (
        "import os, socket, sys\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print(flush=True)\nwhile True: s.accept()"
    )
    p = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert p.stdout and p.stdout.readline()
    return p


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become another user")
def test_the_socket_of_a_neighbour_gets_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Path(os.environ["XDG_RUNTIME_DIR"])
    host = OwnHost(root=f"{tmp_path}=64MiB")
    run.chmod(0o777)
    Path(host.socket).parent.rename(run / "moved")
    Path(host.socket).parent.mkdir(mode=0o777)
    Path(host.socket).parent.chmod(0o777)
    other = as_nobody(Path(host.socket))
    try:
        for reach in (host.ensure, lambda: kvhost.Session(host.socket, "e", SPACE)):
            with pytest.raises(HostGoneError, match=r"user 65534 answers there.*KVHOST_HOST_USER=65534"):
                reach()
        with pytest.raises(HostGoneError, match="user 65534 answers there"), open(os.devnull) as f:
            wire.send_descriptor(host.socket, b"", 1, f.fileno(), 1.0)
        monkeypatch.setenv("KVHOST_HOST_USER", "7,65534")
        assert not wire.foreign(host.socket)
    finally:
        other.kill()
        other.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become another user")
def test_a_directory_that_root_has_given_names_the_host(tmp_path: Path) -> None:
    given = Path("/run", f"kvhost-given-{os.getpid()}")
    given.mkdir(mode=0o755)
    os.chown(given, 65534, 65534)
    other = as_nobody(given / "s")
    try:
        assert not wire.foreign(str(given / "s"))
        given.chmod(0o777)
        assert "user 65534 answers there" in wire.foreign(str(given / "s"))
    finally:
        other.kill()
        other.wait()
        shutil.rmtree(given)


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give a directory to another user")
def test_a_name_that_a_neighbour_has_taken_stops_no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, home = Path(os.environ["XDG_RUNTIME_DIR"]), tmp_path / "home"
    (home / ".cache").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    taken = run / f"kvhost-{os.geteuid()}"
    for take in (lambda: taken.write_text(""), lambda: (taken.mkdir(), os.chown(taken, 65534, 65534)), lambda: taken.symlink_to("/")):
        take()
        assert OwnHost(root="/r").socket.startswith(str(home / ".cache" / taken.name))
        taken.rmdir() if taken.is_dir() and not taken.is_symlink() else taken.unlink()
    (home / ".cache" / taken.name).rmdir()
    taken.write_text("")
    (home / ".cache" / taken.name).write_text("")
    with pytest.raises(ValueError, match=r"File exists.*File exists.*XDG_RUNTIME_DIR"):
        OwnHost(root="/r")


def test_what_others_say_is_one_line_of_printable_text(caplog: pytest.LogCaptureFixture) -> None:
    evil = "\x1b[31mPWN\x07\nERROR kvhost: root lost all chunks\u202e\x85\x9b2J\u2028"
    own._say(json.dumps({"level": "WARN", "msg": "a peer has gone", "error": evil}), logging.getLogger("kvhost"))
    own._say(evil, logging.getLogger("kvhost"))
    said = [r.getMessage() for r in caplog.records] + [str(kvhost.HostError(1, evil, evil)), str(HostGoneError(evil))]
    assert len(said) == 4
    for text in said:
        assert text.isprintable(), text
        assert "\\x1b[31mPWN\\x07\\nERROR" in text
