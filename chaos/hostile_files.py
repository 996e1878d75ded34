"""Files made to do harm: each function makes one in the current folder and gives the arguments of a command.

All of them must be refused in a sentence, without running anything that they hold and without filling memory.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

CANARY = Path("executed")
"""What appears when something in a file was run."""

Make = Callable[[], list[str]]


class Case(NamedTuple):
    """A file that is to be refused, and the exit code that says so."""

    name: str
    make: Make
    code: int


CASES: list[Case] = []


def case(name: str, code: int) -> Callable[[Make], Make]:
    """Add a case."""

    def add(make: Make) -> Make:
        CASES.append(Case(name, make, code))
        return make

    return add


class Evil:
    """Whoever unpickles it runs a command."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {CANARY.absolute()}",)


def recipe(**changes: Any) -> dict[str, Any]:
    """A sound recipe with some keys replaced."""
    changed = {name: value for name, value in changes.items() if name != "data"}
    data = {
        "batch": 4,
        "workers": 0,
        "train": {"dataset": "fashion_small", "split": "train"},
        **changes.get("data", {}),
    }
    model = {"name": "convnet", "widths": [4]}
    optimizer = {"name": "sgd", "lr": 0.1}
    sound = {"name": "hostile", "task": "classification", "model": model, "data": data, "losses": ["cross_entropy"]}
    return {**sound, "optimizer": optimizer, "train": {"steps": 1}, **changed}


def check(**changes: Any) -> list[str]:
    """The command that checks such a recipe."""
    Path("recipe.json").write_text(json.dumps(recipe(**changes)), encoding="utf-8")
    return ["check", "recipe.json"]


def check_text(text: str | bytes, name: str = "recipe.yaml") -> list[str]:
    """The command that checks a recipe of this content."""
    Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
    return ["check", name]


def check_weights(content: bytes, name: str = "weights.pth") -> list[str]:
    """The command that checks a recipe which starts from a file of this content."""
    Path(name).write_bytes(content)
    return check(model={"name": "convnet", "widths": [4], "weights": name})


def check_image(content: bytes | None = None, **options: Any) -> list[str]:
    """The command that checks a recipe whose one image has this content."""
    Path("photos/one").mkdir(parents=True, exist_ok=True)
    if content is not None:
        Path("photos/one/photo.png").write_bytes(content)
    resize = {"name": "resize", "size": [16, 16]}
    train = {"dataset": "image_folder", "root": "photos", "transforms": [resize], **options}
    return check(data={"train": train})


