"""The connector interface of vLLM releases, read from their wheels' source:

    python vllm_signatures.py 0.26.0=vllm-0.26.0-....whl 0.33.0=vllm-0.33.0-....whl > vllm_signatures.json

Nothing is installed or imported. test_vllm_signatures.py compares the connector with what is recorded."""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from typing import Any

BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
CLASSES = ("KVConnectorBase_V1", "SupportsHMA", "KVConnectorTransferResults", "KVConnectorWorkerMetadata")

Signature = dict[str, Any]


def signature(f: ast.FunctionDef) -> Signature:
    """What a caller depends on: parameters, and what kind of method it is."""
    a = f.args
    decorators = {d.id for d in f.decorator_list if isinstance(d, ast.Name)}
    return {
        "parameters": [p.arg for p in [*a.posonlyargs, *a.args]],
        "defaults": len(a.defaults),
        "keywords": [p.arg for p in a.kwonlyargs],
        "var_positional": a.vararg is not None,
        "var_keyword": a.kwarg is not None,
        "kind": next((k for k in ("property", "classmethod", "staticmethod") if k in decorators), "method"),
        "abstract": "abstractmethod" in decorators,
    }


def classes(source: str) -> dict[str, dict[str, Any]]:
    """The methods and annotated fields of every class in a module."""
    found: dict[str, dict[str, Any]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                "methods": {f.name: signature(f) for f in node.body if isinstance(f, ast.FunctionDef)},
                "fields": [
                    n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                ],
            }
    return found


def main() -> None:
    releases = {}
    for argument in sys.argv[1:]:
        release, _, wheel = argument.partition("=")
        with zipfile.ZipFile(wheel) as z:
            read = classes(z.read(BASE).decode())
        releases[release] = {name: read[name] for name in CLASSES if name in read}
    json.dump(releases, sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == "__main__":
    main()
