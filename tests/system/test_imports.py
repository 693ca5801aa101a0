"""The import law: rooms import downwards only, no circle, and each dependency by its doors."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# A room imports only from rooms that are left of it, wherever in a file the import stands: lazy
# imports and those for type checkers count. Rooms without "<" between them do not know each other.
LAW = """
errors names stack _version < units native machine notebook < storage order < images
images < formats < dataset < packing ; dataset < loader < tuning ; dataset < viewer
packing tuning viewer < cli < __main__
"""

DOORS = {  # what only these modules import
    "msgpack": {"formats.sample"},
    "botocore": {"storage.credentials"},
    "obstore": {"storage.credentials", "storage.stores"},
    "xxhash": {"formats.index", "formats.record", "packing.writer", "storage.cache_layout"},
    "tqdm": {"cli.output"},
    "shtab": {"cli.completion"},
    "PIL": {"images.decode", "images.resize", "images.transforms"},
    "torch": {
        "dataset.assemble",
        "dataset.iteration",
        "dataset.ranks",
        "dataset.stream",
        "dataset.epoch_state",
        "dataset.collate",
        "dataset.encoded",
        "dataset.encoded_crops",
        "dataset.batch_join",
        "loader.device",
        "loader.device_crops",
        "loader.device_decode",
        "loader.device_kernels",
        "loader.device_resize",
        "loader.device_skips",
        "loader.normalize",
        "loader.pinned",
        "loader.transfer",
        "tuning.bench_process",
        "loader.transport",
        "loader.batch_builder",
        "loader.worker_process",
        "loader.worker_pool",
        "loader.resident",
        "loader.shard_loader",
        "dataset.whereabouts",
    },
    "jinja2": {"viewer.render"},
    "lmdb": {"formats.foreign.caffe_writer"},
    "nvidia": {"loader.device_decode"},
    "torchcodec": {"loader.device_decode"},
    "torchvision": {"loader.device_decode"},
    "triton": {"loader.device_kernels"},
    "matplotlib": {"tuning.plot"},
    "google_crc32c": {"formats.foreign.tfrecord"},
    "yaml": {"packing.sources.boxes"},
    "zstandard": {"formats.foreign.inflate"},
    "isal": {"packing.sources.archives.deflate"},
    "pyarrow": {"formats.foreign.arrow_columns"},
    "ray": {"packing.ray_executor"},
}
EVERYWHERE = {"numpy"}

# Packages with more in their __init__.py than a docstring.
TABLES = {"formats", "packing.sources"}
TABLES |= {"native"}  # says whether the core is there; PerformanceWarning is warned of by its name


def below() -> dict[str, set[str]]:
    """The rooms of the law, and for each the rooms that it may import from."""
    found: dict[str, set[str]] = {}
    for chain in LAW.replace(";", "\n").splitlines():
        groups = [group.split() for group in chain.split("<")]
        found |= {room: set() for group in groups for room in group if room not in found}
        for lower, upper in pairwise(groups):
            for room in upper:
                found[room].update(lower)
    for _ in found:
        for rooms in found.values():
            rooms |= set().union(*(found[room] for room in rooms))
    return found


@cache
def modules() -> dict[str, ast.Module]:
    """All modules but shardio/__init__.py, whose imports are lazy; packages by their own name."""
    found = {}
    for path in sorted((ROOT / "shardio").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "shardio").with_suffix("").parts)
        if name != "__init__":
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


BELOW = below()


def imports_in(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports of a module, in functions too; only statements are gone through."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from imports_in(node)


@cache
def imports(name: str) -> list[str]:
    """Return what a module imports: "shardio.errors", "torch.utils.data", ..."""
    return list(_imports(name))


def _imports(name: str) -> Iterator[str]:
    package = ["shardio", *name.split(".")]
    if not (ROOT.joinpath(*package) / "__init__.py").exists():
        package.pop()
    for node in imports_in(modules()[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_module = inner.removeprefix("shardio.") in modules()
                yield inner if is_module else base
                if is_module and base.removeprefix("shardio.") in TABLES - {name}:
                    yield base  # its table runs, too


def ours(name: str) -> set[str]:
    """The modules of shardio that a module imports."""
    found = {one.removeprefix("shardio.") for one in imports(name) if one.startswith("shardio.")}
    assert found <= set(modules()), f"{name} imports {found - set(modules())}"
    return found


def backwards() -> set[tuple[str, str]]:
    """The imports that the law does not allow: (importing, imported) modules."""
    found = set()
    for name in modules():
        room = name.partition(".")[0]
        for inner in ours(name):
            other = inner.partition(".")[0]
            if other != room and other not in BELOW[room]:
                found.add((name, inner))
    return found


def test_every_module_has_its_room() -> None:
    assert {name.partition(".")[0] for name in modules()} == set(BELOW)


def test_rooms_import_downwards_only() -> None:
    assert not backwards()


def test_no_imports_run_in_a_circle_lazy_ones_counted() -> None:
    TopologicalSorter({name: ours(name) for name in modules()}).prepare()  # raises CycleError


def outside() -> dict[str, set[str]]:
    """What the modules of benchmarks, tests and tools import of each other, in functions too."""
    below = ("benchmarks", "tests", "tools")
    paths = {path for folder in below for path in (ROOT / folder).rglob("*.py")}
    # Folders that begin with a dot are environments.
    names = {str(path) for path in paths if "/." not in str(path.relative_to(ROOT))}
    found: dict[str, set[str]] = {}
    for path in map(Path, sorted(names)):
        found[str(path)] = set()
        for node in imports_in(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported = [(0, alias.name) for alias in node.names]
            else:
                base = node.module or ""
                imported = [(node.level, base)]
                imported += [
                    (node.level, f"{base}.{alias.name}".strip(".")) for alias in node.names
                ]
            for level, name in imported:
                roots = [path.parents[level - 1]] if level else [ROOT, ROOT / "tests"]
                roots += [path.parent] if ROOT / "tools" in path.parents else []
                for root in roots:
                    other = f"{root}/{name.replace('.', '/')}.py"
                    if other in names and other != str(path):
                        found[str(path)].add(other)
    return found


def test_outside_the_package_no_imports_run_in_a_circle_either() -> None:
    found = outside()
    assert sum(map(len, found.values())) > 200  # they were resolved
    TopologicalSorter(found).prepare()  # raises CycleError


def test_the_init_of_a_room_is_its_docstring() -> None:
    for name, tree in modules().items():
        if (ROOT.joinpath("shardio", *name.split(".")) / "__init__.py").exists():
            assert ast.get_docstring(tree), name
            assert len(tree.body) == 1 or name in TABLES, name


def test_every_dependency_has_its_doors() -> None:
    for name in modules():
        for imported in imports(name):
            package = imported.partition(".")[0]
            if package not in sys.stdlib_module_names | EVERYWHERE | {"shardio"}:
                assert name in DOORS.get(package, set()), f"{name} imports {package}"


def test_the_design_draws_the_same_law() -> None:
    drawn = (ROOT / "docs" / "design.md").read_text()
    assert "".join(f"    {line}\n" for line in LAW.strip().splitlines()) in drawn


def test_the_design_and_the_package_draw_the_same_rooms() -> None:
    [drawn] = re.findall(r"(?:^    \S.*\n)+", (ROOT / "docs" / "design.md").read_text(), re.M)[:1]
    tree = ast.parse((ROOT / "shardio" / "__init__.py").read_text())
    described = ast.get_docstring(tree, clean=False)
    assert described and drawn in described
    named = set(re.findall(r"^    (\w+)/ ", drawn, re.M))
    assert named == {path.parent.name for path in (ROOT / "shardio").glob("*/__init__.py")}
