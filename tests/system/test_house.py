"""The size of the house, and how far the tests look behind its doors.

Run as a program it counts in any tree: `python tests/system/test_house.py TREE` prints each use of
a private name and the sums; at f54390a, with which the rooms began, it says 355.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

MOST_CODE_LINES = 51_890
MOST_LINES_OF_A_FUNCTION = 100
MOST_COMPLEX = 25
MOST_LINES_OF_A_CLASS = 300
LONG_CLASSES = {"RecordShard"}  # each of its lines answers a fault that somebody saw

MOST_PRIVATE_USES = 92

Function = ast.FunctionDef | ast.AsyncFunctionDef


# --------------------------------------------------------------------------------------- the size


def code_lines(source: str, tree: ast.Module) -> int:
    """Count the lines that hold code: no blank lines, no comments, no docstrings."""
    docstrings: set[int] = set()
    texts: set[int] = set()  # whose lines count, whatever they look like
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno != node.end_lineno:
            texts.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    written = enumerate(map(str.lstrip, source.splitlines()), 1)
    lines = {number for number, line in written if line and not line.startswith("#")}
    return len((lines | texts) - docstrings)


def complexity(function: Function) -> int:
    """Return the cyclomatic complexity: one, and one more for each place where the road forks."""
    found = 1
    for node in ast.walk(function):
        if isinstance(node, ast.comprehension):
            found += 1 + len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
        else:
            forks = ast.If | ast.For | ast.AsyncFor | ast.While | ast.IfExp | ast.ExceptHandler
            found += isinstance(node, forks | ast.Assert | ast.match_case)
    return found


def length(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


@cache
def sources(root: Path, folder: str) -> dict[str, str]:
    """Return the source of each module in a folder, by its path."""
    paths = {path: path.relative_to(root) for path in sorted((root / folder).rglob("*.py"))}
    return {
        name.as_posix(): path.read_text()
        for path, name in paths.items()
        if not any(part.startswith(".") for part in name.parts)  # an environment
    }


@cache
def modules(root: Path, folder: str) -> dict[str, tuple[str, ast.Module]]:
    """Return the source and the tree of each module in a folder, by its path."""
    return {path: (text, ast.parse(text)) for path, text in sources(root, folder).items()}


def all_code_lines() -> int:
    return sum(code_lines(*module) for module in modules(ROOT, "shardio").values())


def test_the_package_is_not_larger_than_it_was() -> None:
    assert all_code_lines() <= MOST_CODE_LINES


def test_no_function_is_long_or_complex() -> None:
    found = [
        f"{path}:{node.lineno}: {node.name}: {length(node)} lines, complexity {complexity(node)}"
        for path, (_, tree) in modules(ROOT, "shardio").items()
        for node in ast.walk(tree)
        if isinstance(node, Function)
        if length(node) > MOST_LINES_OF_A_FUNCTION or complexity(node) > MOST_COMPLEX
    ]
    assert not found, "\n".join(found)


def test_no_class_is_long() -> None:
    found = [
        f"{path}:{node.lineno}: {node.name}: {length(node)} lines"
        for path, (_, tree) in modules(ROOT, "shardio").items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name not in LONG_CLASSES
        if length(node) > MOST_LINES_OF_A_CLASS
    ]
    assert not found, "\n".join(found)


# Words that had several meanings, or none that the field knows; docs/design.md has those in use.
OLD_WORDS = {
    *("engine", "parcel", "crew", "serving", "maker", "made", "apart", "canonical"),
    *("contestant", "forum", "ballast"),
}
OLD_NAMES = {
    *("Given", "Described", "Share", "Slices", "Items", "Wanted", "Keeping", "Slots", "Ahead")
}


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield what a module names itself: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def old_words(path: str, tree: ast.Module) -> list[str]:
    named = [(1, Path(path).stem), *names(tree)]
    return [
        f"{path}:{line}: {name}"
        for line, name in named
        if name in OLD_NAMES or OLD_WORDS & set(re.findall("[a-z]+", name.lower()))
    ]


def test_no_name_has_an_old_word() -> None:
    every = modules(ROOT, "shardio").items()
    found = [one for path, (_, tree) in every for one in old_words(path, tree)]
    assert not found, "\n".join(found)
    bad = "def made_of(a, Share): engine = 1; self.x_made = 2\nimport a as parcel"
    assert len(old_words("serving.py", ast.parse(bad))) == 6
    assert not old_words("a.py", ast.parse("handmade = 1  # engine"))


def test_code_lines_and_complexity_are_counted_as_said() -> None:
    source = '''"""A docstring
    of two lines."""

    # A comment.
def f(a, b):  # code, with a comment
    """One line."""

    if a and b:
        return [
            x for x in a if x
        ]
'''
    tree = ast.parse(source)
    assert code_lines(source, tree) == 5
    function = tree.body[1]
    assert isinstance(function, Function)
    assert complexity(function) == 1 + 1 + 1 + 2  # the if, its `and`, the comprehension and its if


# ------------------------------------------------------------------------------ where tests stand


def test_a_room_s_docstring_lists_its_files() -> None:
    listed = 0
    for room in sorted((ROOT / "shardio").glob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(room.read_text()), clean=False) or ""
        names = re.findall(r"^    (\w+)/? {2,}\S", text, re.M)
        if names:
            listed += 1
            files = [*room.parent.glob("*.py"), *room.parent.glob("*/__init__.py")]
            there = {one.parent.name if one.stem == "__init__" else one.stem for one in files}
            assert sorted(names) == sorted(there - {room.parent.name}), room
    assert listed >= 5


def test_the_tests_mirror_the_rooms() -> None:
    rooms = {path.name for path in (ROOT / "shardio").iterdir() if path.is_dir()}
    others = {"system", "support", "golden", "fuzz", "frameworks", "format_tools", "without_core"}
    others.add("trust")
    for path in sources(ROOT, "tests"):
        if path != "tests/conftest.py":
            assert path.split("/")[1] in rooms | others, path


def files_of_modules() -> dict[str, str]:
    """Return what tests/README.md says: for a module without a test file of its name, which."""
    text = (ROOT / "tests/README.md").read_text().split("## Modules", 1)[1]
    found = {}
    for modules_cell, file_cell in re.findall(r"^\| (`.+`) \| (`.+`) \|$", text, re.M):
        for module in re.findall(r"`(.+?)`", modules_cell):
            assert module not in found, module
            found[module] = file_cell.split("`")[1]
    return found


def test_the_test_of_a_line_is_found_by_its_name() -> None:
    """shardio/ROOM/.../x.py is tested in tests/ROOM/test_x.py, or where tests/README.md says."""
    elsewhere = files_of_modules()
    missing = []
    for path in sources(ROOT, "shardio"):
        module = path.removeprefix("shardio/").removesuffix(".py")
        room, _, stem = module.rpartition("/")
        if stem.startswith("__") or stem == "_version":
            continue
        own = (ROOT / "tests" / (room.split("/")[0] or "system") / f"test_{stem}.py").exists()
        if module in elsewhere:
            assert not own, f"{module} has a file of its own"
            assert (ROOT / "tests" / elsewhere.pop(module)).exists(), module
        elif not own:
            missing.append(module)
    assert not missing, "tests/README.md must say where these are tested: " + ", ".join(missing)
    assert not elsewhere, f"tests/README.md lists modules that are not there: {list(elsewhere)}"


OWN_LIMIT = re.compile(
    r"\btimeout=\d\d+\b|\.(?:wait|join|result)\(\d\d+\)|programs\.run\(.*limit_s=\d"
)


def test_the_test_files_that_begin_first_are_there() -> None:
    """Else one that was renamed comes last, and all wait for it."""
    listed = (ROOT / "tests" / "longest.txt").read_text().split()
    assert [name for name in listed if not (ROOT / name).is_file()] == []
    assert len({*listed}) == len(listed)


def test_all_that_may_hang_in_tests_has_one_limit() -> None:
    """It is `support.LIMIT_S`. Limits of their own were too short when the machine was busy."""
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in sources(ROOT, "tests").items()
        for number, line in enumerate(text.splitlines(), 1)
        if OWN_LIMIT.search(line)
    ]
    assert not found, "\n".join(found)
    seen = "process.wait({0}) run(line, timeout={0}) result(LIMIT_S) timeout=LIMIT_S"
    assert len(OWN_LIMIT.findall(seen.format(60))) == 2


# A source without one imports no test, and need not be parsed.
IMPORT_OF_TEST = re.compile(r"^ *(?:from\b.+\bimport \([^)]*|(?:from|import)\b.*)\btest_", re.M)


def test_no_test_imports_a_test() -> None:
    for path, text in sources(ROOT, "tests").items():
        for node in ast.walk(ast.parse(text)) if IMPORT_OF_TEST.search(text) else ():
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
            for name in names:
                tests = [part for part in name.split(".") if part.startswith("test_")]
                assert not tests, f"{path}:{node.lineno} imports {name}"
    for line in ("from a.test_b import c", "    import a, test_c", "from a import (\n  test_d"):
        assert IMPORT_OF_TEST.search(line)


# ---------------------------------------------------------------------------------- private names

# Not shardio's: the public methods of named tuples, and what torch's DataLoader has no door for.
OF_NAMED_TUPLES = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}
OF_TORCH = {"_iterator", "_shutdown_workers", "_workers"}


def is_private(name: str) -> bool:
    if name in OF_NAMED_TUPLES | OF_TORCH:
        return False
    return name.startswith("_") and not name.startswith("__") and name != "_"


def names_of_others(tree: ast.Module) -> set[str]:
    """Return the names that a module imports from elsewhere than from shardio and the tests."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] not in ("shardio", "support"):
                    found.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (node.module or "").partition(".")[0] not in ("shardio", "support"):
                    found.add(alias.asname or alias.name)
    return found


