"""Lets torch from the package index run without CUDA's libraries, which are four fifths of its size.

The index has torch for x86 in a build for CUDA only, which links against CUDA's libraries. Without a GPU nothing calls
them. In the place of each that is not installed this puts one whose functions return an error.

    python cudaless.py      # for the torch of the Python that runs it
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path

CUDA = re.compile(r"lib(cu(?!da\.)|nccl|nv)")
Function = tuple[str, str]  # its name, and its version or nothing


def output(*command: str | Path) -> str:
    env = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout


def needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-d", library))


def undefined(library: Path) -> list[Function]:
    return re.findall(r"^ +U (\w+)(?:@(.+))?$", output("nm", "-D", "--undefined-only", library), re.M)


def versions(library: Path) -> dict[str, str]:
    """Which library defines a version."""
    found: dict[str, str] = {}
    entries = re.findall(r"File: (\S+) +Cnt: \d+\n((?: +\S+: +Name: .*\n)*)", output("readelf", "-VW", library))
    for file, names in entries:
        found.update({version: file for version in re.findall(r"Name: (\S+)", names)})
    return found


def build(library: Path, functions: set[Function]) -> None:
    source = "".join(f"int {name}(void) {{ return 1; }}\n" for name, _ in sorted(functions))
    tags = sorted({version for _, version in functions if version})
    script = library.with_suffix(".map")
    script.write_text("\n".join(f"{tag} {{ *; }};" for tag in tags) or "{ *; };")
    options = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", f"-Wl,--version-script={script}"]
    subprocess.run(["cc", *options, "-x", "c", "-", "-o", library], input=source, text=True, check=True)
    script.unlink()


def main() -> None:
    site = Path(sysconfig.get_path("platlib"))
    own = site / "torch" / "lib"
    torch = sorted(own.glob("lib*.so"))
    installed = {p.name for p in [*own.iterdir(), *site.glob("nvidia/*/lib/*")]}
    missing = {name for library in torch for name in needed(library) if CUDA.match(name)} - installed
    functions: dict[str, set[Function]] = {name: set() for name in missing}
    for library in torch:
        definer = versions(library)
        for name, version in undefined(library):
            for file in missing:
                stem = file.removeprefix("lib").split(".")[0]
                if definer.get(version) == file or (not version and name.startswith(stem)):
                    functions[file].add((name, version))
    for name in missing:
        build(own / name, functions[name])
    print(f"torch runs without {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main()
