"""Nothing that is read can become code: what could make it so is looked for in every module.

A dataset of a stranger is bytes. To unpickle, to evaluate, to import by a name from a file, or to
give a shell what a file says, would run what its writer wants. Each place where the package does
something of the kind stands here, with why no byte of a dataset reaches it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# Modules whose every use has to be argued for, and the names of functions that run what they read.
LOADERS = {
    *("pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"),
    *("importlib", "imp", "runpy", "pkgutil", "code", "codeop", "jsonpickle", "ctypes"),
}
HARMLESS = {  # of these modules
    *("pickle.dumps", "pickle.Pickler", "pickle.PicklingError", "pickle.UnpicklingError"),
    *("pickle.PickleError", "pickle.HIGHEST_PROTOCOL", "pickle.DEFAULT_PROTOCOL"),
    *("importlib.metadata", "importlib.metadata.version", "importlib.resources"),
    *("importlib.metadata.PackageNotFoundError", "importlib.resources.files"),
    *("importlib.util", "importlib.util.find_spec", "pkgutil.get_data"),
}
BUILTINS = {"eval", "exec", "compile", "__import__", "execfile"}
PROGRAMS = {"system", "popen", "fork_exec", "posix_spawn", "posix_spawnp"}  # of os
STARTS = ("exec", "spawn")  # how others of os begin
UNPICKLE = {"read_pickle", "to_pickle", "load_pickle", "unsafe_load", "full_load", "UnsafeLoader"}
PLAIN_YAML = {"yaml.BaseLoader", "yaml.SafeLoader", "yaml.CSafeLoader"}

_OWN_PROCESS = "from a process that this one started, over a pipe that nobody else has"
ALLOWED = {
    ("__init__.py", "importlib.import_module"): "names of its own table, _HOMES",
    (
        "cli/command.py",
        "importlib.import_module",
    ): "names that the commands are declared with",
    ("native/__init__.py", "importlib.import_module"): "one name, of its own compiled core",
    ("formats/foreign/caffe_writer.py", "importlib.import_module"): "one name, lmdb; a writer",
    ("formats/sample.py", "exec"): "its text depends on the number of fields and their kinds alone",
    ("formats/foreign/base.py", "exec"): "its text depends on the number and types of fields alone",
    ("loader/transport.py", "pickle.loads"): _OWN_PROCESS,
    ("loader/transport.py", "pickle.Unpickler"): _OWN_PROCESS,
    ("loader/worker_pool.py", "pickle.loads"): _OWN_PROCESS,
    ("loader/worker_process.py", "pickle.loads"): _OWN_PROCESS,
    ("packing/process_pool.py", "pickle.loads"): "of an error that it has just pickled",
    ("packing/process_pool.py", "ctypes"): "libc's prctl",
    ("packing/ray_executor.py", "pickle.loads"): "tasks, from Ray's store, which has the code too",
    ("packing/ray_executor.py", "importlib.import_module"): "two names, its own; on a node of Ray",
    ("machine.py", "ctypes"): "a function of libc, by its name here",
    ("tuning/bench_process.py", "pickle.loads"): _OWN_PROCESS,
    ("tuning/bench_process.py", "importlib.import_module"): _OWN_PROCESS,
}


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` as it stands in the source; "" for what is no such name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def found_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield what in a module could run what is read: its line, and its name."""
    renamed: dict[str, str] = {}  # what a name of this module stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                renamed[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                renamed[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            name = renamed.get(first, first) + (f".{rest}" if rest else "")
            yield from ((node.lineno, what) for what in _of_name(name, first in renamed))
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in _of_call(node, renamed))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from ((node.lineno, what) for what in _of_name(name, True))


def _of_name(name: str, imported: bool) -> Iterator[str]:
    module, _, function = name.partition(".")
    last = name.rpartition(".")[2]
    if name.removeprefix("builtins.") in BUILTINS:
        yield name.removeprefix("builtins.")
    elif imported and module in LOADERS and function:
        if name not in HARMLESS:
            yield module if module == "ctypes" else name
    elif (
        (module == "os" and (last in PROGRAMS or last.startswith(STARTS)))
        or last in UNPICKLE
        or name in ("torch.load", "torch.jit.load", "torch.hub.load")
    ):
        yield name


