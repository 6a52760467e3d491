"""Accuracy at equal bytes: methods with the same codes in both directions, on one fleet.

    python -m benchmarks.equal_bytes --data DIR                     # the whole proof, hours
    python -m benchmarks.equal_bytes --data DIR --scene NAME [--rows NAME,...] [--seeds 5]

Each finished run is one line of benchmarks/results/equal-bytes.jsonl: its settings, and its curves
of G and P against bytes, rounds, GFLOP and seconds of the fleet.  What is there is not trained
again, so that the command can be stopped and started, and several processes can share the work.
The learning rate of a row is chosen on validation samples (seed 0), from a grid that grows until
its best value lies inside.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.equal_bytes.rows import (
    BUDGET,
    RATES_OF_ROW,
    RATES_OF_SCENE,
    ROWS,
    SCENES,
    TUNING_BUDGET,
    byte_share,
    proof,
    settings_of,
)
from benchmarks.equal_bytes.training import train, validated
from benchmarks.records import once

NAME = "equal-bytes"
FIRST_GRID = (0.5, 1.0, 2.0)
TUNING_SEED = 0


def learning_rate(scene: str, row: str, data: Path | None) -> float | None:
    """The best learning rate of a row, inside its grid; None if it is being looked for."""
    scene, row = RATES_OF_SCENE.get(scene, scene), RATES_OF_ROW.get(row, row)
    share = byte_share(row, TUNING_BUDGET)
    found: dict[float, float] = {}
    grid = list(FIRST_GRID)
    while True:
        for lr in grid:
            settings = settings_of(scene, row, TUNING_SEED, lr)

            def score(settings: Any = settings) -> dict[str, Any]:
                began = time.process_time()
                G = validated(settings, data, share)
                return {"G": G, "cpu": round(time.process_time() - began)}

            line = once(NAME, score, kind="validation", scene=scene, row=row, lr=lr)
            if line is None:
                return None
            found[lr] = line["G"]
        best = max(found, key=lambda lr: found[lr])
        if best == min(found):
            grid.append(round(best / 2, 4))
        elif best == max(found):
            grid.append(best * 2)
        else:
            return best


def train_all(runs: Iterable[tuple[str, str, int]], data: Path | None, lr: float | None) -> None:
    """Train the runs that are not recorded yet, one after the other."""
    for scene, row, seed in runs:
        rate = lr or learning_rate(scene, row, data)
        if rate is None:
            continue
        settings = settings_of(scene, row, seed, rate)
        share = byte_share(row, BUDGET)

        def line(settings: Any = settings, share: float | None = share) -> dict[str, Any]:
            began = time.process_time()
            result = train(settings, data, share)
            return {**result, "cpu": round(time.process_time() - began)}

        once(NAME, line, kind="run", scene=scene, row=row, seed=seed, lr=rate)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equal_bytes", description=__doc__)
    parser.add_argument("--data", type=Path, default=None, help="the folder of data sets")
    parser.add_argument("--scene", help=", ".join(SCENES) + "; without it, the whole proof")
    parser.add_argument("--rows", default=",".join(ROWS), help="rows, separated by commas")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, help="a learning rate that is not tuned, for a look")
    options = parser.parse_args(arguments)
    rows = options.rows.split(",")
    unknown = [name for name in rows if name not in ROWS]
    if unknown or (options.scene is not None and options.scene not in SCENES):
        sys.exit(
            f"unknown {', '.join(unknown) or options.scene}; "
            f"rows: {', '.join(ROWS)}; scenes: {', '.join(SCENES)}"
        )
    torch.set_num_threads(1)
    runs: Iterable[tuple[str, str, int]] = proof()
    if options.scene is not None:
        runs = ((options.scene, row, seed) for seed in range(options.seeds) for row in rows)
    train_all(runs, options.data, options.lr)


if __name__ == "__main__":
    main()
