"""The page on eject: its commands run, and the loop that it shows is the one that is written."""

from pathlib import Path

from support.forkserver import paceline, script_ranks
from support.pages import ROOT, blocks, commands

PAGE = ROOT / "docs/eject.md"
SMALLER = ["model.widths=[2]", "data.batch_size=1000", "logging.images=false"]


def test_commands_run(tmp_path: Path) -> None:
    eject, alone, shared, evaluate = [
        words for block in blocks(PAGE) if block.language == "bash" for words in commands(block)
    ]
    written = paceline(tmp_path, *eject[1 : eject.index(">")], *SMALLER)
    assert written.returncode == 0, written.stderr
    file = tmp_path / eject[-1]
    file.write_text(written.stdout, encoding="utf-8")
    assert alone == ["python", file.name]
    (done,) = script_ranks(1, file)
    assert done.returncode == 0, done.stderr
    assert shared[:4] == ["torchrun", "--nproc-per-node", "2", file.name]
    assert [each.returncode for each in script_ranks(2, file, *shared[4:])] == [0, 0]
    measured = paceline(tmp_path, *evaluate[1:], *SMALLER)
    assert measured.returncode == 0, measured.stderr
    assert "top1" in measured.stdout


def test_the_loop_and_the_number_of_lines_are_those_of_the_file(tmp_path: Path) -> None:
    lines = paceline(tmp_path, "eject", "quickstart").stdout.splitlines()
    (loop,) = [block.text for block in blocks(PAGE) if block.language == "python"]
    assert "\n".join(line.removeprefix("    ") for line in lines).find(loop.rstrip()) > 0
    assert f"quickstart has {len(lines)} lines" in PAGE.read_text(encoding="utf-8")
