"""Retrieves KV caches that LMCache stored in kvhost, after a restart of both.

    python restart.py --kvhost bin/kvhost [--root DIR]

The script starts kvhost and LMCache's server, and stores the KV caches of two requests with LMCache's own bench. Then it
restarts both processes and retrieves the caches. It prints the results of the bench's lookups and the checksums. It exits
with 1 if the second run hit nothing or retrieved other bytes. It needs LMCache 0.5.6 and the kvhost client (pip install
./host/client/python), but no GPU and no model."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable

RPC, HTTP, PROMETHEUS = 5556, 8081, 9091


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--kvhost", default="kvhost", help="the program")
    p.add_argument("--root", default="", help="where kvhost keeps chunks; default: a folder that is deleted at the end")
    args = p.parse_args()
    os.environ.update(LMCACHE_DISABLE_BANNER="1", LMCACHE_TRACK_USAGE="false")
    with tempfile.TemporaryDirectory(prefix="kvhost-lmcache-") as folder:
        root, socket = args.root or folder + "/kv", folder + "/kvhost.sock"
        runs = []
        for turn in ("first", "second"):
            host = subprocess.Popen([args.kvhost, "--root", root + "=8GiB", "--socket", socket, "--http-listen", ""])
            server = None
            try:
                wait("kvhost", host, lambda: os.path.exists(socket))
                server = subprocess.Popen(server_command(socket))
                wait("LMCache's server", server, healthy)
                runs.append(bench())
            finally:
                for process in filter(None, (server, host)):
                    process.send_signal(signal.SIGTERM)
                    process.wait()
            hits, checksums = runs[-1]
            print(f"{turn} run: chunks found {', '.join(hits)}; checksums {', '.join(checksums)}", flush=True)
    if not all(re.fullmatch(r"(\d+)/\1", hit) for hit in runs[1][0]):
        sys.exit("the second run missed chunks that the first had stored")
    if runs[0][1] != runs[1][1]:
        sys.exit("the second run retrieved other bytes than the first stored")


def server_command(socket: str) -> list[str]:
    adapter = {
        "type": "plugin", "module_path": "kvhost.lmcache", "class_name": "KvhostL2Adapter",
        "adapter_params": {"socket": socket},
    }
    return [
        "lmcache", "server", "--transport", "grpc", "--supported-transfer-mode", "engine_driven", "--port", str(RPC),
        "--http-port", str(HTTP), "--prometheus-port", str(PROMETHEUS), "--l1-size-gb", "1", "--no-l1-use-lazy",
        "--shm-name", "kvhost-example", "--eviction-policy", "LRU",
        "--l2-adapter", json.dumps(adapter),
    ]


def bench() -> tuple[list[str], list[str]]:
    """Runs the bench once. Returns the result of each request's first lookup, and the checksums of the retrieved bytes."""
    command = [
        "lmcache", "bench", "server", "--mode", "cpu", "--transfer-mode", "engine_driven",
        "--rpc-url", f"grpc://localhost:{RPC}", "--url", f"http://localhost:{HTTP}", "--end", "2",
        "--num-blocks", "128", "--kvcache-shape-spec", "(2,128,16,8,128):float16:8",
    ]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return re.findall(r"/cold\] LOOKUP: (\d+/\d+)", said), re.findall(r"/warm\] CHECKSUM: (\w+)", said)


def healthy() -> bool:
    try:
        with urllib.request.urlopen(f"http://localhost:{HTTP}/healthcheck", timeout=5):
            return True
    except OSError:
        return False


def wait(what: str, process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
    while not ready():
        if process.poll() is not None:
            sys.exit(f"{what} did not start")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
