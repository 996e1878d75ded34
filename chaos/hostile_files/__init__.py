"""Files made to do harm, by kind.

All of them must be refused in a sentence, without running anything that they hold and without filling memory.
"""

from chaos.hostile_files import checkpoints, folders, idx, images, pickles, recipes, special_files, weights
from chaos.hostile_files.case import CANARY, Case

__all__ = ["CANARY", "CASES", "Case"]

CASES: list[Case] = [
    *pickles.case,
    *recipes.case,
    *weights.case,
    *checkpoints.case,
    *images.case,
    *folders.case,
    *idx.case,
    *special_files.case,
]