def check_idx(images: bytes, name: str = "train-images-idx3-ubyte") -> list[str]:
    """The command that checks a recipe whose IDX file of images has this content."""
    Path("idx").mkdir()
    Path("idx", name).write_bytes(images)
    Path("idx/train-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 4) + bytes(4))
    return check(data={"train": {"dataset": "idx", "root": "idx", "split": "train"}})


def evaluate_checkpoint() -> list[str]:
    """The command that measures the checkpoint in the folder `checkpoint`."""
    data = {"val": {"dataset": "fashion_small", "split": "test"}}
    Path("recipe.json").write_text(json.dumps(recipe(data=data)), encoding="utf-8")
    Path("checkpoint").mkdir(exist_ok=True)
    return ["eval", "recipe.json", "--checkpoint", "checkpoint", "--procs", "1"]


# --- pickles in disguise ------------------------------------------------------------------------------------


@case("a pickle as .pth", 4)
def _() -> list[str]:
    return check_weights(pickle.dumps({"weight": Evil()}, protocol=2))


@case("a pickle of the first protocol as .pth", 4)
def _() -> list[str]:
    return check_weights(pickle.dumps({"weight": Evil()}, protocol=0))


@case("a torch archive that holds code", 4)
def _() -> list[str]:
    import torch

    content = io.BytesIO()
    torch.save({"weight": torch.zeros(2), "evil": Evil()}, content)
    return check_weights(content.getvalue())


@case("an old torch file that holds code", 4)
def _() -> list[str]:
    import torch

    content = io.BytesIO()
    torch.save({"weight": torch.zeros(2), "evil": Evil()}, content, _use_new_zipfile_serialization=False)
    return check_weights(content.getvalue())


@case("a pickle as .safetensors", 4)
def _() -> list[str]:
    return check_weights(pickle.dumps(Evil()), "weights.safetensors")


@case("a pickle as a .json recipe", 2)
def _() -> list[str]:
    return check_text(pickle.dumps(Evil()), "recipe.json")


@case("a pickle as a .yaml recipe", 2)
def _() -> list[str]:
    return check_text(pickle.dumps(Evil(), protocol=0))


@case("a .npy file of objects as weights", 4)
def _() -> list[str]:
    content = io.BytesIO()
    np.save(content, np.array([Evil()], dtype=object), allow_pickle=True)
    return check_weights(content.getvalue(), "weights.npy")


@case("a .npy file of objects as an image", 3)
def _() -> list[str]:
    content = io.BytesIO()
    np.save(content, np.array([Evil()], dtype=object), allow_pickle=True)
    return check_image(content.getvalue())


@case("a pickle as a checkpoint's manifest", 4)
def _() -> list[str]:
    command = evaluate_checkpoint()
    Path("checkpoint/manifest.json").write_bytes(pickle.dumps(Evil()))
    return command


@case("a distributed checkpoint whose metadata is a pickle", 4)
def _() -> list[str]:
    command = evaluate_checkpoint()
    Path("checkpoint/.metadata").write_bytes(pickle.dumps(Evil()))
    return command


@case("a TorchScript program as weights", 4)
def _() -> list[str]:
    import torch

    module = torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2))  # type: ignore[no-untyped-call]
    module.save("weights.pth")
    return check_weights(Path("weights.pth").read_bytes())


# --- recipes ------------------------------------------------------------------------------------------------


@case("a YAML tag that calls", 2)
def _() -> list[str]:
    return check_text(f"!!python/object/apply:os.system ['touch {CANARY.absolute()}']")


@case("a YAML tag that constructs", 2)
def _() -> list[str]:
    return check_text("name: !!python/object/new:os.system ['touch executed']\ntask: !!python/module:os\n")


