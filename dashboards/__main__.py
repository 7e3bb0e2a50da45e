"""python -m dashboards: write the dashboards' JSON."""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.nf4 import nf4
from dashboards.overview import overview

FOLDER = Path(__file__).parent.parent / "docker/grafana/dashboards"


def documents() -> dict[str, str]:
    """File name to JSON text."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {f"{name}.json": encoder.encode(make().build()) + "\n" for name, make in BOARDS.items()}


BOARDS = {"overview": overview, "nf4": nf4}

if __name__ == "__main__":
    for name, text in documents().items():
        (FOLDER / name).write_text(text)
        print(FOLDER / name)
