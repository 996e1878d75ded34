"""Pretrained weights of timm, torchvision and transformers by name, from the library's cache.

Those of timm and torchvision are downloaded into it.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.core.text import join_first
from paceline.core.torchvision_ops import import_torchvision
from paceline.models.transformers_detection import import_transformers, remove_ties

_PREFIXES = ("timm/", "torchvision/", "transformers/")
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")
_TIMEOUT = 10.0  # seconds until a server answers
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class PretrainedFile:
    """A file of pretrained weights, and the library's conversion to its model's names."""

    file: Path
    convert: Callable[[Weights], Weights]


def is_pretrained_name(name: str) -> bool:
    """Whether this is a library's name (`timm/resnet18`, `torchvision/resnet50.IMAGENET1K_V2`), not a file."""
    return name.startswith(_PREFIXES) and not Path(name).exists()


def find_pretrained(written: str) -> PretrainedFile:
    """The pretrained weights of that name, downloaded if the library's cache has none."""
    library, _, name = written.partition("/")
    if library == "transformers":
        return transformers_file(name)
    return _find_torchvision(written, name) if library == "torchvision" else _find_timm(written, name)


def transformers_file(source: str) -> PretrainedFile:
    """The weights of a model of transformers, in a folder or in the hub's cache; only safetensors are read."""
    folder = Path(source) if Path(source).is_dir() else _cached_snapshot(source)
    if not (folder / _HUB_FILES[0]).is_file() or not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{source}: expected {_HUB_FILES[0]} and config.json in {folder}; download both, or convert other weights"
            " with the library's save_pretrained"
        )

    def convert(weights: Weights) -> Weights:
        """The names that the library gives them today, as in our model."""
        library = import_transformers()
        with torch.random.fork_rng(devices=[]):
            model, found = library.AutoModelForObjectDetection.from_pretrained(
                str(folder), local_files_only=True, use_safetensors=True, output_loading_info=True
            )
        if missing := sorted(found["missing_keys"]):
            raise CheckpointError(f"{folder / _HUB_FILES[0]}: lacks {join_first(missing, 3)}")
        remove_ties(model)
        return {f"detector.{name}": tensor for name, tensor in model.state_dict().items()}

    return PretrainedFile(folder / _HUB_FILES[0], convert)


def _cached_snapshot(repository: str) -> Path:
    import_transformers()
    from huggingface_hub import constants, snapshot_download

    files = ["config.json", _HUB_FILES[0]]
    try:
        return Path(snapshot_download(repository, local_files_only=True, allow_patterns=files))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"transformers/{repository}: is neither a folder nor in the hub's cache ({constants.HF_HUB_CACHE});"
            f" download it with `hf download {repository} {' '.join(files)}`, or with --local-dir into a folder to"
            " name here"
        ) from error


def _find_torchvision(written: str, name: str) -> PretrainedFile:
    models = import_torchvision().models
    architecture, _, tag = name.partition(".")
    if architecture not in models.list_models():
        raise _unknown(written, "torchvision has no model", architecture, models.list_models())
    choices = models.get_model_weights(architecture)
    if tag and tag not in choices.__members__:
        raise _unknown(written, f"torchvision has no weights of {architecture}", tag, list(choices.__members__))
    url = choices[tag or "DEFAULT"].url
    return PretrainedFile(_from_url(written, url), _rename_densenet if "densenet" in architecture else dict)


def _rename_densenet(weights: Weights) -> Weights:
    # These files are older than the names of the layers: norm.1 is norm1 today.
    return {_OLD_DENSENET.sub(r"\1\2", name): tensor for name, tensor in weights.items()}


def _find_timm(written: str, name: str) -> PretrainedFile:
    import_torchvision()  # timm imports it, which fails without its compiled operators
    import timm

    architecture, _, tag = name.partition(".")
    if architecture not in timm.list_models():
        raise _unknown(written, "timm has no model", architecture, timm.list_models())
    published = timm.list_pretrained(f"{architecture}.*") + timm.list_pretrained(architecture)
    if not published or (tag and name not in published):
        raise _unknown(written, "timm has no weights", name, published or timm.list_pretrained())
    config = timm.get_pretrained_cfg(name)
    if config.hf_hub_id:
        file = _from_hub(written, config.hf_hub_id, config.hf_hub_filename)
    else:
        file = _from_url(written, config.url if isinstance(config.url, str) else config.url[0])

    def convert(weights: Weights) -> Weights:
        try:
            # The model is built only so that timm renames old tensors; the random state is restored.
            with torch.random.fork_rng(devices=[]):
                model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"state_dict": weights})
        except RuntimeError as error:
            raise CheckpointError(f"{written}: {file} does not match timm's model: {error}") from error
        return dict(model.state_dict())

    return PretrainedFile(file, convert)


def _from_hub(written: str, repository: str, file_name: str | None) -> Path:
    """A file of the Hugging Face hub, safetensors preferred, as in timm."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, _, revision = repository.partition("@")
    place: dict[str, Any] = {"repo_id": repository, "revision": revision or None}
    file_names = [file_name] if file_name else list(_HUB_FILES)
    for one in file_names:
        try:
            return Path(huggingface_hub.hf_hub_download(filename=one, local_files_only=True, **place))
        except LocalEntryNotFoundError:
            continue
    cache = huggingface_hub.constants.HF_HUB_CACHE
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise _unreachable(written, cache, f"hub {repository}", "HF_HUB_OFFLINE is set")
    for one in file_names:
        url = huggingface_hub.hf_hub_url(filename=one, **place)
        if _exists(written, cache, url):
            try:
                return Path(huggingface_hub.hf_hub_download(filename=one, **place))
            except Exception as error:  # its client's own types, none of which we depend on
                raise _unreachable(written, cache, url, str(error).partition("\n")[0]) from error
    raise _unreachable(written, cache, f"hub {repository}", f"holds none of {', '.join(file_names)}")


def _from_url(written: str, url: str) -> Path:
    """A file in the cache of torch.hub, under the last part of its URL."""
    file_name = url.rpartition("/")[2]
    file = Path(torch.hub.get_dir()) / "checkpoints" / file_name
    if file.exists():
        return file
    if not _exists(written, str(file.parent), url):
        raise _unreachable(written, str(file.parent), url, "the file no longer exists")
    file.parent.mkdir(parents=True, exist_ok=True)
    digest = re.search(r"-([0-9a-f]{8,})\.", file_name)
    try:
        torch.hub.download_url_to_file(url, str(file), digest[1] if digest else None, progress=False)
    except (OSError, RuntimeError) as error:
        raise _unreachable(written, str(file.parent), url, str(error)) from error
    return file


def _exists(written: str, cache: str, url: str) -> bool:
    """Whether the server has the file; the libraries would retry an unreachable one for half a minute."""
    request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "paceline"})
    try:
        with urllib.request.build_opener().open(request, timeout=_TIMEOUT):
            return True
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404, 410):
            return False
        raise _unreachable(written, cache, url, f"the server answers {error.code} {error.reason}") from error
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise _unreachable(written, cache, url, str(reason)) from error


def _unreachable(written: str, cache: str, tried: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{written}: not in the local cache ({cache}), and {tried} is not available: {reason}. "
        "Download the file on a machine with network access and set its path instead of the name"
    )


def _unknown(written: str, what: str, name: str, known: list[str]) -> CheckpointError:
    close = get_close_matches(name, known, n=3) or known[:3]
    return CheckpointError(f"{written}: {what} {name!r}; the closest are {', '.join(close)}")
