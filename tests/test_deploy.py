"""The files under deploy/ and those that a release needs: well-formed, and in step with the package."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import yaml
from support.waiting import TIMEOUT

import paceline
from paceline.cli import _parse
from paceline.core.errors import CheckpointError, DataError, RecipeError, Stopped, UsageError
from paceline.launch.launcher import read_plan
from paceline.launch.machines import Launch
from paceline.launch.network import Endpoint

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


def test_the_script_for_slurm_is_well_formed() -> None:
    lines = (DEPLOY / "slurm.sh").read_text(encoding="utf-8").splitlines()
    assert subprocess.run(["bash", "-n", str(DEPLOY / "slurm.sh")]).returncode == 0
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", "\n".join(lines), re.MULTILINE))
    assert {"signal": "B:USR1@120", "open-mode": "append", "requeue": ""}.items() <= options.items()
    assert f'[ "$code" -eq {Stopped.exit_code} ]' in "\n".join(lines)
    last = max(place for place, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[: last + 1])  # else Slurm ignores them
    (command,) = re.findall(r"^\$ sbatch (.*)$", INSTALL, re.MULTILINE)
    given = re.findall(r"--([\w-]+) \d+", command)
    assert given
    assert set(given) <= options.keys()


def documents(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a file of Kubernetes, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8"))}


def launched(job: dict[str, Any], folder: Path, **variables: str) -> Launch:
    """What a pod of the job launches: its shell runs, with a `paceline` that writes down its arguments."""
    (container,) = job["template"]["spec"]["containers"]
    for name, line in {"getent": "echo $2 > host", "paceline": 'printf "%s\\n" "$@" > words'}.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    command = [*container["command"], *container["args"]]
    path = f"{folder}:{os.environ['PATH']}"
    subprocess.run(command, cwd=folder, env={"PATH": path, **variables}, check=True, timeout=TIMEOUT)
    options = _parse((folder / "words").read_text().splitlines())
    assert options.command == "train"
    plan = read_plan(options, 1)
    assert plan.rendezvous is not None
    assert (folder / "host").read_text().strip() == plan.rendezvous.host  # known before the launcher looks it up
    assert plan.processes == container["resources"]["limits"]["nvidia.com/gpu"]
    return plan


def check_job(job: dict[str, Any]) -> None:
    """A stopped run resumes without limit, a mistake ends the job, and all that is mounted is there."""
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy allows no other
    codes = [
        (rule["action"], rule["onExitCodes"]["values"])
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    ]
    mistakes = sorted({error.exit_code for error in (UsageError, RecipeError, DataError, CheckpointError)})
    assert codes == [("FailJob", mistakes), ("Ignore", [Stopped.exit_code])]


def test_the_kubernetes_job_starts_the_launcher_of_every_pod(tmp_path: Path) -> None:
    found = documents("kubernetes.yaml")
    service, job = found["Service"], found["Job"]
    assert (job["apiVersion"], service["apiVersion"]) == ("batch/v1", "v1")
    spec, name = job["spec"], job["metadata"]["name"]
    check_job(spec)
    plan = launched(spec, tmp_path)
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == plan.min_nodes == plan.max_nodes
    assert plan.rendezvous == Endpoint(f"{name}-0.{service['metadata']['name']}", 29400)
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert (service["spec"]["clusterIP"], service["spec"]["selector"]) == ("None", {"job-name": name})


def test_the_train_job_has_what_the_operator_looks_for(tmp_path: Path) -> None:
    found = documents("trainjob.yaml")
    runtime, job = found["TrainingRuntime"], found["TrainJob"]
    assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    assert job["spec"]["runtimeRef"] == reference
    assert (
        job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"]
    )  # without it, no PET_ variables
    assert "torch" in runtime["spec"]["mlPolicy"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = replicated["template"]
    assert template["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert [replicated["name"], template["spec"]["template"]["spec"]["containers"][0]["name"]] == ["node", "node"]
    check_job(template["spec"])
    told = {"PET_NNODES": "2", "PET_MASTER_ADDR": "paceline-node-0-0.paceline", "PET_MASTER_PORT": "29400"}
    plan = launched(template["spec"], tmp_path, **told)
    assert (plan.max_nodes, plan.rendezvous) == (2, Endpoint("paceline-node-0-0.paceline", 29400))


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
    assert all(
        shlex.split(line[2:])[0] in ("paceline", "sbatch") for line in INSTALL.splitlines() if line.startswith("$ ")
    )
