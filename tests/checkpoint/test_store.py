"""Checkpoints are whole or absent, damage is noticed, and nothing that is not ours is ever deleted."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from damage import unnoticed
from support.full_disk import files_limited_to
from torch import Tensor, nn

from paceline.checkpoint.files import dump_checksummed, load_checksummed
from paceline.checkpoint.reader import Checkpoint, open_checkpoint
from paceline.checkpoint.store import Store
from paceline.core.errors import CheckpointError

FILES = ["manifest.json", "model.safetensors", "state.json", "state.safetensors"]


def model_at(step: int) -> dict[str, Tensor]:
    return {"conv.weight": torch.full((4, 3), float(step)), "conv.bias": torch.arange(4.0) + step}


def state_at(step: int) -> dict[str, Any]:
    return {
        "progress": {"step": step},
        "ema": {"conv.weight": torch.full((50,), step / 3)},
        "loss": 0.1 * step,
    }


def save(store: Store, step: int, **metrics: float) -> Path:
    return store.save(step, model_at(step), state_at(step), metrics).path


def is_of_step(checkpoint: Checkpoint | None, step: int) -> bool:
    assert checkpoint is not None
    model, state = model_at(step), state_at(step)
    return (
        checkpoint.step == step
        and checkpoint.model.keys() == model.keys()
        and all(checkpoint.model[name].equal(model[name]) for name in model)
        and bool(checkpoint.state["progress"] == {"step": step})
        and bool(checkpoint.state["ema"]["conv.weight"].equal(state["ema"]["conv.weight"]))
        and bool(checkpoint.state["loss"] == state["loss"])
    )


def step_folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != "index.json")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def root(run: Path) -> Path:
    return run / "checkpoints"


def test_a_checkpoint_comes_back_as_it_was_saved(root: Path) -> None:
    path = save(Store(root), 1200, top1=0.5)
    assert path == root / "step-00001200"
    assert sorted(item.name for item in path.iterdir()) == FILES
    checkpoint = open_checkpoint(path)
    assert is_of_step(checkpoint, 1200)
    assert checkpoint.metrics == {"top1": 0.5}
    plain = safetensors.torch.load_file(path / "model.safetensors")
    assert plain["conv.bias"].tolist() == [1200, 1201, 1202, 1203]


def test_the_manifest_tells_what_sha256sum_tells(root: Path) -> None:
    path = save(Store(root), 3, top1=0.5)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["torch"]) == (1, 3, torch.__version__)
    names = sorted(set(FILES) - {"manifest.json"})
    lines = subprocess.run(["sha256sum", *names], cwd=path, capture_output=True, text=True, check=True).stdout
    assert [line.split() for line in lines.splitlines()] == [[manifest["files"][n]["sha256"], n] for n in names]
    assert [manifest["files"][n]["size"] for n in names] == [(path / n).stat().st_size for n in names]


def test_tied_and_strided_weights_keep_all_their_names(root: Path) -> None:
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    weights = {**nn.Sequential(embedding, head).state_dict(), "turned": embedding.weight.t()}
    back = open_checkpoint(Store(root).save(1, weights, {}, {}).path).model
    assert back.keys() == {"0.weight", "1.weight", "turned"}
    assert back["0.weight"].equal(back["1.weight"])
    assert back["turned"].equal(back["0.weight"].t())


def test_the_newest_the_best_and_a_run_directory_can_be_opened(run: Path, root: Path) -> None:
    store = Store(root, best="top1")
    assert store.newest() is None
    for step, top1 in ((10, 0.3), (20, 0.9), (30, 0.5)):
        save(store, step, top1=top1)
    assert is_of_step(store.newest(), 30)
    assert is_of_step(open_checkpoint(run), 30)
    assert is_of_step(open_checkpoint(root), 30)
    assert is_of_step(open_checkpoint(run / "best"), 20)
    assert is_of_step(open_checkpoint(root / "step-00000010"), 10)
    assert (run / "best").readlink() == Path("checkpoints/step-00000020")


def test_a_moved_run_still_finds_its_best(run: Path, root: Path, tmp_path: Path) -> None:
    save(Store(root, best="top1"), 10, top1=0.3)
    run.rename(tmp_path / "elsewhere")
    assert is_of_step(open_checkpoint(tmp_path / "elsewhere" / "best"), 10)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nowhere", "does not exist"),
        ("dangling", "links to gone, which does not exist"),
        ("file", "is a file"),
        ("empty", "contains no checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_distinguished(tmp_path: Path, what: str, words: str) -> None:
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=f"{what}: {words}"):
        open_checkpoint(tmp_path / what)


def test_every_mutation_is_noticed(root: Path) -> None:
    path = save(Store(root), 7, top1=0.25)
    before = content_of(path)
    assert unnoticed(path, 600, seed=0) == []
    assert content_of(path) == before
    assert is_of_step(open_checkpoint(path), 7)


def test_a_changed_byte_is_reported_with_what_was_expected(root: Path) -> None:
    path = save(Store(root), 7, top1=0.25)
    rng = random.Random(0)
    for _ in range(40):
        name = rng.choice(FILES)
        original = (path / name).read_bytes()
        changed = bytearray(original)
        changed[rng.randrange(len(changed))] ^= rng.randrange(1, 256)
        (path / name).write_bytes(changed)
        with pytest.raises(CheckpointError, match=f"{name}: .*expected .*found"):
            open_checkpoint(path)
        (path / name).write_bytes(original)
    assert is_of_step(open_checkpoint(path), 7)


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_and_every_lost_file_is_noticed(root: Path, name: str) -> None:
    path = save(Store(root), 7)
    original = (path / name).read_bytes()
    for length in {0, 1, 7, len(original) // 2, len(original) - 1}:
        (path / name).write_bytes(original[:length])
        with pytest.raises(CheckpointError, match=name):
            open_checkpoint(path)
    (path / name).write_bytes(original + b"\n")
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: cannot be read|contains no checkpoint"):
        open_checkpoint(path)


def test_what_is_no_file_is_refused_rather_than_waited_for(root: Path) -> None:
    path = save(Store(root), 7)
    manifest = load_checksummed(path / "manifest.json")
    manifest["files"]["state.json"] = {"size": 0, "sha256": hashlib.sha256().hexdigest()}
    (path / "manifest.json").write_bytes(dump_checksummed(manifest))
    (path / "state.json").unlink()
    os.mkfifo(path / "state.json")
    with pytest.raises(CheckpointError, match=r"state\.json: cannot be read: a pipe"):
        open_checkpoint(path)


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(run: Path, root: Path) -> None:
    store = Store(root)
    for step in (1, 2, 3):
        save(store, step)
    (root / "step-00000003" / "manifest.json").unlink()
    with (root / "step-00000002" / "state.safetensors").open("r+b") as file:
        file.truncate(20)
    checkpoint = store.newest()
    assert is_of_step(checkpoint, 1)
    assert ["step-00000003" in store.rejected[0], "step-00000002" in store.rejected[1]] == [True, True]
    assert open_checkpoint(run).rejected == tuple(store.rejected)
    shutil.rmtree(root / "step-00000001")
    assert store.newest() is None
    with pytest.raises(CheckpointError, match=r"\n.*step-00000003"):
        open_checkpoint(run)


def test_a_folder_under_another_steps_name_is_not_taken_for_it(root: Path) -> None:
    store = Store(root)
    shutil.copytree(save(store, 1), root / "step-00000009")
    assert is_of_step(store.newest(), 1)
    assert "expected step 9, found 1" in store.rejected[0]
    assert is_of_step(open_checkpoint(root / "step-00000009"), 1)


def test_a_newer_format_is_named(root: Path) -> None:
    from paceline.checkpoint.files import dump_checksummed

    manifest = save(Store(root), 1) / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["checksum"]
    manifest.write_bytes(dump_checksummed({**content, "format": 2}))
    with pytest.raises(CheckpointError, match=r"format 1, .* 2"):
        open_checkpoint(root)


def test_rotation_keeps_the_newest_and_the_best(run: Path, root: Path) -> None:
    store = Store(root, keep_last=2, best="loss", direction="min")
    losses = {1: 0.9, 2: 0.2, 3: float("nan"), 4: 0.5, 5: 0.2, 6: 0.7}
    bests = []
    for step, loss in losses.items():
        saved = store.save(step, model_at(step), state_at(step), {"loss": loss})
        bests.append(saved.is_best)
    # The first of two equals stays the best.
    assert bests == [True, True, False, False, False, False]
    assert step_folders(root) == ["step-00000002", "step-00000005", "step-00000006"]
    assert is_of_step(open_checkpoint(run / "best"), 2)
    assert store.index() == [
        {"step": 2, "metrics": {"loss": 0.2}, "best": True},
        {"step": 5, "metrics": {"loss": 0.2}, "best": False},
        {"step": 6, "metrics": {"loss": 0.7}, "best": False},
    ]
    assert json.loads((root / "index.json").read_text())["steps"] == store.index()


def test_best_and_rotation_follow_when_a_checkpoint_is_judged_after_it_was_saved(run: Path, root: Path) -> None:
    store = Store(root, keep_last=1, best="top1")
    for step, top1, kept, best in ((1, 0.5, [1], 1), (2, 0.4, [1, 2], 1), (3, 0.9, [3], 3), (4, 0.8, [3, 4], 3)):
        before = step_folders(root) if root.exists() else []
        save(store, step)
        # Until it is judged, what it may replace as the best is there beside it.
        assert step_folders(root)[-1:] == [f"step-{step:08d}"]
        assert set(before[:1]) <= set(step_folders(root))
        entered = store.record_metrics(step, {"top1": top1, "loss": float("inf")})
        assert entered.is_best == (best == step)
        assert step_folders(root) == [f"step-{each:08d}" for each in kept]
        assert is_of_step(open_checkpoint(run / "best"), best)
        found = open_checkpoint(entered.path)
        assert is_of_step(found, step)
        assert found.metrics == {"top1": top1, "loss": float("inf")}
        assert sorted(item.name for item in entered.path.iterdir()) == FILES
    assert [(entry["step"], entry["best"]) for entry in store.index()] == [(3, True), (4, False)]
    shutil.rmtree(root / "step-00000004")
    with pytest.raises(CheckpointError, match="step-00000004"):
        store.record_metrics(4, {"top1": 1.0})


def test_every_nth_step_is_kept(root: Path) -> None:
    store = Store(root, keep_last=1, keep_every=10, best="top1")
    for step in (4, 10, 14, 20, 25, 33):
        save(store, step, top1=1 / step)
    assert step_folders(root) == [f"step-000000{step}" for step in ("04", "10", "20", "33")]
    with pytest.raises(ValueError, match=r"keep_every: .* 0"):
        Store(root, keep_every=0)


def test_without_the_metric_there_is_no_best_and_the_link_stays(run: Path, root: Path) -> None:
    save(Store(root, keep_last=1, best="top1"), 1, top1=0.5)
    for step in (2, 3):
        assert not Store(root, keep_last=1).save(step, model_at(step), state_at(step), {}).is_best
    assert step_folders(root) == ["step-00000001", "step-00000003"]
    assert is_of_step(open_checkpoint(run / "best"), 1)


def test_going_back_deletes_nothing_newer_and_keeps_what_was_just_saved(root: Path) -> None:
    store = Store(root, keep_last=2)
    for step in (10, 20, 30):
        save(store, step)
    path = save(store, 15)
    assert is_of_step(open_checkpoint(path), 15)
    assert step_folders(root) == ["step-00000015", "step-00000020", "step-00000030"]


@pytest.mark.parametrize("damage", ["missing", "flipped", "empty", "other"])
def test_the_index_is_rebuilt_from_the_folders(root: Path, damage: str) -> None:
    store = Store(root, best="top1")
    for step in (1, 2, 3):
        save(store, step, top1=0.1 * step, loss=float("nan"))
    before = store.index()
    index = root / "index.json"
    raw = index.read_bytes()
    if damage == "missing":
        index.unlink()
    else:
        index.write_bytes({"flipped": raw.replace(b"3", b"4", 1), "empty": b"", "other": b"[1]"}[damage])
    assert repr(Store(root, best="top1").index()) == repr(before)
    save(store, 4, top1=0.05)
    assert step_folders(root) == ["step-00000002", "step-00000003", "step-00000004"]


def test_what_others_put_there_is_never_deleted(run: Path, root: Path) -> None:
    store = Store(root, keep_last=1)
    annotated = save(store, 1)
    (annotated / "notes.txt").write_text("keep me")
    (root / "step-00000000").mkdir()
    (root / "step-00000000" / "mine.bin").write_text("mine")
    (root / ".step-00000005.partial").mkdir()
    (root / ".step-00000005.partial" / "photo.png").write_text("mine")
    (root / "readme.md").write_text("mine")
    borrowed = run / "borrowed" / "checkpoints"
    shutil.copytree(save(Store(borrowed), 2), root / "step-00000002")
    for step in (6, 7, 8):
        save(store, step)
    steps = [f"step-0000000{step}" for step in (0, 1, 2, 8)]
    assert step_folders(root) == [".step-00000005.partial", "readme.md", *steps]
    assert sorted(item.name for item in annotated.iterdir()) == sorted([*FILES, "notes.txt"])
    assert (root / ".step-00000005.partial" / "photo.png").exists()
    assert is_of_step(open_checkpoint(root / "step-00000002"), 2)


def test_a_link_to_a_folder_elsewhere_is_not_followed(root: Path, tmp_path: Path) -> None:
    store = Store(root, keep_last=1)
    path = save(store, 1)
    path.rename(tmp_path / "archive")
    path.symlink_to(tmp_path / "archive")
    for step in (2, 3):
        save(store, step)
    assert path.is_symlink()
    assert is_of_step(open_checkpoint(tmp_path / "archive"), 1)
    with pytest.raises(CheckpointError, match="step-00000001: "):
        save(store, 1)


def test_leftovers_of_a_killed_save_go_with_the_next(root: Path) -> None:
    store = Store(root)
    save(store, 1)
    leftover = root / ".step-00000002.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    save(store, 3)
    assert step_folders(root) == ["step-00000001", "step-00000003"]


def test_saving_a_step_again_replaces_it_and_moves_what_others_added(root: Path) -> None:
    store = Store(root, best="top1")
    path = save(store, 5, top1=0.9)
    (path / "notes.txt").write_text("keep me")
    (path / "model.safetensors").write_bytes(b"damaged")
    store.save(5, model_at(6), state_at(6), {"top1": 0.1})
    assert open_checkpoint(path).model["conv.weight"][0, 0] == 6
    assert (path / "notes.txt").read_text() == "keep me"
    assert store.index() == [{"step": 5, "metrics": {"top1": 0.1}, "best": True}]
    assert step_folders(root) == ["step-00000005"]


def test_the_last_step_is_the_one_saved_or_found(root: Path) -> None:
    store, again = Store(root), Store(root)
    steps = [store.last_step]
    save(store, 4)
    steps += [store.last_step, again.last_step]
    again.newest()
    assert [*steps, again.last_step] == [None, 4, None, 4]


def test_what_cannot_be_saved_leaves_no_trace(root: Path) -> None:
    with pytest.raises(TypeError, match="when"):
        Store(root).save(1, model_at(1), {"when": object()}, {})
    with pytest.raises(TypeError, match="metrics"):
        Store(root).save(1, model_at(1), {}, {"confusion": torch.zeros(2)})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="-1"):
        Store(root).save(-1, model_at(1), {}, {})
    assert not root.exists()


def content_of(root: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != "index.json"}


@pytest.mark.parametrize("big", ["model", "state"])
def test_a_write_that_fails_leaves_the_checkpoints_as_they_were(run: Path, root: Path, big: str) -> None:
    store = Store(root, keep_last=1, best="top1")
    save(store, 1, top1=0.5)
    save(store, 2, top1=0.2)
    before = content_of(root)
    weights = {"weight": torch.zeros(2000)}
    model, state = (weights, {}) if big == "model" else ({}, weights)
    # From no byte at all, where the first file fails, to all but the last byte of the largest.
    for limit in [*range(0, 8000, 97), 8000]:
        with files_limited_to(limit), pytest.raises(CheckpointError) as caught:
            store.save(3, model, state, {"top1": 0.9})
        message = str(caught.value)
        assert message.startswith(str(root / "step-00000003"))
        assert re.search(r"\(8,\d{3} bytes are needed\)", message)
        assert "File too large" in message
        assert content_of(root) == before
        assert step_folders(root) == ["step-00000001", "step-00000002"]
    assert is_of_step(store.newest(), 2)
    assert is_of_step(open_checkpoint(run / "best"), 1)
    save(store, 3, top1=0.9)
    assert step_folders(root) == ["step-00000003"]


KILLED_ANYWHERE = """
import os, shutil, sys
from pathlib import Path
import torch
from paceline.checkpoint.reader import open_checkpoint
from paceline.checkpoint.store import Store

torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # a kill, unlike a power cut, loses nothing that was written
WATCHED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.listdir", "os.scandir"}

def save(root, step, value, top1):
    weights = {"weight": torch.full((3,), float(value))}
    Store(root, keep_last=1, best="top1").save(step, weights, {"value": value}, {"top1": top1})

def killed_save(root, moment, step):
    left = moment
    def strike(event, arguments):
        nonlocal left
        if event in WATCHED:
            left -= 1
            if left < 0:
                os._exit(9)
    sys.addaudithook(strike)
    save(root, step, 33, 0.7)
    os._exit(0)

def outcome(run, step):
    shutil.copytree(TEMPLATE, run, symlinks=True)
    root = run / "checkpoints"
    child = os.fork()
    if child == 0:
        killed_save(root, int(run.name.split("-")[1]), step)
    finished = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store = Store(root, keep_last=1, best="top1")
    found = store.newest()
    assert found.state["value"] == found.model["weight"][0] and found.state["value"] in (23, 33), found
    assert not store.rejected, store.rejected
    assert open_checkpoint(run / "best").state["value"] == 11
    assert [entry["best"] for entry in store.index()].count(True) == 1
    save(root, 5, 55, 0.3)
    assert sorted(os.listdir(root)) == ["index.json", "step-00000001", "step-00000005"], os.listdir(root)
    return finished, found.state["value"]

TEMPLATE = Path(sys.argv[1]) / "template"
for step, value, top1 in ((1, 11, 0.9), (2, 22, 0.1), (3, 23, 0.2)):
    save(TEMPLATE / "checkpoints", step, value, top1)

for step in (4, 3):
    values = []
    for moment in range(1000):
        finished, value = outcome(Path(sys.argv[1]) / f"{step}-{moment}", step)
        values.append(value)
        if finished:
            break
    assert values == sorted(values) and values[0] == 23 and values[-1] == 33, values
    print(step, len(values))
"""


def test_a_save_killed_at_any_moment_leaves_the_old_checkpoint_or_the_new(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_ANYWHERE, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    fresh, again = (int(line.split()[1]) for line in done.stdout.splitlines())
    assert min(fresh, again) > 20
