"""shardio.open: a packed dataset as a plain sequence."""

import inspect
import multiprocessing
import os
import pickle
import pydoc
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image
from support import warm_python
from support.small_datasets import CLASSES, flip, jpeg, payload, shard_files
from torch.utils.data import Subset, WeightedRandomSampler

import shardio
from shardio import CenterCrop, DamageError, DecodeError, NotPackedError, OptionError, native
from shardio.dataset import sequence
from shardio.formats import manifest
from shardio.formats.record import RecordShard
from shardio.images.decode import decode as decode_image

Packed = Callable[..., Path]
COUNTS = [4, 0, 7, 1, 8]
N = sum(COUNTS)


def expected(number: int) -> dict[str, Any]:
    return {
        "__key__": f"k/{number:06d}.jpg",
        "image": payload(number),
        "label": number % 3,
    }


@pytest.fixture
def raw(packed: Packed) -> Sequence[Any]:
    return shardio.open(packed(COUNTS), decode=None)


def test_it_is_a_sequence(raw: Any) -> None:
    assert len(raw) == N
    assert isinstance(raw, Sequence)
    assert [raw[i] for i in range(N)] == [expected(i) for i in range(N)]
    assert list(raw) == [expected(i) for i in range(N)]
    assert raw[-1] == expected(N - 1) and raw[-N] == expected(0)
    assert list(reversed(raw)) == [expected(i) for i in reversed(range(N))]
    assert expected(3) in raw and raw.index(expected(7)) == 7


@pytest.mark.parametrize("index", [N, N + 5, -N - 1, 10**30])
def test_beyond_the_end_is_an_index_error(raw: Any, index: int) -> None:
    with pytest.raises(IndexError, match="of 20"):
        raw[index]


def test_numpy_integers_are_indexes_and_floats_are_not(raw: Any) -> None:
    assert raw[np.int64(5)] == raw[np.uint8(5)] == expected(5)
    with pytest.raises(TypeError):
        raw[1.0]


@pytest.mark.parametrize(
    "rows",
    [
        slice(None),
        slice(3, 12),
        slice(0, 0),
        slice(12, 3),
        slice(None, None, 3),
        slice(None, None, -1),
        slice(15, 2, -4),
        slice(-5, None),
        slice(5, 10**9),
    ],
)
def test_a_slice_is_a_sequence_of_the_same_kind(raw: Any, rows: slice) -> None:
    numbers = list(range(N))[rows]
    part = raw[rows]
    assert type(part) is type(raw) and len(part) == len(numbers)
    assert list(part) == [part[i] for i in range(len(part))] == [expected(i) for i in numbers]
    assert part.keys() == [expected(i)["__key__"] for i in numbers]
    assert part.columns("label").tolist() == [i % 3 for i in numbers]
    assert list(part[1::2]) == [expected(i) for i in numbers[1::2]]
    for i in range(N):
        key = expected(i)["__key__"]
        if i in numbers:
            assert part.find(key) == numbers.index(i)
        else:
            with pytest.raises(KeyError):
                part.find(key)


def test_an_empty_dataset(packed: Packed) -> None:
    for counts in ([], [0, 0]):
        empty = shardio.open(packed(counts, f"empty{len(counts)}"))
        assert len(empty) == 0 and list(empty) == [] and empty.keys() == []
        assert empty.columns("label").tolist() == []
        with pytest.raises(IndexError):
            empty[0]
        with pytest.raises(KeyError):
            empty.find(b"x")


def test_keys_are_found(raw: Any) -> None:
    assert raw.keys() == [f"k/{i:06d}.jpg" for i in range(N)]
    assert raw.find(b"k/000013.jpg") == raw.find("k/000013.jpg") == 13
    with pytest.raises(KeyError, match="no record has the key k/nowhere"):
        raw.find("k/nowhere")


