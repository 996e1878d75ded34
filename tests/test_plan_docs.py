"""The page on plans: its commands run, on a smaller network."""

from pathlib import Path

import pytest
from support.pages import ROOT, blocks, commands

from paceline.cli import main

SMALLER = ["model.widths=[4]", "data.batch_size=64", "train.activation_checkpointing=none", "train.channels_last=false"]


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    found = [words for block in blocks(ROOT / "docs/plan.md") for words in commands(block)]
    assert [words[1] for words in found] == ["plan", "plan", "plan", "plan", "plan", "find-batch"]
    for words in found:
        assert main([*words[1:], *SMALLER]) == 0, words
        printed = capsys.readouterr().out
        assert ("predicted beside measured" in printed) == ("--measure" in words)
        assert ("estimated time" in printed) == (words[1] == "plan" and not any("MiB" in word for word in words))
    assert (tmp_path / "plan.png").is_file()