@case("a billion laughs", 2)
def _() -> list[str]:
    lines = ["a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 7)]
    return check_text("\n".join(lines))


@case("an anchor inside itself", 2)
def _() -> list[str]:
    return check_text("name: &a [*a]\nmodel: &b {b: *b}\n")


@case("brackets a hundred thousand deep", 2)
def _() -> list[str]:
    return check_text("[" * 100_000)


@case("JSON a hundred thousand deep", 2)
def _() -> list[str]:
    return check_text('{"a":' * 100_000 + "1" + "}" * 100_000, "recipe.json")


@case("ninety thousand keys", 2)
def _() -> list[str]:
    return check_text("{" + ",".join(f"k{n:x}: 1" for n in range(90_000)) + "}")


@case("nineteen thousand keys that nobody knows", 2)
def _() -> list[str]:
    return check_text("{" + ",".join(f"optimizer{n:x}: 1" for n in range(19_000)) + "}")


@case("four thousand losses that nobody knows", 2)
def _() -> list[str]:
    return check(losses=[{"name": "cross_entropi"}] * 4_000)


@case("a number of a hundred thousand digits", 2)
def _() -> list[str]:
    return check_text('{"name": ' + "9" * 100_000 + "}", "recipe.json")


@case("a recipe of a gigabyte", 2)
def _() -> list[str]:
    command = check_text("name: x\n")
    os.truncate("recipe.yaml", 1 << 30)
    return command


@case("a pipe as a recipe", 2)
def _() -> list[str]:
    os.mkfifo("recipe.yaml")
    return ["check", "recipe.yaml"]


@case("a device as a recipe", 2)
def _() -> list[str]:
    Path("recipe.yaml").symlink_to("/dev/zero")
    return ["check", "recipe.yaml"]


@case("a directory as a recipe", 2)
def _() -> list[str]:
    Path("recipe.yaml").mkdir()
    return ["check", "recipe.yaml"]


@case("NUL bytes in a recipe", 2)
def _() -> list[str]:
    return check_text(b"name: a\0b\ntask: \0\n")


@case("a run's name that is a path", 2)
def _() -> list[str]:
    return check(name="/tmp/elsewhere")


@case("a run's name that leads up", 2)
def _() -> list[str]:
    return check(name="../elsewhere")


@case("a run's name with a NUL", 2)
def _() -> list[str]:
    return check(name="a\0b")


@case("a recipe that extends itself through another", 2)
def _() -> list[str]:
    Path("b.yaml").write_text("extends: recipe.yaml")
    return check_text("extends: b.yaml")


@case("recipes that extend two others each, thirty deep", 2)
def _() -> list[str]:
    for n in range(30):
        Path(f"{n}.yaml").write_text(f"extends: [{n + 1}.yaml, {n + 1}.yaml]")
    Path("30.yaml").write_text("name: x")
    return ["check", "0.yaml"]


@case("a recipe that extends a pipe", 2)
def _() -> list[str]:
    os.mkfifo("pipe.yaml")
    return check_text("extends: pipe.yaml")


@case("a name that is code", 2)
def _() -> list[str]:
    return check(model={"name": "os:system", "command": f"touch {CANARY.absolute()}"})


# --- weights ------------------------------------------------------------------------------------------------


def _safetensors(header: bytes, body: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + body


def _described(**tensors: tuple[list[int], list[int]]) -> bytes:
    entries = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": offsets} for name, (shape, offsets) in tensors.items()
    }
    return json.dumps(entries).encode()


@case("a safetensors header of 2^63 bytes", 4)
def _() -> list[str]:
    return check_weights(_safetensors(b"{}", length=2**63), "weights.safetensors")


@case("a safetensors header longer than its file", 4)
def _() -> list[str]:
    return check_weights(_safetensors(b"{}", length=90_000_000), "weights.safetensors")


@case("safetensors that overlap", 4)
def _() -> list[str]:
    return check_weights(_safetensors(_described(a=([4], [0, 16]), b=([4], [8, 24])), bytes(24)))


@case("safetensors beyond the end of the file", 4)
def _() -> list[str]:
    return check_weights(_safetensors(_described(a=([1 << 40], [0, 1 << 42])), bytes(16)))


@case("a safetensors shape that overflows", 4)
def _() -> list[str]:
    return check_weights(_safetensors(_described(a=([2**32, 2**32, 2**32], [0, 16])), bytes(16)))


@case("a safetensors header a hundred thousand deep", 4)
def _() -> list[str]:
    return check_weights(_safetensors(b'{"a":' * 100_000))


@case("a zip bomb as weights", 4)
def _() -> list[str]:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("archive/data.pkl", "w") as entry:
            for _ in range(64):
                entry.write(bytes(1 << 24))
        archive.writestr("archive/version", "3\n")
    return check_weights(content.getvalue())


@case("a zip entry that lies about its size", 4)
def _() -> list[str]:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 64)
        archive.writestr("archive/version", "3\n")
    sizes = struct.pack("<II", 64, 64)
    return check_weights(content.getvalue().replace(sizes, struct.pack("<II", 64, 0x7FFFFFFF)))


@case("weights that claim a terabyte", 4)
def _() -> list[str]:
    import torch

    content = io.BytesIO()
    torch.save({"weight": torch.zeros(3)}, content, _use_new_zipfile_serialization=False)
    # The number of elements of the storage, as the pickle writes it.
    return check_weights(content.getvalue().replace(b"K\x03Ntq", b"\x8a\x06\0\0\0\0\0\x01Ntq"))


@case("a pipe as weights", 4)
def _() -> list[str]:
    os.mkfifo("weights.pth")
    return check(model={"name": "convnet", "widths": [4], "weights": "weights.pth"})


@case("a device as weights", 4)
def _() -> list[str]:
    return check(model={"name": "convnet", "widths": [4], "weights": "/dev/zero"})


