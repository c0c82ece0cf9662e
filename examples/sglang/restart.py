"""Loads pages that SGLang's hierarchical cache stored in kvhost, after a restart of both.

    python restart.py --kvhost bin/kvhost [--root DIR]

The script starts kvhost and a process with SGLang's own host pool and storage backend, which writes the pages of a prompt. Then
it restarts both and reads the pages into other memory. It prints how many pages were found and their rate, and exits with 1 if
a page is missing or differs. It needs the modules of SGLang 0.5.23 for its hierarchical cache and the kvhost client (pip
install ./host/client/python), but no GPU and no model. With a GPU, this command serves a model in the same way:

    python -m sglang.launch_server --model-path MODEL --page-size 64 --enable-hierarchical-cache \\
      --hicache-mem-layout page_first_direct --hicache-io-backend direct --hicache-storage-backend dynamic \\
      --hicache-storage-backend-extra-config '{"backend_name":"kvhost","module_path":"kvhost.sglang",
        "class_name":"KvhostStorage","interface_v1":1,"allocator":"shm",
        "kvhost":{"socket":"/run/kvhost/kvhost.sock"}}'"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

PAGES, PAGE, LAYERS, HEADS, DIM = 100, 64, 16, 8, 128  # 6,400 tokens in pages of 4 MiB


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--kvhost", default="kvhost", help="the program")
    p.add_argument("--root", default="", help="where kvhost keeps chunks; default: a folder that is deleted at the end")
    p.add_argument("--server", metavar="SOCKET", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.server:
        run_server(args.server)
        return
    with tempfile.TemporaryDirectory(prefix="kvhost-sglang-") as folder:
        root, socket = args.root or folder + "/kv", folder + "/kvhost.sock"
        result = {}
        for turn in ("first", "second"):
            host = subprocess.Popen([args.kvhost, "--root", root + "=8GiB", "--socket", socket, "--http-listen", ""])
            while not os.path.exists(socket):
                if host.poll() is not None:
                    sys.exit("kvhost did not start")
                time.sleep(0.05)
            try:
                command = [sys.executable, __file__, "--server", socket]
                server = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            finally:
                host.send_signal(signal.SIGTERM)
                host.wait()
            result = json.loads(server.stdout.splitlines()[-1])
            print(f"{turn} run: {result['found']} of {PAGES} pages found, {result['right']} right; "
                  f"{result['what']} at {result['rate']:.1f} GB/s", flush=True)
    sys.exit(0 if result["right"] == PAGES else "the second run did not get all pages")


def run_server(socket: str) -> None:
    """Uses the host pool as a rank of a server does. The bytes of a page follow from its number."""
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    pool = host_pool()
    extra = {
        "backend_name": "kvhost", "module_path": "kvhost.sglang", "class_name": "KvhostStorage", "interface_v1": 1,
        "allocator": "shm", "kvhost": {"socket": socket},
    }
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="example", extra_config=extra,
    )
    storage = StorageBackendFactory.create_backend("dynamic", config, pool)
    storage.register_mem_pool_host(pool)
    hashes = list(get_storage_hash_str(list(range(PAGES * PAGE)), None, page_size=PAGE))

    def page(i: int) -> torch.Tensor:
        like = pool.get_dummy_flat_data_page()
        return torch.randn(like.numel(), generator=torch.Generator().manual_seed(i)).to(like.dtype)

    found = storage.batch_exists(hashes)
    if found == 0:
        for i in range(PAGES):
            pool.set_from_flat_data_page(i * PAGE, page(i))
    slots = torch.arange(PAGES * PAGE)
    start = time.monotonic()
    done = storage.batch_get_v1(hashes, slots) if found else storage.batch_set_v1(hashes, slots)
    elapsed = time.monotonic() - start
    right = sum(ok and torch.equal(pool.get_data_page(i * PAGE), page(i)) for i, ok in enumerate(done))
    rate = PAGES * page(0).nbytes / elapsed / 1e9
    storage.close()
    what = "read" if found else "written"
    print(json.dumps({"found": found, "right": right, "what": what, "rate": rate}), flush=True)


def host_pool() -> Any:
    """Returns SGLang's host pool, for a device pool that is not used."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    k, v = ([torch.zeros(PAGE, HEADS, DIM, dtype=torch.bfloat16) for _ in range(LAYERS)] for _ in "kv")
    k_pointers, v_pointers = (torch.tensor([t.data_ptr() for t in b], dtype=torch.uint64) for b in (k, v))
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(k), v=tuple(v), k_data_ptrs=k_pointers, v_data_ptrs=v_pointers, layout=KVBufferLayout.NHD
        ),
        page_size=PAGE, head_num=HEADS, head_dim=DIM, v_head_dim=DIM, dtype=torch.bfloat16, device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info, 1.0, 0, PAGE, "page_first_direct", pin_memory=False, allocator_type="shm", device_capacity_tokens=PAGE,
        start_layer=0, end_layer=LAYERS, host_token_capacity=PAGES * PAGE,
    )


if __name__ == "__main__":
    main()
