"""Measure replicas on Ray Serve: python -m bench.ray_serve affinity, into bench/results/ray-serve.json.

The exit code is 1 where a figure is not what is promised.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from bench.machine import cores, cpu_name, current_commit, versions

RESULT = Path(__file__).parents[1] / "results" / "ray-serve.json"
PARTS = ("affinity", "scaling", "recovery", "throughput")


def main() -> int:
    """Run what is named, one after the other; each replaces its part of the file."""
    parser = argparse.ArgumentParser(prog="python -m bench.ray_serve", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--haproxy", action="store_true", help="Ray's HAProxy for its own proxy; parts NAME_haproxy")
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.haproxy:
        os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"  # Ray reads it when it is imported
    failed = []
    for name in options.parts:
        part = import_module(f"bench.ray_serve.{name}")
        before = os.getloadavg()
        measured = part.measure()
        about = {
            "commit": current_commit(),
            "processor": cpu_name(),
            "cores": cores(),
            "versions": {**versions(), "ray": version("ray")},
            "load_averages": {"before": before, "after": os.getloadavg()},
        }
        result = json.loads(options.json.read_text()) if options.json.exists() else {}
        result[name + "_haproxy" * options.haproxy] = {**about, **measured}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        failed += [f"{name}: {failure}" for failure in part.failures(measured)]
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
