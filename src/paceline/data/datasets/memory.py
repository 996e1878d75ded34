"""Images that lie in memory as one tensor, so that a batch is taken without any work per sample."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from paceline.data.batch import Sample


@dataclass
class MemoryImages:
    """Images, uint8 [N, C, H, W], and further fields by name: numbers such as "label", [N], or arrays, [N, ...]."""

    images: Tensor
    fields: dict[str, Tensor]
    classes: list[str]
    channels: int = field(init=False)

    def __post_init__(self) -> None:
        self.channels = self.images.shape[1]

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> Sample:
        """One sample: "image" as uint8 [H, W, C] and its fields."""
        sample: Sample = {"image": self.images[index].permute(1, 2, 0).numpy()}
        for name, values in self.fields.items():
            value = values[index]
            sample[name] = value.item() if value.ndim == 0 else value.numpy()
        return sample

    def gather(self, ids: Tensor) -> dict[str, Tensor]:
        """The samples `ids` (int64 [N]) together: "image" [N, C, H, W] and the fields, copied."""
        gathered = {name: values.index_select(0, ids) for name, values in self.fields.items()}
        return {"image": self.images.index_select(0, ids), **gathered}
