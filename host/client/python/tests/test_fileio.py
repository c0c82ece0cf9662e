"""FileIO against a double of the CUDA driver and of cuFile, whose rules make it fail. It needs a C compiler."""

from __future__ import annotations

import ctypes as C
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvhost import cuda, fileio
from kvhost.fileio import CuFileError, DeviceFile, StorageMode

GDS = pathlib.Path(__file__).resolve().parents[4] / "gds"
SIZE = 9 << 20


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if shutil.which("cc") is None and os.environ.get("KVHOST_REQUIRE_TOOLS") != "1":
        pytest.skip("missing: a C compiler: apt-get install gcc libc6-dev")
    out = tmp_path_factory.mktemp("double") / "libcuda.so.1"
    flags = ["-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{GDS / 'kernels'}"]
    subprocess.run(["cc", *flags, "-o", out, GDS / "gdstest" / "c" / "double.c", "-lpthread"], check=True)
    lib = C.CDLL(str(out), use_errno=True)
    cuda._driver = lib
    cuda._check("cuInit", 0)
    fileio._library = None
    fileio._cufile((str(out),))
    yield lib
    cuda._driver = fileio._library = None


@pytest.fixture
def rules(double: Any) -> Iterator[Callable[[str], None]]:
    cuda.use_device(0)
    yield lambda text: double.kvdouble_rules(text.encode())
    double.kvdouble_rules(b"")


@pytest.fixture
def memory(rules: Any) -> int:
    address = C.c_uint64()
    cuda._check("cuMemAlloc_v2", C.byref(address), C.c_size_t(SIZE))
    return address.value


def put(address: int, data: bytes) -> None:
    raw = C.create_string_buffer(data, len(data))
    cuda.copy_to_device(address, C.addressof(raw), len(data))


def get(address: int) -> bytes:
    out = C.create_string_buffer(SIZE)
    cuda.copy_to_host(C.addressof(out), address, SIZE)
    return out.raw


@pytest.mark.parametrize("mode", list(StorageMode))
def test_round_trip(mode: StorageMode, memory: int, tmp_path: pathlib.Path) -> None:
    data = os.urandom(SIZE)
    with DeviceFile(tmp_path / "f", os.O_CREAT | os.O_RDWR, mode) as f:
        put(memory, data)
        direct = mode is not StorageMode.STAGED
        assert f.direct == direct and f.write(memory, SIZE, 0) == direct
        put(memory, b"\xa5" * SIZE)
        assert f.read(memory, SIZE, 0) == direct
        assert get(memory) == data
        with pytest.raises(EOFError):
            f.read(memory, 8192, SIZE - 4096)
        with pytest.raises(ValueError):
            f.read(memory, -1, 0)


@pytest.mark.parametrize("rule", ["cuFileRead:errno=5", "cuFileRead:errno=5030", "cuFileRead:code=5030", "cuFileRead:short=4096"])
def test_what_fails_is_staged_or_told(rule: str, rules: Callable[[str], None], memory: int, tmp_path: pathlib.Path) -> None:
    data = os.urandom(SIZE)
    put(memory, data)
    with DeviceFile(tmp_path / "f", os.O_CREAT | os.O_RDWR) as f:
        f.write(memory, SIZE, 0)
        put(memory, b"\xa5" * SIZE)
        rules(rule)
        assert not f.read(memory, SIZE, 0) and f.fallbacks == 1 and get(memory) == data
    with DeviceFile(tmp_path / "f", os.O_RDWR, StorageMode.DIRECT) as f, pytest.raises((CuFileError, EOFError)) as e:
        f.read(memory, SIZE, 0)
    if "errno=5:" in rule + ":":
        assert isinstance(e.value, OSError) and e.value.errno == 5


def test_a_file_that_cufile_refuses(rules: Callable[[str], None], memory: int, tmp_path: pathlib.Path) -> None:
    rules("cuFileHandleRegister:code=5027")
    with DeviceFile(tmp_path / "f", os.O_CREAT | os.O_RDWR) as f:
        assert not f.direct and "5027" in f.why and not f.write(memory, SIZE, 0)
    with pytest.raises(CuFileError):
        DeviceFile(tmp_path / "f", os.O_RDWR, StorageMode.DIRECT)
