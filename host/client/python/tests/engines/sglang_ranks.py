"""One of several ranks of tensor parallelism, in a process of its own: sglang_ranks.py RANK RANKS PORT SOCKET. It writes a line of JSON for
each request."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs
from sglang_pools import SHAPES, Rank, Served

from kvhost.errors import KvhostError
from kvhost.sglang import plugin


def fail(*of: Any) -> None:
    raise KvhostError("made to fail")


def main() -> None:
    number, ranks, port, socket = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    plugin.register()
    HookRegistry.apply_hooks()
    get_context().set_server_args(ServerArgs(model_path="dummy", load_format="dummy"))
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=ranks)
    rank = Rank(SHAPES["full"], {"socket": socket}, tp_cache_group=torch.distributed.new_group(list(range(ranks))))
    dice = random.Random(7)  # the same on all ranks
    tokens = [dice.randrange(50_000) for _ in range(160)]

    def say(what: str, served: Served) -> None:
        print(json.dumps({"what": what, "loaded": served.loaded, "aborted": served.aborted,
                          "wrong": [] if served.aborted else served.wrong}), flush=True)

    def serve(what: str) -> None:
        say(what, rank.serve([*tokens, 1]))
        rank.settle()
        torch.distributed.barrier()
        rank.forget()

    rank.serve(tokens)
    rank.settle()
    torch.distributed.barrier()
    rank.forget()
    serve("all pages")
    last = number == ranks - 1
    names = rank.linker._names(rank.keys(tokens))
    if last:
        rank.linker._latest().discard([names[5]])
    serve("one rank lacks a page")
    if last:
        late = rank.linker.load

        def load(rid: str, transfers: list[Any]) -> bool:
            rank.linker._found.clear()
            rank.linker.load = late
            return bool(late(rid, transfers))

        rank.linker.load = load
    serve("one rank cannot load what it has found")
    if last:
        rank.linker._wait = fail
    serve("the load of one rank fails")
    if last:
        del rank.linker._wait
    serve("all pages again")
    rank.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
