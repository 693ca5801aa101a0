"""Which location a path or URL names, and what is no name of one."""

import os
import pickle
from pathlib import Path

import pytest

import shardio
from shardio.errors import OptionError
from shardio.storage.location import locate


def test_a_storage_pickles_to_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"1")
    monkeypatch.chdir(tmp_path)
    storage = pickle.loads(pickle.dumps(locate(".")))
    monkeypatch.chdir("/")
    assert storage.read("x", 10) == b"1"


def test_urls_and_paths_name_the_same_directory(tmp_path: Path) -> None:
    odd = tmp_path / "a b\udcff%41"
    odd.mkdir()
    (odd / "x").write_bytes(b"1")
    quoted = f"{tmp_path}/a%20b%FF%2541"
    for url in (str(odd), os.fsencode(odd), odd, f"file://{quoted}", f"file://localhost{quoted}"):
        assert locate(url).read("x", 1) == b"1"
    assert locate("a/b://c").url == "a/b://c"  # a path, if an odd one


@pytest.mark.parametrize("url", ["ftp://host/x", "://x", "s3\x1b://x"])
def test_a_scheme_that_is_not_known_is_said(url: str) -> None:
    with pytest.raises(OptionError, match="is not known") as caught:
        locate(url)
    assert str(caught.value).isprintable()


def test_a_file_url_of_two_slashes_does_not_lead_elsewhere() -> None:
    with pytest.raises(OptionError, match="three slashes"):
        locate("file://data/train")


@pytest.mark.parametrize("path", ["s3:/bucket/x", "s3:bucket/x", "S3:/me:CANARY@bucket/x"])
def test_a_url_with_a_slash_too_few_is_told(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (shardio.open, lambda out: shardio.copy(tmp_path, out)):
        with pytest.raises(OptionError, match=r"(?i)expected s3://bucket/x") as told:
            use(path)
        assert "CANARY" not in str(told.value)
    (tmp_path / path.partition("/")[0]).mkdir()
    assert locate(path).url == path


@pytest.mark.parametrize(("given", "meant"), [("s3a", "s3"), ("gcs", "gs"), ("htpps", "https")])
def test_a_slip_of_a_scheme_is_asked_about(given: str, meant: str) -> None:
    with pytest.raises(OptionError, match=rf"{given}:// is not known; .*did you mean '{meant}'"):
        locate(f"{given}://bucket/a")
