"""Weights that timm and torchvision publish, by name: from the library's own cache, else downloaded into it."""

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
from paceline.core.torchvision_ops import import_torchvision

_PREFIXES = ("timm/", "torchvision/")
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")
_PATIENCE = 10.0  # seconds a server may take to answer at all
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Published:
    """A file of published weights, and how the library gives its tensors the names of its model."""

    file: Path
    convert: Callable[[Weights], Weights]


def is_published_name(written: str) -> bool:
    """Whether this names weights of a library (`timm/resnet18`, `torchvision/resnet50.IMAGENET1K_V2`), not a file."""
    return written.startswith(_PREFIXES) and not Path(written).exists()


def find_published(written: str) -> Published:
    """The file of weights that a library publishes under a name, downloaded if its cache has none."""
    library, _, name = written.partition("/")
    return _find_torchvision(written, name) if library == "torchvision" else _find_timm(written, name)


def _find_torchvision(written: str, name: str) -> Published:
    models = import_torchvision().models
    architecture, _, tag = name.partition(".")
    if architecture not in models.list_models():
        raise _unknown(written, "torchvision has no model", architecture, models.list_models())
    choices = models.get_model_weights(architecture)
    if tag and tag not in choices.__members__:
        raise _unknown(written, f"torchvision has no weights of {architecture}", tag, list(choices.__members__))
    url = choices[tag or "DEFAULT"].url
    return Published(_from_url(written, url), _with_new_names if "densenet" in architecture else dict)


def _with_new_names(weights: Weights) -> Weights:
    # The published DenseNets are older than the names of their layers: norm.1 is norm1 today.
    return {_OLD_DENSENET.sub(r"\1\2", name): tensor for name, tensor in weights.items()}


def _find_timm(written: str, name: str) -> Published:
    import_torchvision()  # timm imports it, so it must come in through our door
    import timm

    architecture, _, tag = name.partition(".")
    if architecture not in timm.list_models():
        raise _unknown(written, "timm has no model", architecture, timm.list_models())
    published = timm.list_pretrained(f"{architecture}.*") + timm.list_pretrained(architecture)
    if not published or (tag and name not in published):
        raise _unknown(written, "timm publishes no weights", name, published or timm.list_pretrained())
    config = timm.get_pretrained_cfg(name)
    if config.hf_hub_id:
        file = _from_hub(written, config.hf_hub_id, config.hf_hub_filename)
    else:
        file = _from_url(written, config.url if isinstance(config.url, str) else config.url[0])

    def convert(weights: Weights) -> Weights:
        try:
            # A model is made only for timm to rename what older files hold; chance goes on as if it were not.
            with torch.random.fork_rng(devices=[]):
                model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"state_dict": weights})
        except RuntimeError as error:
            raise CheckpointError(f"{written}: {file} does not fit timm's model of that name: {error}") from error
        return dict(model.state_dict())

    return Published(file, convert)


def _from_hub(written: str, repository: str, file_name: str | None) -> Path:
    """A file of the Hugging Face hub, as timm takes it: safetensors if there are such."""
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
        if _answers(written, cache, url):
            try:
                return Path(huggingface_hub.hf_hub_download(filename=one, **place))
            except Exception as error:  # its client's own types, none of which we depend on
                raise _unreachable(written, cache, url, str(error).partition("\n")[0]) from error
    raise _unreachable(written, cache, f"hub {repository}", f"holds none of {', '.join(file_names)}")


def _from_url(written: str, url: str) -> Path:
    """A file that torch's hub keeps under the last part of its address."""
    file_name = url.rpartition("/")[2]
    file = Path(torch.hub.get_dir()) / "checkpoints" / file_name
    if file.exists():
        return file
    if not _answers(written, str(file.parent), url):
        raise _unreachable(written, str(file.parent), url, "there is no such file any more")
    file.parent.mkdir(parents=True, exist_ok=True)
    digest = re.search(r"-([0-9a-f]{8,})\.", file_name)
    try:
        torch.hub.download_url_to_file(url, str(file), digest[1] if digest else None, progress=False)
    except (OSError, RuntimeError) as error:
        raise _unreachable(written, str(file.parent), url, str(error)) from error
    return file


def _answers(written: str, cache: str, url: str) -> bool:
    """Whether the server has the file. Where it cannot be reached the libraries try for half a minute; not so this."""
    request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "paceline"})
    try:
        with urllib.request.build_opener().open(request, timeout=_PATIENCE):
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
        f"{written}: not in the local cache ({cache}), and {tried} cannot be had: {reason}. "
        "Get the file on a machine with a network and give its path instead of the name"
    )


def _unknown(written: str, what: str, name: str, known: list[str]) -> CheckpointError:
    near = get_close_matches(name, known, n=3) or known[:3]
    return CheckpointError(f"{written}: {what} {name!r}; there is {', '.join(near)}")
