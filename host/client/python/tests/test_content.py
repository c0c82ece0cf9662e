"""What is told of the content of files of weights."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from waits import left

from kvhost.content import Changing, Digests, Unknown, fingerprint, of_model, version


def adapter(folder: Path, weights: bytes = b"weights", **files: bytes) -> str:
    folder.mkdir(exist_ok=True)
    all_files = {"adapter_config.json": b"{}", "adapter_model.safetensors": weights}
    for name, content in {**all_files, **{k.replace("__", "."): v for k, v in files.items()}}.items():
        (folder / name).write_bytes(content)
    return str(folder)


def digest(folder: str) -> bytes:
    return Digests().of(folder)[1]


def test_equal_files_are_equal_anywhere_and_at_any_time(tmp_path: Path) -> None:
    first, second = adapter(tmp_path / "a"), adapter(tmp_path / "b", README__md=b"another")
    os.utime(tmp_path / "b" / "adapter_config.json", (1, 1))
    assert digest(first) == digest(second)
    assert version(first) != version(second)


@pytest.mark.parametrize(
    "files",
    [{"adapter_model__safetensors": b"Weights"}, {"adapter_config__json": b"{ }"}, {"added_tokens__json": b"{}"},
     {"more__safetensors": b""}, {"adapter_model__bin": b""}],
)  # fmt: skip
def test_whatever_an_engine_reads_decides(tmp_path: Path, files: dict[str, bytes]) -> None:
    assert digest(adapter(tmp_path / "a")) != digest(adapter(tmp_path / "b", **files))


def test_content_does_not_move_between_files(tmp_path: Path) -> None:
    first = adapter(tmp_path / "a", b"ab", more__safetensors=b"c")
    second = adapter(tmp_path / "b", b"a", more__safetensors=b"bc")
    assert digest(first) != digest(second)


def test_weights_of_pytorch(tmp_path: Path) -> None:
    for name in ("a", "b"):
        adapter(tmp_path / name, adapter_model__bin=b"same")
        (tmp_path / name / "adapter_model.safetensors").unlink()
    (tmp_path / "b" / "adapter_model.bin").write_bytes(b"Same")
    assert digest(str(tmp_path / "a")) != digest(str(tmp_path / "b"))


def _replace(file: Path) -> None:
    file.with_suffix(".new").write_bytes(file.read_bytes())
    file.with_suffix(".new").replace(file)


def _overwrite(file: Path) -> None:
    ctime = file.stat().st_ctime_ns
    while file.stat().st_ctime_ns == ctime:  # the clock of files ticks
        with file.open("r+b") as f:
            f.write(b"W")


def _add(file: Path) -> None:
    (file.parent / "more.safetensors").touch()


@pytest.mark.parametrize("change", [_replace, _overwrite, _add])
def test_a_change_is_another_version(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = adapter(tmp_path / "a")
    before = version(folder)
    assert version(folder) == before
    change(Path(folder) / "adapter_model.safetensors")
    assert version(folder) != before


def test_a_digest_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, known = adapter(tmp_path / "a"), Digests()
    first = known.of(folder)
    monkeypatch.setattr("kvhost.content._digest", lambda folder: pytest.fail("the files were read again"))
    assert known.of(folder) == first


def test_files_that_change_while_they_are_read_have_no_digest(tmp_path: Path) -> None:
    folder = Path(adapter(tmp_path / "a"))
    (folder / "more.safetensors").unlink(missing_ok=True)
    os.mkfifo(folder / "z.safetensors")  # the reader waits here, with the other files read
    failure: list[Exception] = []

    def read() -> None:
        try:
            Digests().of(str(folder))
        except Unknown as e:
            failure.append(e)

    reader = threading.Thread(target=read)
    reader.start()
    with (folder / "z.safetensors").open("wb"):
        _replace(folder / "adapter_model.safetensors")
    reader.join(left())
    assert [str(e) for e in failure] == [f"{folder}: its files changed while they were read"]


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors", "."])
def test_what_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    folder = Path(adapter(tmp_path / "a"))
    if missing == ".":
        folder = tmp_path / "none"
    else:
        (folder / missing).unlink()
    with pytest.raises(Unknown, match=str(folder)):
        Digests().of(str(folder))


def safetensors(file: Path, tensors: int, size: int, changed: int = -1) -> None:
    header = json.dumps({f"t{i}": {"dtype": "F32", "data_offsets": [i * size, (i + 1) * size]} for i in range(tensors)})
    body = b"".join(bytes([i + (i == changed)]) * size for i in range(tensors))
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + body)


def test_a_models_fingerprint_has_every_tensor(tmp_path: Path) -> None:
    prints = set()
    for changed in range(-1, 12):
        folder = tmp_path / str(changed)
        folder.mkdir()
        safetensors(folder / "model.safetensors", 12, 1 << 16, changed)
        (folder / "tokenizer.json").write_text(str(changed))
        prints.add(fingerprint(str(folder)))
    assert len(prints) == 13
    folder = tmp_path / "again"
    folder.mkdir()
    safetensors(folder / "model.safetensors", 12, 1 << 16)
    assert fingerprint(str(folder)) == fingerprint(str(tmp_path / "-1"))
    assert fingerprint(str(folder / "model.safetensors")) == fingerprint(str(folder))


@pytest.mark.parametrize("settings", ["config.json", "hf_quant_config.json", "preprocessor_config.json", "modeling_x.py"])
def test_settings_beside_the_weights_decide(tmp_path: Path, settings: str) -> None:
    safetensors(tmp_path / "model.safetensors", 1, 64)
    seen = {fingerprint(str(tmp_path))}
    for text in ("{}", "{ }"):
        (tmp_path / settings).write_text(text)
        seen.add(fingerprint(str(tmp_path)))
    assert len(seen) == 3


def test_weights_of_all_formats_decide(tmp_path: Path) -> None:
    """An engine may take the others, by its load_format."""
    safetensors(tmp_path / "model.safetensors", 1, 64)
    seen = {fingerprint(str(tmp_path))}
    for content in (b"a", b"b"):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        seen.add(fingerprint(str(tmp_path)))
    assert len(seen) == 3


def test_a_gguf_of_several_files_is_all_of_them(tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf", "another.gguf"):
        (tmp_path / name).write_bytes(b"x")
    seen = [fingerprint(str(tmp_path / "m-00001-of-00002.gguf"))]
    for name in ("m-00002-of-00002.gguf", "mmproj-m.gguf", "another.gguf"):
        (tmp_path / name).write_bytes(b"y")
        seen.append(fingerprint(str(tmp_path / "m-00001-of-00002.gguf")))
    assert len(set(seen[:3])) == 3 and seen[3] == seen[2]


def test_a_models_files_that_changed_since_then(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors", 2, 64)
    fingerprint(str(tmp_path), time.time() + 1)
    with pytest.raises(Changing, match="model.safetensors changed after this process had started"):
        fingerprint(str(tmp_path), time.time() - 3600)


def test_a_process_knows_when_it_was_started() -> None:
    code = "import time; from kvhost.content import process_start; print(process_start(), time.time())"
    before = time.time()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert before - 0.1 < float(said[0]) < float(said[1])


def test_a_model_elsewhere_is_unknown(tmp_path: Path) -> None:
    for path in (str(tmp_path / "none"), "s3://bucket/model", str(tmp_path)):
        with pytest.raises(Unknown, match=path):
            of_model(path)
