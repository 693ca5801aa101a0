"""The recipes of docs/packing.md for torchrun and Kubernetes, as far as one machine runs them.

There is no kubelet: its pods are processes here, with the variable that it sets, and one that is
killed is started again, as backoffLimitPerIndex has it.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, programs
from support.pages import blocks, replaced
from support.trees import ROOT, content, environment, images, plant, shardio

PAGE, SECTION = "packing.md", "torchrun, Kubernetes"
SMALL = ("--max-records", "4")
SCHEMA = json.loads((ROOT / "tests" / "golden" / "kubernetes" / "job-1.37.json").read_text())
PYTHON_TYPES = {
    **{"object": dict, "array": list, "string": str, "boolean": bool},
    **{"integer": int, "number": (int, float), "null": type(None)},
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return plant(tmp_path / "images", images())


@pytest.fixture
def expected(source: Path, tmp_path: Path) -> dict[bytes, bytes | None]:
    """What one process packs."""
    shardio("pack", source, tmp_path / "one", *SMALL, "--jobs", "1")
    return content(tmp_path / "one")


def test_torchrun_packs_a_part_in_each_process(
    source: Path, tmp_path: Path, expected: dict[bytes, bytes | None]
) -> None:
    (line,) = [one for one in blocks(PAGE, SECTION, "") if one.startswith("torchrun")]
    line = replaced(
        line,
        ("\\\n", ""),
        ("--nnodes 4 --nproc-per-node 1", "--nproc-per-node 3 --local-addr 127.0.0.1"),
        ("--rdzv-backend c10d --rdzv-endpoint node0:29400", "--standalone"),
        ("--no-python shardio", f"--no-python {sys.executable} -m shardio"),
        ("/data/images /shared/packed", f"{source} {tmp_path}/out"),
        ("--jobs 8", shlex.join(["--jobs", "1", *SMALL])),
    )
    launcher, *arguments = shlex.split(line)
    assert launcher == "torchrun"
    done = programs.run("-m", "torch.distributed.run", *arguments, limit_s=LIMIT_S, warm=True)
    assert not done.timed_out and done.code == 0 and not done.left, str(done)
    assert all(f"part {n + 1} of 3, by RANK={n}, WORLD_SIZE=3" in done.output for n in range(3))
    shardio("commit", tmp_path / "out", "--parts", "3")
    assert content(tmp_path / "out") == expected


# --- Kubernetes -----------------------------------------------------------------------------------


def misfits(value: Any, schema: Any, where: str) -> list[str]:
    """Return what does not fit a definition of Kubernetes; a name that it lacks is none."""
    if "$ref" in schema:
        schema = SCHEMA[schema["$ref"]]
    if "oneOf" in schema:
        return min((misfits(value, one, where) for one in schema["oneOf"]), key=len)
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(isinstance(value, PYTHON_TYPES[kind]) for kind in kinds) or (
        isinstance(value, bool) and "boolean" not in kinds
    ):
        return [f"{where} is {value!r}: expected {kinds}"]
    found = [f"{where} has no {name}" for name in schema.get("required", ()) if name not in value]
    if value not in schema.get("enum", [value]):
        found.append(f"{where} is {value!r}: expected {schema['enum']}")
    if isinstance(value, list):
        for number, one in enumerate(value):
            found += misfits(one, schema["items"], f"{where}[{number}]")
    for name, one in value.items() if isinstance(value, dict) else ():
        inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
        found += misfits(one, inner, f"{where}.{name}") if inner else [f"{where}.{name} is unknown"]
    return found


@pytest.fixture(scope="module")
def jobs() -> list[Any]:
    """The jobs of the page: the one that packs, the one that commits."""
    yaml = pytest.importorskip("yaml")  # comes with moto
    (text,) = blocks(PAGE, SECTION, "yaml")
    return list(yaml.safe_load_all(text))


def test_kubernetes_knows_each_word_of_the_jobs(jobs: list[Any]) -> None:
    root = {"$ref": "batch.v1.Job"}
    assert [misfits(job, root, job["metadata"]["name"]) for job in jobs] == [[], []]
    pack = jobs[0]["spec"]
    assert pack["completionMode"] == "Indexed"  # what backoffLimitPerIndex asks for, and Never
    assert pack["template"]["spec"]["restartPolicy"] == "Never"
    wrong = {**jobs[0], "spec": {**pack, "completions": "20", "retries": 3, "template": {}}}
    assert misfits(wrong, root, "job") == [
        "job.spec.completions is '20': expected ['integer', 'null']",
        "job.spec.retries is unknown",
    ]


class Pods:
    """Runs the commands of pods: those of the page, for three parts and on this machine's paths."""

    def __init__(self, jobs: list[Any], source: Path, out: Path) -> None:
        (pack,), (commit,) = (job["spec"]["template"]["spec"]["containers"] for job in jobs)
        assert str(jobs[0]["spec"]["completions"]) in pack["command"] and "20" in commit["command"]
        paths = {"/data/images": str(source), "/data/packed": str(out), "20": "3", "8": "1"}
        self.pack, self.commit = (
            (sys.executable, "-m", *(paths.get(one, one) for one in pod["command"]))
            for pod in (pack, commit)
        )
        self.pack += SMALL
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, line: Sequence[str], index: int | None = None) -> subprocess.Popen[bytes]:
        told = environment() if index is None else environment(JOB_COMPLETION_INDEX=str(index))
        self.started.append(subprocess.Popen(line, env=told, stderr=subprocess.DEVNULL))
        return self.started[-1]

    def stop(self) -> None:
        for pod in self.started:
            pod.kill()
            pod.wait()


@pytest.mark.skipif(shutil.which("strace") is None, reason="NOT TESTED HERE: strace is not there")
def test_a_pod_that_is_killed_is_started_again_with_its_index(
    jobs: list[Any], source: Path, tmp_path: Path, expected: dict[bytes, bytes | None]
) -> None:
    out = tmp_path / "out"
    pods = Pods(jobs, source, out)
    calls = "rename,renameat,renameat2,link,linkat"
    kill = ("strace", "-f", "-o", os.devnull, "-e", f"inject={calls}:signal=SIGKILL:when=2")
    try:
        commit = pods.start(pods.commit)
        first = [pods.start(kill * (index == 1) + pods.pack, index) for index in range(3)]
        codes = [pod.wait(LIMIT_S) for pod in first]
        assert codes[0] == codes[2] == 0 and codes[1] in (-9, 137)
        assert commit.poll() is None
        assert pods.start(pods.pack, 1).wait(LIMIT_S) == 0
        assert commit.wait(LIMIT_S) == 0
    finally:
        pods.stop()
    assert content(out) == expected
