"""Makes a virtual environment of the engines' tests for machines without a GPU: install.py <directory>.

The directory's last name says which: engines holds vLLM 0.26, LMCache and SGLang, 3.2 GB; engines-0.32 vLLM 0.32 and NIXL,
2.5 GB. Where it cannot be made, the exit status is 3 and the last line says why.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLIENT = HERE.parents[2]
GIB = 1 << 30
# What each environment must import when it is made.
ENGINES = {"engines": "vllm, lmcache.lmcache_native, sglang", "engines-0.32": "vllm"}


def lacks(directory: Path) -> Iterator[str]:
    """What this machine lacks."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        yield f"Linux on x86_64, this is {sys.platform} on {platform.machine()}"
        return
    if not (3, 11) <= sys.version_info < (3, 14):
        yield f"Python 3.11 to 3.13, this is {platform.python_version()}"
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, version.split("."))) < (2, 34):
        yield f"glibc 2.34, this is {libc} {version}"
    yield from (tool for tool in ("cc", "nm", "readelf") if shutil.which(tool) is None)
    try:
        ctypes.CDLL("libnuma.so.1")  # vLLM's kernels for processors
    except OSError:
        yield "libnuma.so.1 (Debian's libnuma1)"
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        yield "a processor with AVX2"
    for what, path, least in (("disk space", directory.parent, 8), ("/dev/shm", Path("/dev/shm"), 1)):
        if (free := shutil.disk_usage(path).free) < least * GIB:
            yield f"{least} GiB of {what}, {free / GIB:.1f} are free"
    if (memory := _memory()) < 6 * GIB:
        yield f"6 GiB of memory, {memory / GIB:.1f} are free"


def _memory() -> int:
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    limit = Path("/sys/fs/cgroup/memory.max")
    most = limit.read_text().strip() if limit.exists() else "max"
    return min(int(available.split()[1]) << 10, sys.maxsize if most == "max" else int(most))


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, timeout=1200)


def install(directory: Path) -> None:
    venv.create(directory, with_pip=True, clear=True)
    python = directory / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir", "--no-compile"]
    run(*pip, "--only-binary=:all:", "--require-hashes", "--requirement", HERE / f"{directory.name}.txt")
    run(*pip, "--no-build-isolation", "--editable", CLIENT)
    run(python, HERE / "cudaless.py")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # without .pyc files every start takes minutes
    run(python, "-c", f"import torch, {ENGINES[directory.name]}; assert not torch.cuda.is_available()")
    run(python, HERE / "check.py")


def main() -> int:
    directory = Path(sys.argv[1]).resolve()
    if directory.name not in ENGINES:
        print(f"no engines are installed: {directory.name} is none of {', '.join(ENGINES)}")
        return 3
    directory.parent.mkdir(parents=True, exist_ok=True)
    if missing := list(lacks(directory)):
        print(f"no engines are installed: missing: {', '.join(missing)}")
        return 3
    try:
        install(directory)
    except subprocess.SubprocessError as e:
        shutil.rmtree(directory, ignore_errors=True)
        step = shlex.join(map(str, e.cmd)) if isinstance(e, (subprocess.CalledProcessError, subprocess.TimeoutExpired)) else e
        print(f"no engines are installed: the package index does not answer, or they do not run here: {step}")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
