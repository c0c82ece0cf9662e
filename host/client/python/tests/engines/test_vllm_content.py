"""vLLM's own engine on a processor, with weights that are replaced in place: no KV of other weights is served, whatever
a LoRA adapter or a model is called and wherever its files are."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm_model as model
from needs import needs
from processes import Host
from test_vllm import HITS, LONG
from vllm_engine import Engine, Tokens

needs("vllm")

PROMPT = LONG[0]
LORA = {"enable_lora": True, "max_loras": 2}
Adapter = tuple[str, int, str]


class Setting:
    def __init__(self, folder: Path) -> None:
        self.folder, self.adapter = folder, folder / "adapter"
        self.llama = folder / "llama"
        model.write(self.llama, model.config(3), seed=7)
        for i in range(3):
            model.write_lora(folder / f"content{i}", model.config(3), seed=20 + i)
        engine = Engine(folder, "reference", self.llama, None, blocks=64, vllm=LORA)
        self.want = [engine.generate([PROMPT], 8, (f"c{i}", 1 + i, self.path(i)))[0][0] for i in range(3)]
        engine.stop()
        assert len({tuple(t) for t in self.want}) == 3, "the adapters change nothing"
        self.host = Host(folder)
        self.host.start()
        self._starts = 0

    def path(self, content: int) -> str:
        return str(self.folder / f"content{content}")

    def replace(self, content: int) -> None:
        replace(self.adapter, Path(self.path(content)))

    def engine(self) -> Engine:
        self._starts += 1
        return Engine(self.folder, f"engine{self._starts}", self.llama, self.host, blocks=64, vllm=LORA)


def replace(folder: Path, by: Path) -> None:
    """Gives a folder another's files, each at once, under the names that they have."""
    folder.mkdir(exist_ok=True)
    for file in by.iterdir():
        copy = shutil.copy(file, folder / f"{file.name}.new")
        Path(copy).replace(folder / file.name)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    s = Setting(tmp_path_factory.mktemp("lora"))
    yield s
    s.host.kill()


def answer(engine: Engine, adapter: Adapter) -> tuple[Tokens, int]:
    """The tokens of the prompt, and how many of it kvhost had: the engine's own cache is empty."""
    engine.reset()
    return engine.generate([PROMPT], 8, adapter)[0]


def test_an_adapter_replaced_between_two_engines(setting: Setting) -> None:
    adapter = ("name", 1, str(setting.adapter))
    setting.replace(0)
    engine = setting.engine()
    assert answer(engine, adapter) == (setting.want[0], 0)
    assert answer(engine, adapter) == (setting.want[0], HITS)
    engine.stop()
    setting.replace(1)
    engine = setting.engine()
    try:
        assert answer(engine, adapter) == (setting.want[1], 0)
        assert answer(engine, adapter) == (setting.want[1], HITS)
        assert answer(engine, ("another", 2, setting.path(0))) == (setting.want[0], HITS)
    finally:
        engine.kill()


def test_an_adapter_replaced_under_a_running_engine(setting: Setting) -> None:
    adapter = ("name", 1, str(setting.adapter))
    setting.replace(0)
    engine = setting.engine()
    try:
        assert answer(engine, adapter)[0] == setting.want[0]
        assert answer(engine, adapter) == (setting.want[0], HITS)
        setting.replace(2)
        for _ in range(2):  # the engine still has the old weights in memory
            assert answer(engine, adapter) == (setting.want[0], 0)
        engine.ask("remove_lora", 1)
        assert answer(engine, adapter) == (setting.want[2], 0)
        assert answer(engine, adapter)[0] == setting.want[2]  # it was stored by one of the two
        assert answer(engine, adapter) == (setting.want[2], HITS)
        setting.replace(1)
        engine.ask("add_lora", adapter)
        for _ in range(2):
            assert answer(engine, adapter)[0] == setting.want[1]
        assert answer(engine, adapter) == (setting.want[1], HITS)
        assert answer(engine, ("name", 2, setting.path(2))) == (setting.want[2], HITS)
    finally:
        engine.kill()


def test_blocks_of_old_weights_are_not_stored_as_the_new_ones(setting: Setting) -> None:
    """vLLM's own cache knows an adapter by its name, and goes on to use blocks that its old weights have computed."""
    adapter = ("name", 1, str(setting.adapter))
    longer = PROMPT + LONG[1][:600]
    setting.replace(0)
    engine = setting.engine()
    engine.generate([PROMPT], 8, adapter)
    setting.replace(2)
    engine.ask("add_lora", adapter)
    engine.generate([longer], 8, adapter)
    engine.stop()
    reference = Engine(setting.folder, "longer-reference", setting.llama, None, blocks=64, vllm=LORA)
    want = reference.generate([longer], 8, adapter)[0][0]
    reference.stop()
    engine = setting.engine()
    try:
        assert engine.generate([longer], 8, adapter)[0][0] == want
    finally:
        engine.kill()


def test_an_adapter_without_files_is_computed(setting: Setting) -> None:
    adapter = ("gone", 1, str(setting.adapter))
    setting.replace(1)
    engine = setting.engine()
    try:
        assert answer(engine, adapter) == (setting.want[1], HITS)
        shutil.rmtree(setting.adapter)
        for _ in range(2):
            assert answer(engine, adapter) == (setting.want[1], 0)
        said = [line for line in engine.log.read_text().splitlines() if "LoRA adapter 'gone'" in line]
        assert len(said) == 1 and str(setting.adapter) in said[0]
    finally:
        engine.kill()


def test_a_model_replaced_between_two_engines(setting: Setting) -> None:
    folder, want = setting.folder / "model", []
    for seed in (7, 9):
        model.write(setting.folder / f"seed{seed}", model.config(3), seed=seed)
        engine = Engine(setting.folder, f"seed{seed}-reference", setting.folder / f"seed{seed}", None, blocks=64)
        want.append(engine.generate([PROMPT])[0][0])
        engine.stop()
    assert want[0] != want[1]
    for round, (seed, found) in enumerate([(7, 0), (9, 0), (7, HITS)]):
        replace(folder, setting.folder / f"seed{seed}")
        engine = Engine(setting.folder, f"model{round}", folder, setting.host, blocks=64)
        try:
            assert engine.generate([PROMPT])[0] == (want[seed == 9], found)
        finally:
            engine.stop()