@case("a manifest that names files elsewhere", 4)
def _() -> list[str]:
    command = evaluate_checkpoint()
    files = {"../../../../etc/passwd": {"size": 1, "sha256": "0" * 64}}
    Path("checkpoint/manifest.json").write_text(json.dumps({"format": 1, "step": 1, "files": files, "figures": {}}))
    return command


@case("a manifest a hundred thousand deep", 4)
def _() -> list[str]:
    command = evaluate_checkpoint()
    Path("checkpoint/manifest.json").write_text("[" * 100_000)
    return command


@case("a pipe as a manifest", 4)
def _() -> list[str]:
    command = evaluate_checkpoint()
    os.mkfifo("checkpoint/manifest.json")
    return command


@case("a manifest of a gigabyte", 4)
def _() -> list[str]:
    command = evaluate_checkpoint()
    Path("checkpoint/manifest.json").touch()
    os.truncate("checkpoint/manifest.json", 1 << 30)
    return command


# --- images -------------------------------------------------------------------------------------------------


def _png(width: int, height: int, *chunks: tuple[bytes, bytes], data: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    listed = [(b"IHDR", header), *chunks, (b"IDAT", data or zlib.compress(bytes(100))), (b"IEND", b"")]
    packed = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in listed
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def _bomb(megabytes: int) -> bytes:
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(megabytes)) + packer.flush()


@case("a PNG of 50,000 × 50,000", 3)
def _() -> list[str]:
    return check_image(_png(50_000, 50_000, data=_bomb(64)))


@case("a PNG whose colour profile is a bomb", 3)
def _() -> list[str]:
    return check_image(_png(8, 8, (b"iCCP", b"x\0\0" + _bomb(128))))


@case("a PNG whose comment is a bomb", 3)
def _() -> list[str]:
    return check_image(_png(8, 8, (b"zTXt", b"x\0\0" + _bomb(128))))


@case("a PNG of a thousand comments", 3)
def _() -> list[str]:
    return check_image(_png(8, 8, *[(b"zTXt", b"x\0\0" + zlib.compress(bytes(1_000_000)))] * 1000))


@case("a GIF of 65,535 × 65,535", 3)
def _() -> list[str]:
    frame = b"," + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0) + b"\x02\x02\x4c\x01\0;"
    return check_image(b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0) + frame)


@case("a BMP of 60,000 × 60,000", 3)
def _() -> list[str]:
    header = struct.pack("<IiiHHIIiiII", 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0)
    return check_image(b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + header)


@case("a WebP of 16,383 × 16,383", 3)
def _() -> list[str]:
    canvas = struct.pack("<I", 16_382)[:3]
    body = b"VP8X" + struct.pack("<II", 10, 2) + canvas + canvas
    body += b"ANIM" + struct.pack("<IIH", 6, 0, 0)
    return check_image(b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body)


def _tiff(**tags: int) -> bytes:
    numbers = {"width": 256, "height": 257, "bits": 258, "packed": 259, "colours": 262, "strip": 273, "samples": 277}
    numbers |= {"rows": 278, "strip_bytes": 279, "tile_width": 322, "tile_height": 323, "tile": 324, "tile_bytes": 325}
    entries = sorted((numbers[name], value) for name, value in tags.items())
    listed = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + listed + bytes(4)


@case("a TIFF of 100,000 × 100,000", 3)
def _() -> list[str]:
    common = {"bits": 8, "packed": 1, "colours": 1, "samples": 1}
    return check_image(_tiff(width=100_000, height=100_000, strip=8, rows=100_000, strip_bytes=64, **common))


@case("a small TIFF with one huge tile", 3)
def _() -> list[str]:
    tags = {"bits": 8, "packed": 8, "colours": 1, "samples": 1, "width": 16, "height": 16}
    tags |= {"tile_width": 40_000, "tile_height": 40_000}
    packed = _bomb(64)
    start = len(_tiff(**tags, tile=0, tile_bytes=0))
    return check_image(_tiff(**tags, tile=start, tile_bytes=len(packed)) + packed)


