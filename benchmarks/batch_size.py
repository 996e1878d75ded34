"""What scaling the learning rate with the batch is worth: a study on Fashion-MNIST, which docs/batch-size.md tells of.

`python -m benchmarks.batch_size` trains batch 64 to 1024 with the linear rule and warm-up, the square-root rule
and warm-up, and no rule, several seeds each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from paceline.visualize.charts import draw_curves
from paceline.visualize.image import save_png

DOCS = Path(__file__).resolve().parent.parent / "docs"
BATCHES = (64, 256, 1024)
LR = 0.05  # at batch 64
RULES = {
    "linear rule, warm-up": ["optimizer.base_batch_size=64", "optimizer.lr_scaling=linear"],
    "square-root rule, warm-up": ["optimizer.base_batch_size=64", "optimizer.lr_scaling=sqrt"],
    "no rule": ["optimizer.base_batch_size=null", "schedule.warmup=none", "schedule.warmup_epochs=null"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    results: dict[str, dict[int, list[float]]] = {rule: {} for rule in RULES}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # each run is a process with one thread
        for batch in BATCHES:
            for rule, overrides in RULES.items():
                if batch == BATCHES[0] and "square" in rule:  # at the reference batch the two rules are the same run
                    results[rule][batch] = results["linear rule, warm-up"][batch]
                    continue
                seeds = range(options.seeds)
                results[rule][batch] = list(pool.map(partial(accuracy, batch, overrides, options), seeds))
                print(batch, rule, results[rule][batch], flush=True)
    show(results, options)


def accuracy(batch: int, overrides: list[str], options: argparse.Namespace, seed: int) -> float:
    """Validation top-1 of one run."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [
            f"data.batch_size={batch}", f"train.seed={seed}", f"train.epochs={options.epochs}",
            "model.widths=[8,16,32]", "train.threads=1",
            "optimizer.name=sgd", f"optimizer.lr={LR}", "optimizer.momentum=0.9", "optimizer.weight_decay=5e-4",
            "schedule.warmup_epochs=0.5", f"evaluate.every_epochs={options.epochs}", "logging.images=false",
            f"checkpoint.every_epochs={options.epochs}", "expect.top1=0",
        ]  # fmt: skip
        command = [sys.executable, "-m", "paceline", "train", "fashion", *fixed, *overrides, "--out", f"{folder}/run"]
        subprocess.run(command, check=True, capture_output=True)
        records = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    metric: float = [record for record in records if record["split"] == "val"][-1]["top1"]
    return metric


def show(results: dict[str, dict[int, list[float]]], options: argparse.Namespace) -> None:
    """Print the table and draw the plot."""
    curves = {
        rule: (list(by_batch), [statistics.mean(values) for values in by_batch.values()])
        for rule, by_batch in results.items()
    }
    title = f"Fashion-MNIST after {options.epochs} epochs, mean of {options.seeds} seeds"
    save_png(draw_curves(curves, title, "batch", "top-1", log_x=True), DOCS / "batch-size.png")
    header = "| rule | " + " | ".join(f"batch {batch}" for batch in BATCHES) + " |\n|---|" + "---|" * len(BATCHES)
    rows = [
        f"| {rule} | " + " | ".join(_cell(by_batch[batch]) for batch in BATCHES) + " |"
        for rule, by_batch in results.items()
    ]
    print("\n".join([header, *rows]))


def _cell(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}" if len(values) > 1 else f"{values[0]:.4f}"


if __name__ == "__main__":
    main()
