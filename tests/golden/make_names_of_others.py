"""Makes names_of_others.json: the options of other datasets and loaders, by their own sources.

python tests/golden/make_names_of_others.py ENVIRONMENT ...

ENVIRONMENT: folders of virtual environments that have them, as tools/setup-formats,
tools/setup-frameworks and benchmarks/setup_rivals make them. Nothing of these is imported.
"""

import ast
import json
import sys
from pathlib import Path

OUT = Path(__file__).parent / "names_of_others.json"
# What is called how in which file of which distribution.
SOURCES = (
    ("mosaicml-streaming", "streaming/base/dataset.py", "StreamingDataset"),
    ("mosaicml-streaming", "streaming/base/stream.py", "Stream"),
    ("litdata", "litdata/streaming/dataset.py", "StreamingDataset"),
    ("litdata", "litdata/streaming/dataloader.py", "StreamingDataLoader"),
    ("webdataset", "webdataset/compat.py", "WebDataset"),
    ("datasets", "datasets/load.py", "load_dataset"),
    ("datasets", "datasets/iterable_dataset.py", "IterableDataset"),
    ("datasets", "datasets/iterable_dataset.py", "IterableDataset.shuffle"),
    ("torchvision", "torchvision/datasets/folder.py", "ImageFolder"),
    ("torch", "torch/utils/data/dataloader.py", "DataLoader"),
    ("timm", "timm/data/loader.py", "create_loader"),
    ("ffcv", "ffcv/loader/loader.py", "Loader"),
)


def main() -> None:
    found = []
    for distribution, file, name in SOURCES:
        site = next(site for site in sites() if (site / file).exists())
        (about,) = site.glob(f"{distribution.replace('-', '_')}-*.dist-info")
        arguments = definition(ast.parse((site / file).read_text()), name.split(".")).args
        names = [
            one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        ]
        version = about.name.removesuffix(".dist-info").rpartition("-")[2].partition("+")[0]
        found.append(
            {
                "of": f"{distribution} {version}: {name}",
                "names": [one for one in names if one != "self"],
            }
        )
    OUT.write_text(json.dumps(found, indent=1) + "\n")


def sites() -> list[Path]:
    return [
        site for folder in sys.argv[1:] for site in Path(folder).glob("lib/python3*/site-packages")
    ]


def definition(tree: ast.AST, path: list[str]) -> ast.FunctionDef:
    """Find a function, or the `__init__` of a class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == path[0]:
            if isinstance(node, ast.FunctionDef) and not overloaded(node):
                return node
            if isinstance(node, ast.ClassDef):
                return definition(node, path[1:] or ["__init__"])
    raise LookupError(path)


def overloaded(node: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list)


if __name__ == "__main__":
    main()
