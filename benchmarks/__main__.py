"""`python -m benchmarks [NAME …] [--quick]`: measure, print tables, and after a full run write the page of results."""

from __future__ import annotations

import argparse
import importlib

from benchmarks.report import PAGE, machine, show, write_page

NAMES = (
    "step",
    "loader",
    "images",
    "image_training",
    "video",
    "startup",
    "sampler",
    "validation",
    "optimizers",
    "memory",
    "plan",
    "saving",
    "sharing",
    "busy",
    "precisions",
    "pixel_precisions",
    "task_precisions",
    "saliency",
    "predict",
)


def main() -> None:
    """Run the benchmarks that are asked for, or all of them."""
    parser = argparse.ArgumentParser("benchmarks", description="How fast Paceline is.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="few repeats: to see that it works, not to quote")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]}; there are {', '.join(NAMES)}")
    machine()  # what is not installed is better known now than after hours
    for name in options.names or NAMES:
        print(f"\n{name}")
        section = importlib.import_module(f"benchmarks.{name}").measure(options.quick)
        show(section)
        if not options.quick:
            write_page([section])  # at once, since a run takes long and may be cut short
    if options.quick:
        print(f"\n{PAGE} is left as it is by a quick run")


if __name__ == "__main__":
    main()
