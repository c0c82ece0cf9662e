"""A host that exports spans: those of a client's requests have the client's trace."""

from __future__ import annotations

import http.server
import os
import queue
import subprocess
import tempfile
import threading

import kvhost
from waits import left, until

TRACE, SPAN, PAGE = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", 4096


def test_spans_have_the_clients_trace() -> None:
    exports: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            exports.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVHOST_")}
    with tempfile.TemporaryDirectory() as d:  # a socket's path is short
        host = subprocess.Popen(
            [
                os.environ["KVHOST_BIN"], "--socket", f"{d}/s", "--root", f"{d}/kv=16MiB", "--http-listen", "",
                "--otlp-endpoint", f"http://127.0.0.1:{server.server_port}", "--otlp-sample-ratio", "0",
            ],
            env=env, stderr=subprocess.PIPE,
        )
        try:
            until("the host serves", lambda: os.path.exists(f"{d}/s") or host.poll() is not None)
            assert host.poll() is None
            requests(f"{d}/s")
            body = b""
            while body.count(b"kvhost.discard") < 1:
                body += exports.get(timeout=left())
        finally:
            host.terminate()
            _, log = host.communicate(timeout=left())
            server.shutdown()
            server.server_close()
    assert log.count(b"client closed the session") == log.count(b"session ended") == 1  # and did not crash
    for name in (b"kvhost.lookup", b"kvhost.store", b"kvhost.load", b"kvhost.discard"):
        assert body.count(name + b"0") == 1, name  # and the next field; what names no trace has no spans
    assert body.count(bytes.fromhex(TRACE)) == 6  # and two of pieces
    assert body.count(bytes.fromhex(SPAN)) == 3  # the load is a child of its lookup


def requests(socket: str) -> None:
    group = kvhost.Group.uniform(0, blocks=1, layers=1, parts=1, page_bytes=PAGE)
    ns = kvhost.Namespace(model="m", dtype="bf16", key_bytes=32, tokens_per_block=16, groups=[group])
    key, trace = bytes(31) + b"k", f"00-{TRACE}-{SPAN}-01"
    with kvhost.Arena(2 * PAGE) as arena, kvhost.Session(socket, "e", ns) as s:
        s.register(0, arena, [kvhost.Region(0, PAGE, 2)])
        s.store([kvhost.StoreChunk(key, [0])], traceparent=trace).published(left())
        assert s.lookup([key]).hits == 1
        assert not s.load(s.lookup([key], traceparent=trace), [kvhost.LoadChunk(0, [1])]).wait(left()).failed
        assert s.load(s.lookup([key]), [kvhost.LoadChunk(0, [1])]).wait(left()).failed == []
        s.discard([bytes(31) + b"x"], traceparent=trace)
