"""What the connectors use of engines, public or not, and how each release that they are for has it:

    python contracts.py                      compares, and says which releases of the index are not recorded
    python contracts.py record               records what the connectors use now, of all releases in contracts.json
    python contracts.py record vllm 0.34.0   likewise, and of another release
    python contracts.py --offline            compares, and asks no index

What is used is read from the connectors' sources: what they import, the classes that they derive from, and the attributes
that they take of engines' objects, as far as SUBJECTS tells which objects those are. Releases are read from their wheels. No
engine is installed or imported."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from contract_tables import ALSO, CALLERS, HANDLED, NOT_OF_ENGINES, SOURCES, SUBJECTS

RECORD = Path(__file__).resolve().parent / "contracts.json"

_OF_A_VALUE = "of a value"  # whose class its source does not tell

Uses = dict[str, bool]  # name: whether every release must have it
Names = dict[str, str | None]  # how a release has each; None where it has not


# ---- what the connectors use ------------------------------------------------------------------------------------------


def uses(package: str) -> Uses:
    """``module:name``, ``module:Class()`` for classes that a connector makes, ``module:Class.attribute``, and
    ``module:Class.*`` for those that it derives from."""
    found: Uses = dict.fromkeys(ALSO[package], False)
    for folder in SOURCES[package]:
        for path in sorted(folder.glob("*.py")):
            for name, must in _Uses(package, path).names():
                found[name] = found.get(name, False) or must
    return found


class _Uses(ast.NodeVisitor):
    """The uses of one file."""

    def __init__(self, package: str, path: Path) -> None:
        self._package, self._file = package, f"{path.parent.name}/{path.name}"
        self._connector = path.parent == SOURCES[package][0]  # and no example
        self._tree = ast.parse(path.read_text())
        self._imported: dict[str, str] = {}  # local name: module:name, or a module
        self._function, self._may_lack = "", 0
        self._found: Uses = {}

    def names(self) -> Iterator[tuple[str, bool]]:
        self.visit(self._tree)
        return iter(self._found.items())

    def _use(self, name: str, must: bool = True) -> None:
        self._found[name] = self._found.get(name, False) or (must and not self._may_lack)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and node.module.split(".")[0] == self._package:
            for alias in node.names:
                self._imported[alias.asname or alias.name] = f"{node.module}:{alias.name}"
                self._use(f"{node.module}:{alias.name}")

    def visit_Try(self, node: ast.Try) -> None:
        """What is imported where an ImportError is awaited need not be there."""
        lacks = any("ImportError" in ast.unparse(h.type or ast.Constant("")) for h in node.handlers)
        self._may_lack += lacks
        for part in node.body:
            self.visit(part)
        self._may_lack -= lacks
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    def visit_With(self, node: ast.With) -> None:
        lacks = any("ImportError" in ast.unparse(item.context_expr) for item in node.items)
        self._may_lack += lacks
        self.generic_visit(node)
        self._may_lack -= lacks

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = self._function
        self._function = before or node.name  # one inside another is of the outer
        if node.args.args and isinstance(node.args.args[0], ast.arg) and before == "" and f"{self._file}:{node.name}" in SUBJECTS:
            self._function = node.name
        self.generic_visit(node)
        self._function = before

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            if isinstance(base, ast.Name) and ":" in (of := self._imported.get(base.id, "")):
                self._use(f"{of}.*")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """A class or function of an engine that is named by a text, as hooks are."""
        if isinstance(node.value, str) and re.fullmatch(rf"{self._package}\.[\w.]*\.[A-Z]\w*(\.\w+)?", node.value):
            module, _, rest = re.sub(r"\.(?=[A-Z])", ":", node.value, count=1).partition(":")
            self._use(f"{module}:{rest}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._attribute(node.value, node.attr, must=True)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """A class that is called is made. getattr and hasattr ask for what need not be there."""
        made = self._imported.get(node.func.id, "") if isinstance(node.func, ast.Name) else ""
        if made.partition(":")[2][:1].isupper() and self._connector:
            self._use(f"{made}()")
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr") and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant):
                self._attribute(node.args[0], str(name.value), must=False)
        self.generic_visit(node)

    def _attribute(self, of: ast.expr, name: str, *, must: bool) -> None:
        variable = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
        if name.startswith("__") or name in NOT_OF_ENGINES.get(self._file, {}).get(variable, ()):
            return
        if isinstance(of, ast.Name) and (imported := self._imported.get(variable)):
            module, _, inside = imported.partition(":")
            self._use(f"{imported}.{name}" if inside[:1].isupper() else f"{module}.{inside}:{name}", must)
            return
        subjects = SUBJECTS.get(self._file, {}) | SUBJECTS.get(f"{self._file}:{self._function}", {})
        if variable in subjects and subjects[variable].startswith(self._package + "."):
            self._use(f"{subjects[variable]}.{name}", must)


# ---- what a release has -----------------------------------------------------------------------------------------------


class Release:
    """The sources of one release, from its wheel or a folder."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        """``read`` gives a file by its path, None where it is not there."""
        self._read = read
        self._modules: dict[str, tuple[ast.Module | None, bool]] = {}

    def module(self, name: str) -> ast.Module | None:
        return self._module(name)[0]

    def _module(self, name: str) -> tuple[ast.Module | None, bool]:
        """And whether it is a package."""
        if name not in self._modules:
            path = name.replace(".", "/")
            for file in (f"{path}.py", f"{path}/__init__.py", f"{path}.pyi"):
                if (text := self._read(file)) is not None:
                    self._modules[name] = ast.parse(text), file.endswith("__init__.py")
                    break
            else:
                self._modules[name] = None, False
        return self._modules[name]

    def find(self, module: str, name: str, depth: int = 8) -> tuple[str, Any] | None:
        """(module, node) of a name, wherever it is imported from; a node that is a text is another package's module."""
        tree, is_package = self._module(module)
        found: tuple[str, Any] | None = None
        for node in _statements(tree.body if tree else []):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
                found = module, node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                if any(isinstance(t, ast.Name) and t.id == name for t in _targets(node)):
                    found = module, node
            elif isinstance(node, ast.ImportFrom) and depth and any((a.asname or a.name) == name for a in node.names):
                (original,) = (a.name for a in node.names if (a.asname or a.name) == name)
                parts = module.split(".") if is_package else module.split(".")[:-1]
                above = ".".join(parts[: len(parts) - node.level + 1]) + "." if node.level else ""
                source = (above + (node.module or "")).rstrip(".")
                if source != module:
                    found = self.find(source, original, depth - 1) or (source, source)
        if found is None and (tree is None or is_package) and self.module(f"{module}.{name}") is not None:
            return f"{module}.{name}", "module"
        return found

    def members(self, module: str, name: str, depth: int = 8) -> dict[str, str]:
        """What a class and those that it derives from have, and how."""
        at = self.find(module, name)
        if at is None or not isinstance(at[1], ast.ClassDef) or not depth:
            return {}
        where, node = at
        has: dict[str, str] = {}
        for base in reversed(node.bases):
            while isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name):
                has |= self.members(where, base.id, depth - 1)
        for part in _statements(node.body):
            if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if not any(isinstance(d, ast.Name) and d.id == "overload" for d in part.decorator_list):
                    has[part.name] = signature(part)
                for inner in ast.walk(part):
                    for t in _targets(inner):
                        if isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id == "self":
                            has.setdefault(t.attr, "attribute")
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                has[part.target.id] = "attribute"
            elif isinstance(part, ast.Assign):
                has |= {t.id: "attribute" for t in part.targets if isinstance(t, ast.Name)}
        return has

    def how(self, name: str) -> str | None:
        """How the release has a use; None where it has not."""
        made_here = name.endswith("()")
        module, _, rest = name.removesuffix("()").partition(":")
        first, _, inner = rest.partition(".")
        at = self.find(module, first)
        if at is None:
            above, _, last = module.rpartition(".")
            return _OF_A_VALUE if self.module(module) is None and above and self.find(above, last) else None
        if inner:
            return self.members(module, first).get(inner) if isinstance(at[1], ast.ClassDef) else _OF_A_VALUE
        where, node = at
        if isinstance(node, str):
            return "module" if node == "module" else f"of {node}"
        if isinstance(node, ast.ClassDef) and not made_here:
            return "class"
        if isinstance(node, ast.ClassDef):
            made = self.members(where, node.name).get("__init__", "")
            fields = [
                f"{p.target.id}{'=' if p.value else ''}" for p in node.body
                if isinstance(p, ast.AnnAssign) and isinstance(p.target, ast.Name)
            ]
            plain = "__init__" not in {p.name for p in node.body if isinstance(p, ast.FunctionDef)}
            return f"({', '.join(fields)})" if plain and fields else made
        return signature(node) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else "value"

    def calls(self, module: str, of: str) -> dict[str, str]:
        """By function: the methods of an object that it calls, in the order of its text."""
        found: dict[str, list[tuple[int, int, str]]] = {}
        tree = self.module(module)
        for outer in ast.walk(tree) if tree else ():
            if not isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for node in ast.walk(outer):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    value = node.func.value
                    if of in (getattr(value, "attr", ""), getattr(value, "id", "")):
                        found.setdefault(outer.name, []).append((node.lineno, node.col_offset, node.func.attr))
        return {f: " ".join(name for _, _, name in sorted(called)) for f, called in found.items()}