def test_in_looks_for_a_key_and_reads_no_images(raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    key = raw.keys()[5]
    monkeypatch.setattr(type(raw), "__iter__", None)
    monkeypatch.setattr(type(raw), "__getitem__", None)
    assert key in raw and key.encode() in raw
    assert b"no/such.jpg" not in raw


def test_keys_whose_hashes_collide_are_told_apart(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = shardio.open(packed(COUNTS), decode=None)
    from shardio.dataset import sequence

    raw.find(b"k/000013.jpg")
    raw._hashes = np.zeros(N, np.uint32)
    monkeypatch.setattr(sequence, "key_hash", lambda key: 0)
    assert raw.find(b"k/000013.jpg") == 13
    with pytest.raises(KeyError):
        raw.find(b"k/nowhere")


def test_classes(raw: Any) -> None:
    assert raw.classes == list(CLASSES)
    assert raw.class_to_idx == {"cat": 0, "dog": 1, "eel": 2}
    assert raw.manifest.records == N
    assert "20 records" in repr(raw)


def test_a_dataset_without_classes(packed: Packed) -> None:
    raw = shardio.open(packed(COUNTS, classes=None), decode=None)
    assert raw.classes is None and raw.class_to_idx is None


def test_columns_of_every_width(packed: Packed) -> None:
    values = [1, -5, 2**40, 2**63 + 1, 7, None, 3, -(2**63)]
    folder = packed(
        [2, 2, 2, 2],
        fields=(("__key__", "key"), ("n", "int"), ("x", "float"), ("text", "str")),
        sample=lambda i: {"__key__": b"%d" % i, "n": values[i], "x": i / 3, "text": "t"},
    )
    raw = shardio.open(folder)
    column = raw.columns("n")
    assert column.tolist() == values
    assert column.mask.tolist() == [value is None for value in values]
    assert raw.columns("x").tolist() == [i / 3 for i in range(8)]
    assert raw[:2].columns("n").tolist() == values[:2]
    with pytest.raises(OptionError, match=r"'N'; there are n, x: did you mean 'n'\?"):
        raw.columns("N")
    with pytest.raises(OptionError, match="no column is called 'text'; there are n, x"):
        raw.columns("text")
    with pytest.raises(OptionError, match=r"expected the name of one field, got \['n'\]"):
        raw.columns(["n"])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind, value", [("bool", True), ("float", 0.5), ("int", 3)])
def test_a_shard_of_none_does_not_change_the_dtype_of_a_column(
    packed: Packed, kind: str, value: Any
) -> None:
    def column(name: str, counts: list[int], values: list[Any]) -> Any:
        folder = packed(
            counts,
            name,
            fields=(("__key__", "key"), ("x", kind)),
            sample=lambda i: {"__key__": b"%d" % i, "x": values[i]},
        )
        return shardio.open(folder).columns("x")

    whole = column("whole", [2], [value, value])
    partly = column("partly", [2, 2], [value, value, None, None])
    assert partly.dtype == whole.dtype
    assert partly.tolist() == [value, value, None, None]
    nothing, empty = column("nothing", [2], [None, None]), column("empty", [0], [])
    assert nothing.tolist() == [None, None] and empty.tolist() == []
    assert kind == "int" or nothing.dtype == empty.dtype == whole.dtype


def test_a_shard_whose_integers_fit_no_column(packed: Packed) -> None:
    values = [-1, 2**63, None, 5]
    folder = packed(
        [3, 1],
        fields=(("__key__", "key"), ("n", "int")),
        sample=lambda i: {"__key__": b"%d" % i, "n": values[i]},
    )
    assert shardio.open(folder).columns("n").tolist() == values


def test_images_are_decoded_unless_told_otherwise(packed: Packed) -> None:
    folder = packed([3, 2], image=jpeg)
    pictures = shardio.open(folder)
    for i, item in enumerate(pictures):
        assert isinstance(item["image"], Image.Image) and item["image"].mode == "RGB"
        assert np.array_equal(item["image"], decode_image(jpeg(i)))
        assert np.array_equal(item["image"], pictures[i]["image"])
    assert shardio.open(folder, decode=None)[3]["image"] == jpeg(3)
    assert shardio.open(folder, decode=len)[3]["image"] == len(jpeg(3))


def test_fields_choose_and_order(packed: Packed) -> None:
    folder = packed([3, 2], image=jpeg)
    assert shardio.open(folder, fields=("label",))[4] == (1,)
    assert shardio.open(folder, fields=("label", "__key__"), decode=None)[4] == (1, "k/000004.jpg")
    label, image = shardio.open(folder, fields=["label", "image"])[4]
    assert label == 1 and isinstance(image, Image.Image)
    with pytest.raises(OptionError, match=r"'mask'; there are __key__, image, label$"):
        shardio.open(folder, fields=("image", "mask"))
    with pytest.raises(OptionError, match=r"\('label',\)"):
        shardio.open(folder, fields="label")
    with pytest.raises(OptionError, match="decode"):
        shardio.open(folder, decode="jpeg")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="transform is given"):
        shardio.open(folder, fields=("label",), transform=len)


def test_transforms(packed: Packed) -> None:
    folder = packed([3, 2], image=jpeg)
    sized = shardio.open(folder, transform=lambda image: image.size)
    assert sized[0]["image"] == (24, 16)
    crops = shardio.open(folder, transform=CenterCrop(8))
    assert np.array_equal(crops[2]["image"], CenterCrop(8)(jpeg(2)))
    random = shardio.open(folder, transform=shardio.RandomResizedCrop(8, flip=True))
    assert np.array_equal(random[2]["image"], random[2]["image"])
    assert np.array_equal([x["image"] for x in random], [random[i]["image"] for i in range(5)])


class Taking(CenterCrop):
    taken: ClassVar[list[Any]] = []

    def __call__(self, image: Any, draw: int = 0, out: Any = None) -> Any:
        self.taken.append(image)
        return super().__call__(image, draw, out)


def test_a_built_in_transform_takes_the_undecoded_bytes(packed: Packed) -> None:
    folder = packed([2], image=jpeg)
    Taking.taken.clear()
    assert len(list(shardio.open(folder, transform=Taking(8)))) == 2
    assert Taking.taken == [jpeg(0), jpeg(1)]
    own = shardio.open(folder, transform=Taking(8), decode=lambda data: decode_image(data))
    assert len(list(own)) == 2
    assert all(isinstance(taken, Image.Image) for taken in Taking.taken[2:])


def test_null_images_stay_none(packed: Packed) -> None:
    folder = packed(
        [2], sample=lambda i: {"__key__": b"%d" % i, "image": None if i else jpeg(0), "label": None}
    )
    items = list(shardio.open(folder, transform=CenterCrop(8)))
    assert items[1]["image"] is None and items[0]["image"].shape == (8, 8, 3)
    assert items[0]["label"] is None


def test_an_image_that_cannot_be_decoded_is_named(packed: Packed) -> None:
    broken = shardio.open(packed([2, 3]))
    with pytest.raises(DecodeError, match=r"record 4 of the dataset, k/000004\.jpg: image of"):
        broken[4]


def test_damage_is_named(packed: Packed) -> None:
    folder = packed([2, 3])
    path = shard_files(folder)[1]
    flip(path, path.read_bytes().index(payload(3)) + 1)
    raw = shardio.open(folder, decode=None)
    assert raw[4] == expected(4)
    for get in (lambda: raw[3], lambda: list(raw)):
        with pytest.raises(DamageError, match=rf"{path.name}: record 1 at byte .*k/000003.jpg"):
            get()


def test_items_are_the_callers_own(raw: Any) -> None:
    item = raw[2]
    item["image"] = None
    item["new"] = 1
    assert raw[2] == expected(2)


def test_nothing_packed_and_splits_are_told(packed: Packed, tmp_path: Path) -> None:
    with pytest.raises(NotPackedError, match="no such directory"):
        shardio.open(tmp_path / "nothing")
    packed([2], "out/train")
    splits = manifest.dump_splits(["train", "val"], None, "1.2.3")
    (tmp_path / "out" / "shardio.json").write_bytes(splits)
    with pytest.raises(NotPackedError, match=r"splits: train, val\. Open one, such as .*out/train"):
        shardio.open(tmp_path / "out")
    assert len(shardio.open(tmp_path / "out", split="train")) == 2
    with pytest.raises(OptionError, match="no split is called 'test'; there are train, val"):
        shardio.open(tmp_path / "out", split="test")


def test_a_pickle_reads_on(raw: Any) -> None:
    raw[3], raw.find(b"k/000003.jpg")
    data = pickle.dumps(raw[5:])
    assert len(data) < 5000
    assert pickle.loads(pickle.dumps(raw))._hashes is None
    assert list(pickle.loads(data)) == [expected(i) for i in range(5, N)]


def _read(part: Any, numbers: list[int]) -> None:
    assert [part[i] for i in numbers] == [expected(i) for i in numbers]


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_after_the_parent_did(raw: Any, method: str) -> None:
    raw[0]
    context = multiprocessing.get_context(method)
    count = 2 if method == "fork" else 1  # others take seconds to start
    workers = [context.Process(target=_read, args=(raw, [i, N - 1 - i])) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * count


def test_threads_share_it(raw: Any) -> None:
    raw.reader.limit = 2
    failures: list[BaseException] = []

    def work(step: int) -> None:
        try:
            for i in range(400):
                assert raw[i * step % N] == expected(i * step % N)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(step,)) for step in (1, 3, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_it_is_a_map_style_dataset_for_torch(raw: Any) -> None:
    from torch.utils.data import DataLoader, SequentialSampler, WeightedRandomSampler

    loader = DataLoader(raw, batch_size=4, num_workers=2, collate_fn=list)
    assert [item for batch in loader for item in batch] == [expected(i) for i in range(N)]
    weights = [0.0] * N
    weights[6] = 1.0
    for sampler in (WeightedRandomSampler(weights, 8), SequentialSampler(raw)):
        got = list(DataLoader(raw, batch_size=None, sampler=sampler))
        assert len(got) in (8, N) and got[6] == expected(6)


def test_importing_and_opening_need_neither_torch_nor_pil(packed: Packed) -> None:
    folder = packed(COUNTS)
    code = (
        "import sys, shardio\n"
        f"raw = shardio.open({os.fspath(folder)!r}, decode=None)\n"
        "assert len(list(raw)) == 20 and raw.find('k/000003.jpg') == 3\n"
        "assert not {'torch', 'PIL', 'lmdb'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_windows_is_told_what_to_do() -> None:
    code = "import sys; sys.platform = 'win32'; import shardio"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: shardio runs on Linux and macOS; on Windows it runs within WSL" in (
        done.stderr
    )


def test_help_lists_what_users_call_and_what_each_does() -> None:
    listed = re.findall(r"^    (\w+) +(.+)\.$", shardio.__doc__ or "", re.MULTILINE)
    assert sorted(dict(listed)) == sorted([*shardio.__all__, "open"])
    shown = pydoc.plain(pydoc.render_doc(shardio))
    assert "Error(" not in shown and "_HOMES" not in shown
    no_verbs = {"A", "An", "The", "What", "Where"}
    raised = [name for name in dir(shardio) if name.endswith(("Error", "Warning"))]
    for name in [*dict(listed), *raised]:
        found = getattr(shardio, name)
        summary, *rest = (inspect.getdoc(found) or "").splitlines()
        verb = summary.split()[0]
        assert summary.endswith(".") and not any(rest[:1]), name
        assert verb.istitle() and verb not in no_verbs and not verb.endswith("s"), name


def test_every_public_name_is_there_and_no_module_hides_one() -> None:
    code = (
        "import importlib, pkgutil, shardio\n"
        "for module in pkgutil.iter_modules(shardio.__path__):\n"
        "    assert module.name not in {*shardio.__all__, *shardio._HOMES}, module.name\n"
        "    if module.name[0] != '_': importlib.import_module('shardio.' + module.name)\n"
        "names = shardio.__all__\n"
        "errors = [n for n in vars(shardio.errors) if n.endswith('Error')]\n"
        "public = {*names, *errors, 'PerformanceWarning', 'open'}\n"
        "public |= {'__version__'}\n"
        "assert names == sorted(names) and dir(shardio) == sorted(public)\n"
        "assert all(callable(getattr(shardio, name)) for name in [*names, *errors, 'open'])\n"
        "from shardio import *\n"
        "assert pack is shardio.pack and open is __builtins__.open\n"
        "try: shardio.nothing\n"
        "except AttributeError: pass\n"
        "else: raise AssertionError\n"
    )
    line = warm_python.command("-W", "error", "-c", code)
    done = subprocess.run(line, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


ODD = (b"caf\xc3\xa9/\xff\xfe.jpg", "猫/é.jpg".encode(), b"plain", b"\x80")


@pytest.mark.parametrize("core", [True, False])
@pytest.mark.parametrize("size", [60, 40_000])  # read in blocks, and each by itself
@pytest.mark.parametrize("format", ["record", "lmdb"])
def test_keys_are_str_wherever_users_meet_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, size: int, core: bool
) -> None:
    if not core:
        monkeypatch.setattr(native, "core", None)
    folder = tmp_path / "a"
    texts = [key.decode("utf-8", "surrogateescape") for key in ODD]
    with shardio.Writer(folder, id="x", format=format) as writer:
        for number, key in enumerate(ODD):  # the same key as bytes and as str
            given = key if number % 2 else texts[number]
            writer.write({"__key__": given, "data": bytes([number]) * size, "label": number})
    data = shardio.open(folder, decode=None)
    assert [one["__key__"] for one in data] == texts
    assert [data[i]["__key__"] for i in range(len(ODD))] == texts
    assert data.keys() == texts and data[1:3].keys() == texts[1:3]
    assert data.stored_keys() == list(ODD)
    assert data.columns("__key__").tolist() == texts
    assert data[::-2].columns("__key__").tolist() == texts[::-2]
    assert [data.find(key) for key in ODD] == [data.find(key) for key in texts] == [0, 1, 2, 3]
    assert texts[0] in data and ODD[0] in data and "caf\udcc3" not in data
    with pytest.raises(KeyError):
        data.find("\ud800")
    pairs = [(key, number) for number, key in enumerate(texts)]
    assert list(shardio.open(folder, fields=("__key__", "label"), decode=None)) == pairs
    for options in ({}, {"batch_size": 2}, {"fields": ("__key__",)}):
        stream = shardio.ShardDataset(folder, decode=None, shuffle=False, **options)
        found = [one["__key__"] if isinstance(one, dict) else one[0] for one in stream]
        flat = [key for keys in found for key in keys] if "batch_size" in options else found
        assert flat == texts
    for wanted in (texts[0], ODD[0], [texts[0], ODD[2]], lambda keys: keys == texts[0]):
        chosen = shardio.ShardDataset(folder, decode=None, where={"__key__": wanted})
        several = isinstance(wanted, list)
        assert sorted(one["label"] for one in chosen) == ([0, 2] if several else [0])
    assert [one["__key__"] for one in sequence.stored(folder)] == list(ODD)
    assert shardio.pack(
        folder, tmp_path / "b", jobs=1, read=shardio.SourceOptions(where={"__key__": texts[3]})
    )[0].records
    assert shardio.open(tmp_path / "b", decode=None).keys() == [texts[3]]


def test_keys_of_damaged_and_rejected_records_are_str(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    os.makedirs(os.fsencode(folder) + b"/a")
    for name, content in ((b"\xff.jpg", b"no image"), (b"\xc3\xa9.jpg", jpeg(0))):
        with open(os.path.join(os.fsencode(folder), b"a", name), "wb") as file:
            file.write(content)
    [done] = shardio.pack(folder, tmp_path / "out", jobs=1, on_error="skip")
    assert [key for key, _ in done.rejected] == ["a/\udcff.jpg"]
    [again] = shardio.pack(folder, tmp_path / "out", jobs=1, on_error="skip")
    assert again.rejected == done.rejected
    [shard] = (tmp_path / "out").glob("*.shard")
    data = bytearray(shard.read_bytes())
    data[data.index(jpeg(0)) + 30] ^= 1
    shard.write_bytes(data)
    assert [one.key for one in shardio.verify(tmp_path / "out", jobs=1).damages] == ["a/é.jpg"]


def test_sizes_follow_the_records_of_a_slice(tmp_path: Path) -> None:
    with shardio.Writer(tmp_path / "out", max_records=3) as writer:
        for i in range(8):
            writer.write({"__key__": f"{i}", "data": b"x" * i})
    data = shardio.open(tmp_path / "out", decode=None)
    sizes = data.sizes().tolist()
    assert len(set(sizes)) == 8
    for part in (slice(None, None, -1), slice(2, 7, 2), slice(7, 2, -3), slice(3, 3)):
        assert data[part].sizes().tolist() == sizes[part]


# --- as scripts for ImageFolder use it ------------------------------------------------------------


def test_targets_are_the_labels_of_all_and_no_image_is_read(
    packed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shardio.open(packed([5, 0, 4]), decode=None)
    expected = [sample["label"] for sample in data]
    monkeypatch.setattr(RecordShard, "read", None)  # from here on a record cannot be read
    assert data.targets.dtype == np.int64 and data.targets.tolist() == expected
    assert data.targets is data.targets  # scripts ask for one label after the other
    assert data[2:7].targets.tolist() == expected[2:7]
    assert pickle.loads(pickle.dumps(data)).targets.tolist() == expected
    weights = 1 / np.bincount(data.targets)[data.targets]
    sampler = WeightedRandomSampler(weights.tolist(), 20)
    assert len(list(sampler)) == 20
    assert Subset(data, [1, 3]).dataset.targets[3] == expected[3]


def test_a_record_without_a_label_has_target_minus_1_and_no_field_no_targets(
    tmp_path: Path,
) -> None:
    with shardio.Writer(tmp_path / "some", fields={"label": "int"}) as writer:
        for number, label in enumerate((3, None, 1)):
            writer.write({"__key__": str(number), "label": label})
    assert shardio.open(tmp_path / "some").targets.tolist() == [3, -1, 1]
    with shardio.Writer(tmp_path / "none", fields={"text": "str"}) as writer:
        writer.write({"__key__": "a", "text": "b"})
    data = shardio.open(tmp_path / "none")
    assert not hasattr(data, "targets") and getattr(data, "samples", None) is None
    with pytest.raises(AttributeError, match="'targets': the dataset has no field `label`"):
        data.targets  # noqa: B018


@pytest.mark.parametrize("name", ["samples", "imgs"])
def test_attributes_of_image_folders_say_what_to_write(
    packed: Callable[..., Path], name: str
) -> None:
    with pytest.raises(AttributeError, match=rf"'{name}': write data.keys\(\)"):
        getattr(shardio.open(packed([2])), name)
    with pytest.raises(AttributeError, match=r"has no attribute 'bread'$"):
        shardio.open(packed([2])).bread  # noqa: B018