def first_name(node: ast.expr) -> str | None:
    """Return the name that an expression such as `a.b(c).d[e]` begins with: "a"."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each use of a private name of shardio's.

    Attributes, but for those of a class of the test's own; imports; names given to `getattr`,
    `setattr` and their like, those of monkeypatch too. What other packages call private is theirs.
    """
    others = names_of_others(tree)

    def walk(node: ast.AST, in_class: bool) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            own = in_class and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and first_name(node.value) not in others:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardio"):
            for alias in node.names:
                if is_private(alias.name):
                    yield node.lineno, f"from {node.module} import {alias.name}"
        elif isinstance(node, ast.Call):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else first_name(function)
            if called in ("delattr", "getattr", "hasattr", "setattr"):
                for argument in node.args[:2]:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        before, _, name = argument.value.rpartition(".")
                        if is_private(name) and (not before or before.startswith("shardio")):
                            yield node.lineno, ast.unparse(node)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, in_class or isinstance(node, ast.ClassDef))

    yield from walk(tree, False)


# A source without any of these has no such use, and need not be parsed.
MAYBE_PRIVATE = re.compile(r"\._[a-z]|\"(?:[\w.]*\.)?_[a-z]|\bimport .*\b_|^ +_\w+,$", re.M | re.I)


def all_private_uses(root: Path) -> list[str]:
    return [
        f"{path}:{line}: {text}"
        for path, source in sources(root, "tests").items()
        if MAYBE_PRIVATE.search(source)
        for line, text in private_uses(ast.parse(source))
    ]


def test_tests_look_behind_few_doors() -> None:
    """A test that uses a private name breaks with a change that no user sees: none is added."""
    found = all_private_uses(ROOT)
    assert len(found) <= MOST_PRIVATE_USES, "\n".join(found)


def test_private_uses_are_counted_as_said() -> None:
    source = """
import os
from shardio.order import shuffle, _rng
from shardio import formats

class Own:
    def __init__(self):
        self._mine = os._exit

def test(monkeypatch, data):
    monkeypatch.setattr(shuffle, "_window", shuffle._window)
    monkeypatch.setattr("shardio.order.shuffle._window", 3)
    data._reader._file.__class__
    data._replace(a=Own()._mine)
"""
    assert [line for line, _ in private_uses(ast.parse(source))] == [3, 11, 11, 12, 13, 13, 14]


if __name__ == "__main__":
    uses = all_private_uses(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    print(*uses, f"{len(uses)} uses of private names", sep="\n")