def _targets(node: ast.AST) -> list[ast.expr]:
    """What a statement gives a value."""
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or a class, also under conditions."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                for part in getattr(node, inner, []):
                    yield from _statements(part.body if isinstance(part, ast.ExceptHandler) else [part])


def signature(f: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """What a caller depends on: parameters, and what kind of function it is."""
    a = f.args
    positional = [*a.posonlyargs, *a.args]
    parts = [p.arg + ("=" if i >= len(positional) - len(a.defaults) else "") for i, p in enumerate(positional)]
    if a.vararg is not None:
        parts.append("*" + a.vararg.arg)
    elif a.kwonlyargs:
        parts.append("*")
    parts += [p.arg + ("=" if d is not None else "") for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    if a.kwarg is not None:
        parts.append("**" + a.kwarg.arg)
    decorators = {d.id if isinstance(d, ast.Name) else d.attr if isinstance(d, ast.Attribute) else "" for d in f.decorator_list}
    kind = [k for k in ("abstractmethod", "property", "classmethod", "staticmethod") if k in decorators]
    return " ".join([*kind, f"({', '.join(parts)})"])


def read(package: str, release: Release) -> dict[str, Any]:
    """The record of a release."""
    names: Names = {}
    for name in sorted(uses(package)):
        if name.endswith(".*"):
            module, _, cls = name.removesuffix(".*").partition(":")
            methods = {m: how for m, how in release.members(module, cls).items() if how != "attribute"}
            names |= {f"{module}:{cls}.{m}": how for m, how in methods.items()}
        else:
            names[name] = release.how(name)
    calls = {f"{module}:{f}": said for module, of in CALLERS[package].items() for f, said in release.calls(module, of).items()}
    return {"names": dict(sorted(names.items())), "calls": dict(sorted(calls.items()))}


def wheel(package: str, version: str) -> Release:
    """A release of the index, whose wheel is read and not kept."""
    with tempfile.TemporaryDirectory() as folder:
        ask = ["download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", folder]
        subprocess.run([sys.executable, "-m", "pip", *ask, f"{package}=={version}"], check=True)
        (path,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(path) as z:
            files = {n: z.read(n).decode() for n in z.namelist() if n.endswith((".py", ".pyi"))}
    return Release(files.get)


def newest(package: str) -> str:
    """The newest release of the index, pre-releases included. OSError where no index answers."""
    ask = ["--no-input", "--timeout", "15", "--retries", "1", "index", "versions", "--pre", package]
    done = subprocess.run([sys.executable, "-m", "pip", *ask], capture_output=True, text=True)
    said = re.search(r"^\S+ \(([^)]+)\)", done.stdout)
    if done.returncode or said is None:
        raise OSError(done.stderr.strip().rpartition("\n")[2] or "no answer")
    return said[1]


# ---- comparison -------------------------------------------------------------------------------------------------------


def differences(package: str, recorded: dict[str, Any]) -> dict[str, dict[str, str | None]]:
    """What is used and not the same in all releases: by name, how each has it."""
    found: dict[str, dict[str, str | None]] = {}
    mine = uses(package)
    overridden = set(overrides(package))
    names = sorted({n for r in recorded.values() for n in r["names"]})
    for name in names:
        how = {version: r["names"].get(name) for version, r in recorded.items()}
        asked = mine.get(name) is False and len({*how.values()} - {None}) < 2  # the code asks whether it is there
        if len(set(how.values())) > 1 and not asked and (name in mine or name in overridden or "abstractmethod" in str(how)):
            found[name] = how
    for name in sorted({n for r in recorded.values() for n in r["calls"]}):
        how = {version: r["calls"].get(name) for version, r in recorded.items()}
        if len(set(how.values())) > 1:
            found[f"calls of {name}"] = how
    return found


def overrides(package: str) -> dict[str, str]:
    """The methods that connectors' classes have of engines': by the engine's name for them, our signature."""
    found: dict[str, str] = {}
    for path in sorted(SOURCES[package][0].glob("*.py")):
        tree = ast.parse(path.read_text())
        imported = {
            (a.asname or a.name): f"{node.module}:{a.name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
            for a in node.names if (node.module or "").split(".")[0] == package
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if isinstance(base, ast.Name) and base.id in imported:
                        methods = (f for f in node.body if isinstance(f, ast.FunctionDef))
                        found |= {f"{imported[base.id]}.{f.name}": signature(f) for f in methods}
    return found


def missing(package: str, recorded: dict[str, Any]) -> list[str]:
    """Uses without a record, and those that a release has not though the code takes them for granted."""
    faults, mine = [], uses(package)
    for name, must in sorted(mine.items()):
        if name.endswith(".*"):
            if not any(n.startswith(name[:-1]) for r in recorded.values() for n in r["names"]) and name[:-2] not in mine:
                faults.append(f"{name}: a connector derives from it, and no method of it is recorded")
            continue
        for version, r in recorded.items():
            if name not in r["names"]:
                faults.append(f"{package} {version}: {name} is used and not recorded: python contracts.py record")
            elif must and r["names"][name] is None and name not in HANDLED:
                faults.append(f"{package} {version}: has no {name}, which is used")
    return faults


def main(args: list[str]) -> int:
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {p: {} for p in SOURCES}
    if args[:1] == ["record"]:
        wanted = [(args[1], args[2])] if len(args) > 2 else [(p, v) for p, releases in record.items() for v in releases]
        for package, version in wanted:
            print(f"reading the wheel of {package} {version}", file=sys.stderr)
            record[package][version] = read(package, wheel(package, version))
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        return 0
    faults: list[str] = []
    for package, releases in record.items():
        faults += missing(package, releases)
        differ = differences(package, releases)
        for name, how in differ.items():
            print(f"{name}\n" + "\n".join(f"  {version:9} {said}" for version, said in how.items()))
            print(f"  handled:  {HANDLED.get(name, 'NOT')}")
            if name not in HANDLED:
                faults.append(f"{package}: {name} differs between releases, and HANDLED does not say what the code does")
        print(f"{package}: {len(uses(package))} uses in {', '.join(releases)}, {len(differ)} of them differ")
        if "--offline" in args:
            continue
        try:
            if (version := newest(package)) not in releases:
                print(f"left out: {package} {version}, which the index has and the record lacks: python {Path(__file__).name} record "
                      f"{package} {version}")
        except OSError as e:
            print(f"left out: releases of {package} that the record lacks, as no index answers: {e}")
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