def _jpeg(width: int, height: int, **options: Any) -> bytes:
    from PIL import Image

    content = io.BytesIO()
    Image.new("RGB", (64, 64)).save(content, "JPEG", **options)
    data = bytearray(content.getvalue())
    start = data.index(b"\xff\xc2" if options.get("progressive") else b"\xff\xc0") + 5
    data[start : start + 4] = struct.pack(">HH", height, width)
    return bytes(data)


@case("a JPEG of 65,500 × 65,500", 3)
def _() -> list[str]:
    return check_image(_jpeg(65_500, 65_500))


@case("a JPEG that is drawn two thousand times", 3)
def _() -> list[str]:
    data = _jpeg(9_000, 9_000, progressive=True)
    start = data.index(b"\xff\xda")
    scan = data[start : data.index(b"\xff", start + 20)]
    return check_image(data[:start] + scan * 2000 + b"\xff\xd9")


@case("a PPM with a lying header", 3)
def _() -> list[str]:
    return check_image(b"P6 999999999 999999999 255\n" + bytes(64))


@case("an EPS program as .png", 3)
def _() -> list[str]:
    command = f"(%pipe%touch {CANARY.absolute()}) (w) file closefile"
    return check_image(f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n{command}\n%%EOF\n".encode())


@case("an image of two gigabytes of nothing", 3)
def _() -> list[str]:
    command = check_image(b"\xff\xd8\xff")
    os.truncate("photos/one/photo.png", 1 << 31)
    return command


@case("a pipe as an image", 3)
def _() -> list[str]:
    command = check_image()
    os.mkfifo("photos/one/photo.png")
    return command


@case("a device as an image", 3)
def _() -> list[str]:
    command = check_image(follow_links=True)
    Path("photos/one/photo.png").symlink_to("/dev/zero")
    return command


@case("a directory as an image", 3)
def _() -> list[str]:
    command = check_image()
    Path("photos/one/photo.png").mkdir()
    return command


# --- folders and IDX files ----------------------------------------------------------------------------------


@case("an image that is a link out of its folder", 3)
def _() -> list[str]:
    command = check_image()
    Path("secret.png").write_bytes(_png(8, 8))
    Path("photos/one/photo.png").symlink_to(Path("secret.png").absolute())
    return command


@case("a class that is a link out of its folder", 3)
def _() -> list[str]:
    command = check_image(_png(8, 8))
    Path("photos/two").symlink_to("/etc")
    return command


@case("a link that leads back", 3)
def _() -> list[str]:
    command = check_image(_png(8, 8))
    Path("photos/one/again").symlink_to("..")
    return command


@case("a split that leads up", 3)
def _() -> list[str]:
    Path("elsewhere/one").mkdir(parents=True)
    Path("elsewhere/one/photo.png").write_bytes(_png(8, 8))
    return check_image(_png(8, 8), split="../elsewhere")


@case("a data folder with a NUL in its name", 3)
def _() -> list[str]:
    return check_image(_png(8, 8), root="photos\0")


@case("an IDX file that claims 2^96 bytes", 3)
def _() -> list[str]:
    return check_idx(struct.pack(">IIII", 0x803, 2**32 - 1, 2**32 - 1, 2**32 - 1) + bytes(64))


@case("an IDX file that is a gzip bomb", 3)
def _() -> list[str]:
    content = io.BytesIO()
    with gzip.GzipFile(fileobj=content, mode="wb", compresslevel=1) as packed:
        packed.write(struct.pack(">IIII", 0x803, 4, 1 << 14, 1 << 14))
        for _ in range(64):
            packed.write(bytes(1 << 24))
    return check_idx(content.getvalue(), "train-images-idx3-ubyte.gz")


@case("a pipe as an IDX file", 3)
def _() -> list[str]:
    command = check_idx(b"")
    Path("idx/train-images-idx3-ubyte").unlink()
    os.mkfifo("idx/train-images-idx3-ubyte")
    return command
