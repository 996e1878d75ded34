"""Make saliency.json, the golden numbers for saliency metrics, with PySODMetrics in an environment of its own.

    python -m venv ENVIRONMENT
    ENVIRONMENT/bin/pip install pysodmetrics==1.6.2
    ENVIRONMENT/bin/python tests/metrics/golden/make_saliency_golden.py [FOLDER]

FOLDER holds the masks of ECSSD as PNG files (ground_truth_mask), of which the first 200 are used; without it only
the synthetic cases are made, and what the file holds about ECSSD stays.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import py_sod_metrics as oracle  # type: ignore[import-not-found]
from saliency_cases import fingerprint, real_cases, real_masks, synthetic_cases

GOLDEN = Path(__file__).with_name("saliency.json")


class Judge:
    """All metrics of PySODMetrics under our names."""

    def __init__(self) -> None:
        self.mae, self.structure = oracle.MAE(), oracle.Smeasure()
        self.e, self.weighted = oracle.Emeasure(), oracle.WeightedFmeasure()
        halved = {"with_dynamic": False, "with_adaptive": False, "with_binary": True}
        self.counts = oracle.FmeasureV2(
            {
                "f": oracle.FmeasureHandler(with_dynamic=True, with_adaptive=True, beta=0.3),
                "iou": oracle.IOUHandler(**halved),
                "ber": oracle.BERHandler(**halved),
            }
        )

    def step(self, prediction: npt.NDArray[Any], mask: npt.NDArray[np.uint8], stretch: bool) -> None:
        """Judge one image. What it normalizes itself has to be uint8; anything else is made ready here."""
        own = stretch and prediction.dtype == np.uint8
        truth = mask if own else mask > 128
        if not own:
            prediction = prediction / 255 if prediction.dtype == np.uint8 else prediction
            if stretch and prediction.min() != prediction.max():
                prediction = (prediction - prediction.min()) / (prediction.max() - prediction.min())
        for each in (self.mae, self.structure, self.e, self.weighted, self.counts):
            each.step(prediction, truth, normalize=own)

    def metrics(self) -> dict[str, float | None]:
        """The means over all images judged; None where one has no number."""
        e, counts = self.e.get_results()["em"], self.counts.get_results()
        f = counts["f"]
        metrics = {
            "mae": self.mae.get_results()["mae"],
            "max_f": f["dynamic"].max(),
            "mean_f": f["dynamic"].mean(),
            "adaptive_f": f["adaptive"],
            "weighted_f": self.weighted.get_results()["wfm"],
            "s_measure": self.structure.get_results()["sm"],
            "max_e": e["curve"].max(),
            "mean_e": e["curve"].mean(),
            "adaptive_e": e["adp"],
            "iou": counts["iou"]["binary"],
            "ber": counts["ber"]["binary"],
        }
        return {name: float(value) if np.isfinite(value) else None for name, value in metrics.items()}


def judged(cases: Iterable[tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]], stretch: bool) -> dict[str, float | None]:
    """The metrics of all cases together."""
    judge = Judge()
    for prediction, mask in cases:
        judge.step(prediction, mask, stretch)
    return judge.metrics()


def main() -> None:
    """Write the golden file."""
    before = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    golden: dict[str, Any] = {"ecssd": before.get("ecssd")}
    golden["made_with"] = {name: version(name) for name in ("pysodmetrics", "numpy", "scipy")}
    cases = synthetic_cases()
    golden["synthetic"] = {
        name: {
            "fingerprint": fingerprint(*case),
            "stretched": judged([case], True),
            "as it is": judged([case], False),
        }
        for name, case in cases.items()
    }
    # Its S-measure is not a number if a mask's center is in the last row or column, nor is any mean with that in it.
    sound = [case for name, case in cases.items() if golden["synthetic"][name]["stretched"]["s_measure"] is not None]
    golden["all that have numbers"] = {"stretched": judged(sound, True), "as it is": judged(sound, False)}
    if len(sys.argv) > 1:
        masks = real_masks(Path(sys.argv[1]))
        golden["ecssd"] = {
            "as it is": judged(real_cases(masks, alter=False), True),
            "some emptied, some filled": judged(real_cases(masks, alter=True), True),
        }
    GOLDEN.write_text(json.dumps(golden, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
