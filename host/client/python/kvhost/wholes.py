"""Digests of whole files of weights that this machine remembers, so that two models with the same samples do not share
KV.

The first files with given samples are named by the samples at once, and are read whole in the background. Other files
with the same samples are read whole before they have a name: files with equal bytes are the same model, and others are
named by their own digest. So a name never changes, and no name is used before it is certain.

``~/.cache/kvhost/weights`` has small files: ``samples-X`` names the first files with the samples X, and ``whole-Y`` has
the digest of all bytes of the files Y, which are identified by names, devices, inodes, sizes and times."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger("kvhost")

_PIECE = 4 << 20
_READERS = 8  # most threads; each reads one file
_REMEMBERED = 1000  # most remembered digests
_POLL = 0.2
#: A background read rests three times as long as each piece took. Its thread has the engine's priority: a thread of
#: lower priority could hold Python's lock, or the memory of a killed process, for as long as others keep the processors
#: busy.
_REST = 3.0


class Unknown(Exception):
    """The content is unknown: files are missing or in another place."""


class Changing(Unknown):
    """Files change while they are read, or after an engine may have read them."""


class Unread(Unknown):
    """Files were not read whole in time."""


class Known:
    """The digests that are known on this machine."""

    def __init__(self, wait: float | None = None, directory: Path | None = None) -> None:
        """``wait`` is the most seconds until files are read whole."""
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._directory = directory or Path(cache, "kvhost", "weights")
        self._wait = wait

    def settle(self, samples: str, files: Sequence[str]) -> str:
        """Returns the name of files with these samples."""
        mine = _stamp(files)
        try:
            for d in (self._directory.parent, self._directory):  # the mode applies to the last directory only
                d.mkdir(mode=0o700, parents=True, exist_ok=True)
            first = self._claim(samples, mine, files)
        except OSError as e:
            log.info("kvhost: whole files of weights are not remembered: %s", e)
            return samples
        if first["files"] == [mine]:
            if not self._file("whole", mine).exists():
                threading.Thread(target=self._quietly, args=(files, mine), name="kvhost-weights", daemon=True).start()
            return samples
        whole, theirs = self._read(files, mine), ""
        with suppress(Changing, OSError):  # the first files are gone and were not read whole, so they count as different
            theirs = self._read(first["paths"], *first["files"])
        return samples if whole == theirs else f"{samples}+{whole}"

    def _file(self, kind: str, name: str) -> Path:
        return self._directory / f"{kind}-{name}"

    def _claim(self, samples: str, mine: str, files: Sequence[str]) -> dict[str, list[str]]:
        """Returns the first files with these samples: these files, unless others came first."""
        claim = self._file("samples", samples)
        with suppress(FileExistsError), self._written({"files": [mine], "paths": [os.path.abspath(f) for f in files]}) as new:
            os.link(new, claim)
        try:
            return json.loads(claim.read_text())  # type: ignore[no-any-return]
        except ValueError:
            return {"files": [""], "paths": [""]}  # damaged: the first files are unknown

    @contextmanager
    def _written(self, value: object) -> Iterator[Path]:
        self._forget()
        new = self._file("new", os.urandom(8).hex())
        try:
            with new.open("w") as f:
                f.write(json.dumps(value))
                f.flush()
                os.fsync(f.fileno())
            yield new
        finally:
            new.unlink(missing_ok=True)

    def _forget(self) -> None:
        """Removes the oldest digests if there are many. The records of first samples stay for ever. Otherwise
        another model with the same sample would get the name of the first one."""
        known = []
        for file in [f for f in self._directory.iterdir() if not f.name.startswith("samples-")]:
            with suppress(FileNotFoundError):  # another process may have removed it
                known.append((file.stat().st_mtime, file))
        for _, file in sorted(known)[:-_REMEMBERED]:
            file.unlink(missing_ok=True)

    def _quietly(self, files: Sequence[str], stamp: str) -> None:
        try:
            with self._lock(stamp, 0):
                self._digest(files, stamp, 1)
        except (Unknown, OSError) as e:
            log.debug("kvhost: files of weights were not read whole: %s", e)

    def _read(self, files: Sequence[str], stamp: str) -> str:
        if not self._file("whole", stamp).exists():
            log.warning("kvhost: reading all of %s: other files that this machine has seen have the same samples",
                        os.path.dirname(files[0]))
        with self._lock(stamp, self._wait):
            return self._digest(files, stamp, _READERS)

    @contextmanager
    def _lock(self, stamp: str, wait: float | None) -> Iterator[None]:
        """A lock by which one process reads files while the others wait."""
        due = None if wait is None else time.monotonic() + wait
        with open(self._file("reading", stamp), "w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if due is not None and time.monotonic() >= due:
                        raise Unread("another process reads them") from None
                    time.sleep(_POLL)
            yield

    def _digest(self, files: Sequence[str], stamp: str, readers: int) -> str:
        known = self._file("whole", stamp)
        with suppress(FileNotFoundError, ValueError):
            return str(json.loads(known.read_text()))
        due = None if self._wait is None or readers == 1 else time.monotonic() + self._wait
        if _stamp(files) != stamp:
            raise Changing(f"{files[0]}, or another file beside it, is not what it was")
        whole = hashlib.blake2b(digest_size=16)
        for name, digest in zip(files, each(lambda f: _whole(f, due, _REST if readers == 1 else 0), files, readers)):
            raw = os.fsencode(os.path.basename(name))
            whole.update(struct.pack(">I", len(raw)) + raw + digest)
        if _stamp(files) != stamp:
            raise Changing(f"{files[0]}, or another file beside it, changed while it was read")
        try:
            with self._written(whole.hexdigest()) as new:
                new.replace(known)
        except OSError as e:
            log.info("kvhost: whole files of weights are not remembered: %s", e)
        return whole.hexdigest()


def each(do: Callable[[str], bytes], files: Sequence[str], readers: int) -> list[bytes]:
    """Returns the results of ``do`` for the files. An engine that ends does not wait for these threads."""
    done: dict[str, bytes] = {}
    failed: list[Exception] = []
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for f in files:
        todo.put(f)

    def read() -> None:
        try:
            while not failed:
                name = todo.get_nowait()
                done[name] = do(name)
        except queue.Empty:
            pass
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=read, name="kvhost-weights", daemon=True) for _ in files[:readers]]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for e in failed:
        raise e
    return [done[f] for f in files]


def _whole(name: str, due: float | None, rest: float) -> bytes:
    h, piece = hashlib.blake2b(digest_size=32), bytearray(_PIECE)
    began = time.monotonic()
    with open(name, "rb", buffering=0) as file:
        while n := file.readinto(piece):
            h.update(memoryview(piece)[:n])
            if due is not None and time.monotonic() > due:
                raise Unread(f"{name}: was not read whole in time")
            if rest:
                time.sleep(rest * (time.monotonic() - began))
                began = time.monotonic()
    return h.digest()


def _stamp(files: Sequence[str]) -> str:
    """Returns a value that changes whenever the files do. Numbers of file systems without a device change at each
    mount, and are left out."""
    h = hashlib.blake2b(digest_size=16)
    for name in files:
        s, raw = os.stat(name), os.fsencode(os.path.basename(name))
        device = s.st_dev if os.major(s.st_dev) else 0
        h.update(struct.pack(">I", len(raw)) + raw)
        h.update(struct.pack(">3Q2q", device, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
    return h.hexdigest()
