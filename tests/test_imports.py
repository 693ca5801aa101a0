"""The import law: modules import downwards only, and each dependency has one door."""

import ast
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A module imports only from lines above its own, wherever in the file the import stands.
# A new module is a name on a line below all that it imports.
LAYERS = """
errors imagetypes machine stack names
engine
throttle
sizes sample storage.base
device meter
storage.local formats.base fieldnames
storage storage.staging storage.memory receipt
formats.columns formats.protobuf lock
formats.record formats.foreign
formats.lmdb formats.tar formats.mds formats.tfrecord formats.recordio formats.imagefolder
formats.lmdb_foreign formats.parquet
formats
manifest
order shard
parallel jpeg options selection
image
sources.base
sources.imagefolder sources.tables plan
sources.grouped sources.coco
sources.listing sources.trees
journal decoding fetch scanning
indexing sequence explaining
sources.dataset
sources
destination recoding
building collating tuning pixels
packing
epoch_state slots whereabouts
stream
mixing parcel
resident making
serving
workers
here
loader
writer cleaning dataset unpacking verifying
targets.base
targets.webdataset targets.tfrecord targets.recordio targets.mds targets.imagefolder
targets.caffe
targets
exporting
measuring
benching
contest specimens
demo
plotting
poster
cli
__main__
"""
LEVEL = {name: level for level, line in enumerate(LAYERS.split("\n")) for name in line.split()}

# The two sides of the house do not know each other; `unpacking`, `cli`, and `sources.dataset`,
# which reads what is packed anew, stand between them.
PACKING = {
    *("shard", "sources.base", "sources.imagefolder", "sources", "plan", "journal", "recoding"),
    *("building", "destination", "packing", "writer", "cleaning"),
    *("sources.tables", "sources.listing", "sources.grouped", "sources.coco", "sources.trees"),
}
READING = {
    *("fetch", "decoding", "sequence", "collating", "meter", "device", "pixels"),
    *("explaining", "tuning", "plotting", "epoch_state", "stream", "mixing", "dataset"),
    *("measuring", "benching", "slots", "parcel", "making", "serving", "workers", "here"),
    *("resident", "loader", "whereabouts", "contest", "poster"),
}

DOORS = {  # what only these modules import
    "msgpack": {"sample"},
    "xxhash": {"formats.columns", "formats.record", "writer"},
    "tqdm": {"cli"},
    "PIL": {"image", "contest", "specimens"},
    "torch": {
        *("stream", "epoch_state", "collating", "device", "measuring"),
        *("parcel", "making", "serving", "workers", "resident", "loader", "whereabouts", "contest"),
    },
    "lmdb": {"targets.caffe"},
    "matplotlib": {"plotting", "poster"},
    "google_crc32c": {"formats.tfrecord"},
    "zstandard": {"formats.mds"},
    "pyarrow": {"formats.parquet"},
}
EVERYWHERE = {"numpy"}


def modules() -> dict[str, ast.Module]:
    """All modules but shardio/__init__.py, whose imports are lazy; packages by their own name."""
    found = {}
    for path in sorted((ROOT / "shardio").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "shardio").with_suffix("").parts)
        if name != "__init__":
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def imports(name: str, tree: ast.Module) -> Iterator[str]:
    """What a module imports: "shardio.errors", "torch.utils.data", ..."""
    package = ["shardio", *name.split(".")]
    if not (ROOT.joinpath(*package) / "__init__.py").exists():
        package.pop()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner.removeprefix("shardio.") in LEVEL else base


def test_every_module_has_its_place_in_the_law() -> None:
    assert set(modules()) - set(LEVEL) == set()


def test_modules_import_downwards_only() -> None:
    for name, tree in modules().items():
        for imported in imports(name, tree):
            inner = imported.removeprefix("shardio.")
            if inner == imported:
                continue  # not ours, or the root: `from . import __version__`
            assert LEVEL[inner] < LEVEL[name], f"{name} imports {inner}"
            assert not (name in PACKING and inner in READING), f"{name} imports {inner}"
            assert not (name in READING and inner in PACKING), f"{name} imports {inner}"


def test_every_dependency_has_its_doors() -> None:
    for name, tree in modules().items():
        for imported in imports(name, tree):
            package = imported.partition(".")[0]
            if package not in sys.stdlib_module_names | EVERYWHERE | {"shardio"}:
                assert name in DOORS.get(package, set()), f"{name} imports {package}"


def test_the_design_draws_the_same_law() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    block = text.partition("Imports go one way only:\n\n")[2].partition("\n\n")[0]
    for chain in re.sub(r"\n\s*<", " <", block).split("\n"):
        groups = [group.replace("/", ".").split(",") for group in chain.split("<")]
        levels = [[LEVEL[name] for given in g for name in named(given.strip())] for g in groups]
        for lower, upper in pairwise(levels):
            assert max(lower) < min(upper), chain


def test_the_design_draws_every_module() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    block = text.partition("Imports go one way only:\n\n")[2].partition("\n\n")[0]
    given = re.split(r"[<,\s]+", block.replace("/", "."))
    drawn = {module for name in given for module in named(name)}
    assert set(LEVEL) - drawn == {"__main__"}


def named(given: str) -> list[str]:
    """The modules that a name of the chain stands for; "storage.*" is all but its base."""
    if not given.endswith(".*"):
        return [given]
    package = given.removesuffix(".*")
    return [n for n in LEVEL if f"{n}.".startswith(f"{package}.") and n != f"{package}.base"]
