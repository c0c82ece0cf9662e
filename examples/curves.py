#!/usr/bin/env python3
"""Reads the output of `kvhost sim --json` from standard input and draws its miss-ratio curves to the named file. It needs
matplotlib."""

import argparse
import json
import sys

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("file", help="the SVG to write")
to = parser.parse_args().file

try:
    import matplotlib
except ImportError:
    sys.exit("curves.py needs matplotlib: pip install matplotlib")

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "kvhost"  # the same results then give the same bytes
import matplotlib.pyplot as plt  # noqa: E402

results = json.load(sys.stdin)
traces = list(dict.fromkeys(r["trace"] for r in results))
figure, axes = plt.subplots(1, len(traces), figsize=(7 * len(traces), 4.5), squeeze=False, layout="constrained")
for trace, axis in zip(traces, axes[0]):
    rows = [r for r in results if r["trace"] == trace]
    for policy in dict.fromkeys(r["policy"] for r in rows):
        points = sorted((r["capacity"], r["miss_ratio"]) for r in rows if r["policy"] == policy)
        baseline = policy in ("belady", "infinite")
        axis.plot(*zip(*points), marker="o", markersize=4, label=policy.removesuffix(".wasm"), linestyle="--" if baseline else "-")
    axis.set(title=f"{trace}, {rows[0]['accesses']:,} accesses", xlabel="capacity, chunks", ylabel="miss ratio", xscale="log")
    axis.grid(alpha=0.3)
    axis.legend()
figure.savefig(to, metadata={"Date": None})
