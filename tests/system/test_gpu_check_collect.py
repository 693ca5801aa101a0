"""What tools/gpu-check carries to a machine without network, and what it installs there."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support.trees import ROOT

from benchmarks.data import CIFAR, PHOTOS, Data
from tools.gpu_check import collect, environment, limited

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED HERE: it needs Linux")


def archive(path: Path, count: int) -> None:
    with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w") as tar:
        for i in range(count):
            content = np.random.default_rng(i).bytes(3_000)
            member = tarfile.TarInfo(f"./class{i % 4}/{i:03d}.jpg")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_a_part_of_the_images_is_taken_that_the_benchmarks_read(tmp_path: Path) -> None:
    carried = tmp_path / "carried"
    carried.mkdir()
    for name, count in ((PHOTOS, 100), (CIFAR, 200)):
        archive(tmp_path / name, count)
        row = collect.thin(tmp_path / name, carried / name, 100_000, 25)
        assert row.size == (carried / name).stat().st_size <= 100_000
        assert row.about == f"25 images of {count}"
    data = Data(carried, tmp_path / "scratch", quick=False, rivals=False)
    assert len(list(data.photos(60).rglob("*.jpg"))) == 75
    files = {
        path.relative_to(tmp_path / "scratch" / "cifar") for path in data.cifar().rglob("*.jpg")
    }
    assert len(files) == 25 and Path("class0/000.jpg") in files
    row = collect.thin(tmp_path / PHOTOS, carried / PHOTOS, 50_000, None)
    assert 40_000 < row.size <= 50_000
    assert "no image fits" in collect.thin(tmp_path / PHOTOS, carried / PHOTOS, 10, None).about
    assert "NOT THERE" in collect.thin(tmp_path / "no.tar", carried / "no.tar", 10, None).about
    assert sorted(path.name for path in carried.iterdir()) == [CIFAR]


def test_what_is_for_others_is_left_out_of_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "nvidia_nvimgcodec_cu13-1-py3-none-any.whl"
    folder, about = "nvidia/nvimgcodec", "nvidia_nvimgcodec_cu13-1.dist-info"
    kept = [
        f"{folder}/__init__.py",
        f"{folder}/impl.cpython-312-x86_64-linux-gnu.so",
        f"{folder}/libnvimgcodec.so.0",
        f"{folder}/extensions/libnvjpeg_ext.so.0",
        f"{folder}/extensions/libjpeg_turbo_ext.so.0",
    ]
    gone = [
        f"{folder}/impl.cpython-313-x86_64-linux-gnu.so",
        f"{folder}/impl.cpython-312t-x86_64-linux-gnu.so",
        f"{folder}/extensions/libnvjpeg2k_ext.so.0",
        f"{folder}/extensions/libopencv_ext.so.0",
    ]
    with zipfile.ZipFile(wheel, "w") as made:
        for name in kept + gone:
            made.writestr(name, name * 100)
        record = "".join(f"{name},sha256=x,1\n" for name in kept + gone)
        made.writestr(f"{about}/RECORD", record + f"{about}/RECORD,,\n")
    collect.slim(wheel, "3.12")
    with zipfile.ZipFile(wheel) as found:
        assert sorted(found.namelist()) == sorted([*kept, f"{about}/RECORD"])
        listed = [line.split(",")[0] for line in found.read(f"{about}/RECORD").decode().split()]
    assert listed == [*kept, f"{about}/RECORD"]


def test_the_table_names_what_went_in_and_its_size() -> None:
    rows = [collect.Row("lmdb", 2**20, "3.0.0"), collect.Row("photos", 2**19, "7 images")]
    assert collect.table(rows, 2**21).splitlines() == [
        "lmdb         1.00 MiB  3.0.0",
        "photos       0.50 MiB  7 images",
        "together     1.50 MiB  limit 2.0 MiB",
    ]


def test_torch_is_not_collected_but_all_else_that_is_needed() -> None:
    wanted = collect.wanted("13", ["torchcodec"])
    text = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]")[0]
    needed = set(re.findall(r'^    "([a-z0-9]+)', text, re.M))
    assert needed - set(wanted) == {"torch", "numpy"}
    assert {"pillow", "pytest", "hypothesis", "nvidia-nvimgcodec-cu13", "nvidia-nvjpeg"} <= set(
        wanted
    )
    assert "torchcodec" not in wanted
    assert "nvidia-nvjpeg-cu12" in collect.wanted("12", [])


@pytest.mark.parametrize(
    "listing",
    [
        "Package  Version\n-------- -------\nPillow   12.3.0\npip      25.1\nMarkup_Safe 3.0\n",
        "pillow==12.3.0\ntorch==2.11.0+cu130\nmarkup.safe @ file:///wheels/x.whl\n",
    ],
    ids=["pip list", "pip freeze"],
)
def test_what_the_machine_has_is_left_out(listing: str, tmp_path: Path) -> None:
    file = tmp_path / "listing"
    file.write_text(listing)
    found = collect.present(file)
    assert {"pillow", "markup-safe"} <= found.keys() and "package" not in found
    assert found["pillow"] == "12.3.0" and found.get("torch", "2.11.0+cu130") == "2.11.0+cu130"
    assert "pillow" in collect.wanted("13", [])


@pytest.mark.parametrize(
    ("torch", "asked", "said"),
    [
        ("", "torchcodec>=0.16", ""),
        ("2.11.0+cu130", "torchcodec>=0.16", ""),
        ("2.13", "torchcodec>=0.16", ""),
        ("3.0.1", "torchcodec>=0.16", ""),
        ("2.10.0", "", "torchcodec 0.10, which fits torch 2.10, has no decode_jpeg"),
        ("2.9.1", "", "torchcodec 0.9, which fits torch 2.9, has no decode_jpeg"),
        ("2.3.1", "", "no torchcodec fits torch 2.3"),
    ],
)
def test_torchcodec_is_of_the_release_that_fits_torch(torch: str, asked: str, said: str) -> None:
    assert collect.torchcodec_for(torch) == (asked, said)


@pytest.mark.parametrize(
    ("words", "torchcodec", "said"),
    [
        (["--torch", "2.11.0"], ["torchcodec>=0.16"], ""),
        (["--torch", "2.10.0"], [], "left out: torchcodec 0.10, which fits torch 2.10, has no"),
        (["--without-present", "listing"], [], "left out: torchcodec 0.9, which fits torch 2.9,"),
        (["--without-present", "listing", "--torch", "2.12"], ["torchcodec>=0.16"], ""),
        (["--torch", "2.10", "--without", "torchcodec"], [], ""),
    ],
)
def test_a_torchcodec_that_decodes_no_jpeg_is_left_out_and_named(
    words: list[str], torchcodec: list[str], said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked: list[str] = []

    def wheels(folder: Path, names: list[str], python: str) -> list[collect.Row]:
        asked.extend(names)
        return []

    monkeypatch.chdir(tmp_path)
    (tmp_path / "listing").write_text("pip 25.1\ntorch 2.9.1+cu130\ntqdm 4.70\n")
    monkeypatch.setattr(collect, "collect_wheels", wheels)
    monkeypatch.setattr(collect, "collect_libraries", lambda folder: collect.Row("x", 0, ""))
    assert collect.main(["out", "--data", str(tmp_path), *words]) == 0
    assert [name for name in asked if "torchcodec" in name] == torchcodec
    assert "" not in asked and ("tqdm" in asked) is ("listing" not in words)
    printed = capsys.readouterr().out
    assert said in printed and ("left out" in printed) is bool(said)
    assert printed.strip() in (tmp_path / "out" / "collected.txt").read_text()


@pytest.mark.parametrize("text", [None, "numpy 2.5\n", b"\xff\xfe"])
def test_what_is_no_listing_is_refused(text: str | bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "listing"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(collect.CollectError, match="--without-present"):
        collect.present(file)


def wheel(folder: Path, name: str, version: str) -> None:
    """Make a wheel that holds one module, whose `version` is this one."""
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{about}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as made:
        for file, content in files.items():
            made.writestr(file, content)


def test_only_what_is_missing_is_installed_beside_what_is_there(tmp_path: Path) -> None:
    carried, site, log = tmp_path / "wheels", tmp_path / "site", tmp_path / "log"
    carried.mkdir()
    wheel(carried, "shardio_gpu_check_test", "1.0")
    wheel(carried, "tqdm", "0.0.1")
    done = environment.install(carried, site, log)
    assert done["shardio-gpu-check-test"] == "1.0 installed"
    assert done["tqdm"].endswith("is here already")
    assert not (site / "tqdm.py").exists()
    code = "import shardio_gpu_check_test as it; print(it.version)"
    env = environment.variables(site)
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert found.stdout == "1.0\n", found.stderr
    before = (site / "shardio_gpu_check_test.py").stat().st_mtime_ns
    assert environment.install(carried, site, log) == done  # nothing to do
    assert (site / "shardio_gpu_check_test.py").stat().st_mtime_ns == before
    (carried / "shardio_gpu_check_test-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    shutil.rmtree(site)
    done = environment.install(carried, site, log)
    assert done["shardio-gpu-check-test"].startswith("NOT installed, pip: ")
    assert not site.exists()


def test_the_least_versions_are_those_of_pyproject() -> None:
    least = environment.least_versions((ROOT / "pyproject.toml").read_text())
    assert least["torch"] == "2.3" and least["pytest"] == "8" and least["setuptools"] == "77"


def test_without_a_compiler_it_goes_on_without_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment, "CORE", "raise SystemExit(1)")
    found = environment.build_core(None, environment.variables(tmp_path), tmp_path / "log")
    assert found == {
        "there": False,
        "what": "not built: there is no C compiler (cc, gcc, clang) here",
    }


def test_a_program_s_output_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    command = [sys.executable, "-c", "import sys; print('a'); print('b', file=sys.stderr)"]
    ended = limited.run(command, 60, log)
    assert (ended.code, ended.why, sorted(ended.tail.split())) == (0, "", ["a", "b"])
    assert log.read_text().startswith("before\n")
    apart = limited.run(command, 60, log, stdout=tmp_path / "out")
    assert (apart.tail, (tmp_path / "out").read_text()) == ("b\n", "a\n")
