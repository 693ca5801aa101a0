"""Stand-ins for packages that a rival imports, and does not use here."""

from __future__ import annotations

import importlib.abc
import importlib.util
from types import ModuleType
from typing import Any


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """torchvision and transformers, of which streaming imports names that its reader never uses.

    torchvision's wheel is linked to CUDA, and fails to import beside a torch for the CPU.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in ("torchvision", "transformers"):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        class StandIn(ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
