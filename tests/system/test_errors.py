"""The errors of shardio: the tree that is documented, pickles, names as they are shown."""

import pickle
import string

import pytest
from torch.utils.data import DataLoader

from shardio import errors
from shardio.errors import ShardioError

ERRORS = [
    error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, ShardioError)
]


def test_the_error_tree_in_the_docstring_is_the_one_that_is() -> None:
    doc = errors.__doc__ or ""
    assert all(f" {error.__name__}" in doc for error in ERRORS)
    assert len(ERRORS) == doc.count("|- ") + doc.count("`- ") + 1


@pytest.mark.parametrize("error", ERRORS)
def test_errors_take_one_string_and_pickle(error: type[ShardioError]) -> None:
    raised = error("here: what\nis wrong")
    again = pickle.loads(pickle.dumps(raised))
    assert type(again) is error
    assert str(again) == str(raised) == "here: what\nis wrong"


class Raising:
    def __len__(self) -> int:
        return len(ERRORS)

    def __getitem__(self, i: int) -> None:
        raise ERRORS[i]("shard 7: record 8")


def test_errors_cross_a_dataloader_worker_with_type_and_text() -> None:
    batches = iter(DataLoader(Raising(), batch_size=None, num_workers=1))
    for error in ERRORS:  # the worker goes on with the next item
        with pytest.raises(error, match="shard 7: record 8") as caught:
            next(batches)
        assert type(caught.value) is error
    batches._shutdown_workers()  # the errors that were caught keep the iterator alive


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"plain/name.jpg", "plain/name.jpg"),
        ("caf\u00e9".encode(), "caf\u00e9"),
        (b"\xff\x1b[31m\n", r"\xff\x1b[31m\n"),
        ("\udcff\u202e", r"\xff\u202e"),
        ("x" * 300, "x" * 197 + "..."),
    ],
)
def test_names_are_shown_without_control_characters(name: bytes | str, shown: str) -> None:
    assert errors.printable(name) == shown
    assert all(c in string.printable or c.isprintable() for c in errors.printable(name))
