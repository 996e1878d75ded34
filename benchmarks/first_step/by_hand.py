"""The same work as the quickstart's up to its first step, with torch alone."""

import gzip
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

import paceline
from paceline.models.convnet import ConvNet

FOLDER = Path(paceline.__file__).parent / "data" / "embedded" / "fashion"


def read(name: str, header: int) -> Tensor:
    """All of a packed IDX file behind its header."""
    with gzip.open(FOLDER / name) as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)[header:]


torch.manual_seed(0)
splits = {}
for split in ("train", "t10k"):
    images = read(f"{split}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
    splits[split] = images, read(f"{split}-labels-idx1-ubyte.gz", 8).long()
images, labels = splits["train"]
model = ConvNet(num_classes=10, in_channels=1, widths=[32, 64, 128])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.05, fused=True)
ids = torch.randperm(len(images))[:64]
batch = images[ids].float().mul_(1 / (255 * 0.353)).add_(-0.286 / 0.353)
loss = F.cross_entropy(model(batch), labels[ids], label_smoothing=0.1)
loss.backward()  # type: ignore[no-untyped-call]
optimizer.step()
print(perf_counter())
