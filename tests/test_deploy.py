"""The files under deploy/ and those that a release needs: well-formed, and in step with the package."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import paceline
from paceline.cli import _parse, main

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments; comments are left out, and continued lines joined."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    assert all(len(pair) == 2 for pair in pairs), pairs
    return [(name, arguments) for name, arguments in pairs]


def test_the_docker_file_builds_on_what_is_there_and_runs_the_command() -> None:
    found = instructions(DEPLOY / "Dockerfile")
    names = [name for name, _ in found]
    assert set(names) <= {"ARG", "FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert names[:2] == ["ARG", "FROM"]
    torch = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert torch
    assert f":{torch[1]}-" in found[0][1]  # the base image has the torch that the constraints pin
    for _, arguments in (pair for pair in found if pair[0] == "COPY"):
        sources = arguments.split()[:-1]
        assert sources
        assert all((ROOT / source).exists() for source in sources), sources
    for _, arguments in (pair for pair in found if pair[0] == "RUN"):
        assert subprocess.run(["bash", "-n", "-c", arguments]).returncode == 0
    assert json.loads(dict(found)["ENTRYPOINT"]) == ["paceline"]
    assert json.loads(dict(found)["CMD"]) == ["--help"]
    assert names.index("USER") > max(place for place, name in enumerate(names) if name == "RUN")  # not as root


def test_the_slurm_command_writes_a_script_that_is_well_formed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^\$ paceline (slurm .*)$", INSTALL, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    lines = (tmp_path / "job.sh").read_text(encoding="utf-8").splitlines()
    assert subprocess.run(["bash", "-n", "job.sh"], cwd=tmp_path).returncode == 0
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", "\n".join(lines), re.MULTILINE))
    assert {"nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "4", "time": "24:00:00"}.items() <= options.items()
    last = max(place for place, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(not line or line.startswith("#") for line in lines[: last + 1])  # else Slurm ignores them


def test_the_kubernetes_job_has_what_the_operator_asks_for() -> None:
    job = yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
        words = container["args"][container["args"].index("paceline") + 1 :]
        assert _parse(words).command == "train"


def test_the_pages_name_every_file_and_every_extra() -> None:
    assert {path.name for path in DEPLOY.iterdir()} == set(re.findall(r"\(\.\./deploy/([\w.]+)\)", INSTALL))
    assert set(PROJECT["optional-dependencies"]) - {"bench"} == set(re.findall(r"`paceline\[(\w+)\]`", INSTALL))


def test_version_and_license_are_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "type"} <= citation.keys()
    assert citation["version"] == PROJECT["version"] == paceline.__version__
    assert citation["license"] == PROJECT["license"]
    classified = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text}
    assert classified == set(re.findall(r"\b3\.1\d\b", INSTALL.split("## Python versions")[1]))
    assert all(shlex.split(line[2:])[0] == "paceline" for line in INSTALL.splitlines() if line.startswith("$ "))
