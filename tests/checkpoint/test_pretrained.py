"""Weights that libraries publish come from their caches, from their servers, or not at all, with a reason."""

from __future__ import annotations

import hashlib
import importlib
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from paceline.checkpoint import pretrained
from paceline.checkpoint.pretrained import is_pretrained_name
from paceline.checkpoint.weights import read_weights
from paceline.core.errors import CheckpointError
from paceline.core.torchvision_ops import import_torchvision
from paceline.models.surgery import Surgery, load_weights
from paceline.models.zoo import build_timm, build_torchvision

WEIGHTS = {"conv.weight": torch.arange(6.0).reshape(2, 3), "conv.count": torch.tensor(3)}


def same(found: dict[str, Tensor], expected: dict[str, Tensor] = WEIGHTS) -> bool:
    return found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)


def torch_file(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


class Trap:
    """Creates a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine has, requests go to a port where nobody listens."""
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hugging Face hub; its place is settled when the library is imported."""
    import_torchvision()
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub_cache"))
    return tmp_path / "hub_cache"


@pytest.fixture
def torch_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch_home"))
    return tmp_path / "torch_home"


def place_in_hub(cache: Path, repository: str, weights: dict[str, Tensor]) -> Path:
    """Put a file where a download would leave it."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    file = folder / "snapshots" / "0123abc" / "model.safetensors"
    file.parent.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123abc")
    safetensors.torch.save_file(weights, file)
    return file


@pytest.mark.usefixtures("no_network")
def test_timms_weights_come_from_its_cache(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weights = dict(build_timm("test_vit", 1000, 3, {}).state_dict())
    file = place_in_hub(hub_cache, "timm/test_vit.r160_in1k", weights)
    state = torch.get_rng_state()
    found = read_weights("timm/test_vit")
    assert torch.get_rng_state().equal(state)
    assert same(found, weights)
    assert same(read_weights("timm/test_vit.r160_in1k"), weights)
    # The library reads the same file there.
    monkeypatch.setattr(importlib.import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    timm = importlib.import_module("timm")
    assert same(timm.create_model("test_vit", pretrained=True).state_dict(), weights)
    fitted = load_weights(build_timm("test_vit", 7, 1, {"img_size": 96}), found, Surgery())
    assert list(fitted.replaced) == ["head.weight", "head.bias"]
    assert list(fitted.reshaped) == ["pos_embed", "patch_embed.proj.weight"]

    safetensors.torch.save_file({"other.weight": torch.ones(2)}, file)
    with pytest.raises(CheckpointError, match=r"timm/test_vit: .*model\.safetensors "):
        read_weights("timm/test_vit")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["torchvision/squeezenet1_1", "torchvision/squeezenet1_1.IMAGENET1K_V1"])
def test_torchvisions_weights_come_from_its_cache(torch_home: Path, name: str) -> None:
    weights = dict(build_torchvision("squeezenet1_1", 1000, 3, {}).state_dict())
    file = torch_home / "hub" / "checkpoints" / "squeezenet1_1-b8a52dc0.pth"
    file.parent.mkdir(parents=True)
    torch_file(file, weights)
    assert same(read_weights(name), weights)
    library = import_torchvision().models.get_model_weights("squeezenet1_1").DEFAULT
    assert same(library.get_state_dict(progress=False), weights)
    # Theirs would run what a file brings; ours does not, cached or not.
    torch_file(file, {"hook": Trap(torch_home / "sprung")})
    with pytest.raises(CheckpointError, match="refused"):
        read_weights(name)
    assert not (torch_home / "sprung").exists()


@pytest.mark.usefixtures("no_network")
def test_the_old_names_of_densenets_are_todays(torch_home: Path) -> None:
    file = torch_home / "hub" / "checkpoints" / "densenet121-a639ec97.pth"
    file.parent.mkdir(parents=True)
    old = {"features.denseblock1.denselayer12.norm.2.weight": torch.ones(2), "features.norm0.weight": torch.ones(3)}
    torch_file(file, old)
    names = ["features.denseblock1.denselayer12.norm2.weight", "features.norm0.weight"]
    assert list(read_weights("torchvision/densenet121")) == names


@pytest.mark.usefixtures("no_network", "hub_cache", "torch_home")
@pytest.mark.parametrize(
    ("name", "cache", "tried"),
    [
        ("timm/resnet18", "hub_cache", "https://huggingface.co/timm/resnet18.a1_in1k/resolve/main/model.safetensors"),
        ("timm/gcvit_xxtiny", "torch_home/hub/checkpoints", "gcvit_xxtiny_224_nvidia-d1d86009.pth"),
        (
            "torchvision/resnet18",
            "torch_home/hub/checkpoints",
            "https://download.pytorch.org/models/resnet18-f37072fd.pth",
        ),
    ],
)
def test_without_a_network_the_error_says_what_was_tried(tmp_path: Path, name: str, cache: str, tried: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_weights(name)
    message = str(caught.value)
    assert message.startswith(f"{name}: not in the local cache ({tmp_path / cache}), and https://")
    assert tried in message
    assert "refused" in message
    assert "path" in message
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.usefixtures("hub_cache", "torch_home", "no_network")
@pytest.mark.parametrize("name", ["timm/resnet18", "torchvision/resnet18"])
def test_a_server_that_does_not_answer_is_given_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(CheckpointError, match="timed out"):
            read_weights(name)


class Server(BaseHTTPRequestHandler):
    """Serves a folder's files as the hub does, and nothing else."""

    folder: Path

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        file = self.folder / self.path.rpartition("/")[2]
        content = file.read_bytes() if file.is_file() else b""
        self.send_response(200 if content else 404)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0123456789abcdef0123456789abcdef01234567")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server on this machine, for which no proxy is asked."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(Server, "folder", tmp_path / "served", raising=False)
    (tmp_path / "served").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_a_download_goes_into_torchs_cache_whole_or_not_at_all(
    server: str, tmp_path: Path, torch_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = torch_file(tmp_path / "weights.pth", WEIGHTS)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    library = import_torchvision().models.get_model_weights("squeezenet1_1").DEFAULT
    published = tmp_path / "served" / f"net-{digest}.pth"
    monkeypatch.setattr(library.value, "url", f"{server}/models/{published.name}")
    cache = torch_home / "hub" / "checkpoints"
    with pytest.raises(CheckpointError, match="no longer exists"):
        read_weights("torchvision/squeezenet1_1")
    published.write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="invalid hash value"):
        read_weights("torchvision/squeezenet1_1")
    assert list(cache.iterdir()) == []
    published.write_bytes(file.read_bytes())
    assert same(read_weights("torchvision/squeezenet1_1"))
    published.unlink()
    assert same(read_weights("torchvision/squeezenet1_1"))


def test_a_download_from_the_hub_takes_what_there_is(
    server: str, tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", server)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server + "/{repo_id}/resolve/{revision}/{filename}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors, pytorch_model\.bin"):
        read_weights("timm/test_vit")
    weights = dict(build_timm("test_vit", 1000, 3, {}).state_dict())
    served = torch_file(tmp_path / "served" / "pytorch_model.bin", weights)
    assert same(read_weights("timm/test_vit"), weights)
    served.unlink()
    assert same(read_weights("timm/test_vit"), weights)
    assert any(hub_cache.rglob("pytorch_model.bin"))


@pytest.mark.usefixtures("hub_cache")
def test_a_hub_that_is_switched_off_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"hub timm/resnet18\.a1_in1k .*HF_HUB_OFFLINE"):
        read_weights("timm/resnet18")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("timm/resnt18", "'resnt18'; .* resnet18"),
        ("timm/resnet18.a1_in2k", r"'resnet18\.a1_in2k'; .* resnet18\.a1_in1k"),
        ("torchvision/resnet81", "'resnet81'; .* resnet18"),
        ("torchvision/resnet50.IMAGENET1K_V3", "resnet50 'IMAGENET1K_V3'; .* IMAGENET1K_V"),
    ],
)
def test_names_that_a_library_does_not_have(name: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_weights(name)


def test_a_file_goes_before_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_pretrained_name("timm/resnet18")
    assert not is_pretrained_name("weights/resnet18.pth")
    (tmp_path / "timm").mkdir()
    torch_file(tmp_path / "timm" / "resnet18", WEIGHTS)
    assert not is_pretrained_name("timm/resnet18")
    assert same(read_weights("timm/resnet18"))
