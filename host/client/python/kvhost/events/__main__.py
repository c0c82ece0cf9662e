"""Publishes a host's events over ZMQ in vLLM's format, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence

from kvhost.events import MEDIUMS
from kvhost.events.reader import EventReader
from kvhost.events.stream import EventStream, Position

log = logging.getLogger("kvhost.events")


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m kvhost.events", description=__doc__)
    default = os.environ.get("KVHOST_SOCKET") or "/run/kvhost/kvhost.sock"
    p.add_argument("--socket", default=default, help="the host's socket (%(default)s)")
    p.add_argument("--endpoint", default="tcp://*:5557", help="where batches are published (%(default)s)")
    p.add_argument("--replay-endpoint", default="", help="where old batches can be asked for (nowhere)")
    p.add_argument("--topic", required=True, help='"kv@NODE@MODEL" for llm-d')
    p.add_argument("--namespace", default="", help="only of the namespace with this digest, in hexadecimal (of all)")
    p.add_argument("--key-bytes", type=int, default=32, help="bytes of the namespace's keys (%(default)s)")
    p.add_argument("--block-size", type=int, default=256, help="tokens of a chunk (%(default)s)")
    p.add_argument("--medium", default="DISK", choices=MEDIUMS, help="the tier that events name (%(default)s)")
    p.add_argument("--events", choices=("maps", "arrays"), default="maps", help="arrays: as vLLM before 0.24")
    p.add_argument("--hashes", choices=("numbers", "bytes"), default="numbers",
                   help="keys as 64-bit numbers or whole (%(default)s)")
    p.add_argument("--buffer-steps", type=int, default=10_000, help="batches that are kept for replay (%(default)s)")
    p.add_argument("--hwm", type=int, default=100_000, help="batches queued per subscriber (%(default)s)")
    a = p.parse_args(argv)
    try:
        a.namespace = bytes.fromhex(a.namespace)
    except ValueError:
        p.error("--namespace: not hexadecimal")
    if len(a.namespace) not in (0, 16):
        p.error(f"--namespace: {len(a.namespace)} bytes, want 16")
    return a


def main(argv: Sequence[str]) -> int:
    a = arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        import zmq

        from kvhost.events.format import Format
        from kvhost.events.publisher import Publisher, Residents, Service
    except ImportError as e:
        log.error("%s; pip install 'kvhost[events]'", e)
        return 1
    try:
        publisher = Publisher(
            a.endpoint, a.topic, replay_endpoint=a.replay_endpoint, buffer_steps=a.buffer_steps, hwm=a.hwm
        )
    except zmq.ZMQError as e:
        log.error("cannot publish on %s %s: %s", a.endpoint, a.replay_endpoint, e)
        return 1

    def open(after: Position | None) -> EventStream:
        return EventStream.connect(a.socket, a.namespace, a.key_bytes, after)

    reader = EventReader(open, limit=1 << 16)
    format = Format(
        arrays=a.events == "arrays", whole_hashes=a.hashes == "bytes", medium=a.medium, block_size=a.block_size
    )
    service = Service(reader, publisher, Residents(format))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    log.info("publishing the events of %s on %s, topic %s", a.socket, a.endpoint, a.topic)
    try:
        service.run()
    finally:
        reader.close()
        publisher.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
