"""Let Megatron Bridge import where Transformer Engine is missing.

A few Bridge modules import Transformer Engine unconditionally. A fake package in ``sys.modules`` would make
Megatron-Core believe that it has the real one, so only those import statements are rewritten, in Bridge's modules
alone; everyone else still meets the ImportError.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from typing import Any

_MODULES = re.compile(r"megatron\.bridge\.(peft|models|diffusion)\.")
_IMPORT_AS = re.compile(r"^import transformer_engine\S* as (\w+).*$", re.MULTILINE)
_IMPORT_FROM = re.compile(r"^from transformer_engine[\w.]* import (\w+)[ \t]*(?:#.*)?$", re.MULTILINE)
_INSTEAD = rf"from {__name__} import Absent as \1"


class _Names(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (Absent,), {})


class Absent(metaclass=_Names):
    """Stands for any Transformer Engine class: good for ``isinstance``, never to be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ImportError("Transformer Engine is not installed")


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        # Neither reads nor writes the .pyc: what is compiled here is not what the file says.
        path = self.get_filename(fullname)
        source = importlib.util.decode_source(self.get_data(path))
        return self.source_to_code(_IMPORT_FROM.sub(_INSTEAD, _IMPORT_AS.sub(_INSTEAD, source)), path)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not _MODULES.match(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None
        with open(spec.origin or "", encoding="utf-8") as file:
            if "transformer_engine" in file.read():
                spec.loader = _Loader(fullname, spec.origin or "")
        return spec


def install() -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        sys.meta_path.insert(0, _Finder())