def _of_call(node: ast.Call, renamed: dict[str, str]) -> Iterator[str]:
    first, _, rest = dotted(node.func).partition(".")
    name = renamed.get(first, first) + (f".{rest}" if rest else "")
    given = {one.arg: one.value for one in node.keywords}
    for option in "shell", "allow_pickle", "use_pickle":
        if option in given and ast.unparse(given[option]) != "False":
            yield f"{option}={ast.unparse(given[option])}"
    if name == "yaml.load":
        loader = given.get("Loader", node.args[1] if len(node.args) > 1 else node)
        if dotted(loader) not in PLAIN_YAML:
            yield name
    if name.endswith("loadmat"):
        yield name


def every_use() -> dict[tuple[str, str], list[int]]:
    """Return the lines where each module of the package does such a thing."""
    found: dict[tuple[str, str], list[int]] = {}
    for path in sorted((ROOT / "shardio").rglob("*.py")):
        named = path.relative_to(ROOT / "shardio").as_posix()
        for line, what in found_in(ast.parse(path.read_text())):
            found.setdefault((named, what), []).append(line)
    return found


def test_nothing_that_is_read_can_become_code() -> None:
    found = every_use()
    new = [f"{path}:{lines}: {what}" for (path, what), lines in found.items()
           if (path, what) not in ALLOWED]  # fmt: skip
    assert not new, "say in ALLOWED why no byte of a dataset gets there:\n" + "\n".join(new)
    assert not ALLOWED.keys() - found.keys()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("eval(text)", "eval"),
        ("run = exec", "exec"),
        ("import builtins\nbuiltins.eval(x)", "eval"),
        ("code = compile(text, 'x', 'exec')", "compile"),
        ("__import__(name)", "__import__"),
        ("import pickle\npickle.load(file)", "pickle.load"),
        ("import pickle as p\np.loads(data)", "pickle.loads"),
        ("from pickle import loads as read\nread(data)", "pickle.loads"),
        ("from pickle import Unpickler", "pickle.Unpickler"),
        ("import pickle\nclass Mine(pickle.Unpickler): ...", "pickle.Unpickler"),
        ("import marshal\nmarshal.loads(data)", "marshal.loads"),
        ("import shelve\nshelve.open(path)", "shelve.open"),
        ("import dill\ndill.load(file)", "dill.load"),
        ("import importlib\nimportlib.import_module(name)", "importlib.import_module"),
        ("from importlib import import_module", "importlib.import_module"),
        ("import torch\ntorch.load(path)", "torch.load"),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", "allow_pickle=True"),
        ("import numpy as np\nnp.load(path, allow_pickle=wanted)", "allow_pickle=wanted"),
        ("import yaml\nyaml.load(text)", "yaml.load"),
        ("import yaml\nyaml.load(text, yaml.Loader)", "yaml.load"),
        ("import yaml\nyaml.unsafe_load(text)", "yaml.unsafe_load"),
        ("import subprocess\nsubprocess.run(text, shell=True)", "shell=True"),
        ("import os\nos.system(text)", "os.system"),
        ("import os\nos.execvp(name, words)", "os.execvp"),
        ("import ctypes\nctypes.CDLL(path)", "ctypes"),
    ],
)
def test_the_search_finds(text: str, what: str) -> None:
    assert what in {found for _, found in found_in(ast.parse(text))}


@pytest.mark.parametrize(
    "text",
    [
        *("import re\nre.compile(text)", "import pickle\npickle.dumps(value)", "self.eval(x)"),
        *("import yaml\nyaml.load(text, yaml.BaseLoader)", "module.load(file)", "model.eval()"),
        *("import numpy as np\nnp.load(path, allow_pickle=False)", "from .a import exec_order"),
        *("import json\njson.loads(text)", "import subprocess\nsubprocess.run(words)"),
    ],
)
def test_the_search_leaves_what_is_harmless(text: str) -> None:
    assert [*found_in(ast.parse(text))] == []
