"""The skeleton: a state with its tensors taken out, as a flat list of nodes in preorder.

Flat, so that no depth of nesting meets a recursion limit. In memory a node is one or two *tokens*: ``Tensor`` or
``Parameter`` for a tensor, ``Value`` for a plain value, a container's type and its length, ``Named`` for a named
tuple, ``Entry`` for a type of the allow-list. Two states of equal structure have equal tokens and keys, and comparing
those is what makes a second save of the same state cheap.
"""

from __future__ import annotations

import collections
import json
import keyword
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from mlflashpoint.core.plain import decode_plain, encode_plain, key_kind
from mlflashpoint.errors import ShardFormatError


class Value:
    """Token of a plain value."""


class Named(NamedTuple):
    """Token of a named tuple; one child per field."""

    name: str
    fields: tuple[str, ...]


class Entry(NamedTuple):
    """Token of a type on the allow-list; its one child is the state that ``encode`` gave."""

    name: str


_CONTAINERS: dict[str, type] = {
    "dict": dict,
    "ordered": collections.OrderedDict,
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_TAGS = {cls: tag for tag, cls in _CONTAINERS.items()}
KEYED = (dict, collections.OrderedDict)


@dataclass(frozen=True)
class Skeleton:
    """A state without its tensors' bytes; an immutable snapshot.

    Attributes:
        tokens: see the module.
        keys: keys of all dictionaries, in the order of the nodes.
        values: plain values, likewise.
        refs: for each tensor node the index of its tensor; tied ones share an index.
        grads: for each tensor node whether it requires a gradient.
    """

    tokens: list[Any]
    keys: list[Any]
    values: list[Any]
    refs: list[int]
    grads: list[bool]

    def __post_init__(self) -> None:
        kinds: list[Any] = list(map(type, self.keys))
        if not {str, int} >= set(kinds):
            kinds = list(map(key_kind, self.keys))
        object.__setattr__(self, "key_kinds", kinds)

    def same_structure(self, other: Skeleton) -> bool:
        """Whether both differ in plain values alone."""
        return (
            self.tokens == other.tokens
            and self.keys == other.keys
            and self.key_kinds == other.key_kinds  # type: ignore[attr-defined]
            and self.refs == other.refs
            and self.grads == other.grads
        )

    def names(self) -> list[str]:
        """For each tensor node its place in the state, for example ``optimizer.state[0].exp_avg``."""
        return [path for path, token in paths(self.tokens, self.keys) if token is Tensor or token is Parameter]

    def nodes(self) -> list[str]:
        """JSON text of each node; those of plain values, in the order of ``values``, are empty."""
        out = []
        refs, grads, keys = iter(self.refs), iter(self.grads), iter(self.keys)
        tokens = iter(self.tokens)
        for token in tokens:
            if token is Value:
                out.append("")
            elif token is Tensor or token is Parameter:
                kind = "tensor" if token is Tensor else "parameter"
                ref, grad = next(refs), next(grads)
                out.append(f'["{kind}",{ref}]' if grad is (token is Parameter) else f'["{kind}",{ref},{int(grad)}]')
            elif type(token) is Named:
                out.append(dumps(["named", token.name, list(token.fields)]))
            elif type(token) is Entry:
                out.append(dumps(["leaf", token.name]))
            else:
                size = next(tokens)
                body: Any = [encode_plain(next(keys)) for _ in range(size)] if token in KEYED else size
                out.append(dumps([_TAGS[token], body]))
        return out


def dumps(value: Any) -> str:
    """Compact JSON in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def parse_nodes(raw: Any, tensor_count: int) -> Skeleton:
    """The skeleton of a file's node list.

    Raises:
        ShardFormatError: it is not exactly one well-formed state, or names a tensor that there isn't.
    """
    if type(raw) is not list:
        raise ShardFormatError("the skeleton is no list of nodes")
    skeleton = Skeleton([], [], [], [], [])
    open_nodes = 1
    for node in raw:
        if open_nodes == 0:
            raise ShardFormatError("the skeleton goes on behind its end")
        open_nodes += _parse_node(node, skeleton, tensor_count) - 1
    if open_nodes:
        raise ShardFormatError(f"the skeleton ends {open_nodes} nodes too early")
    return Skeleton(skeleton.tokens, skeleton.keys, skeleton.values, skeleton.refs, skeleton.grads)


def _parse_node(node: Any, into: Skeleton, tensor_count: int) -> int:
    """Append one node; returns how many children follow."""
    tag = node[0] if type(node) is list and len(node) >= 2 and type(node[0]) is str else None
    if tag is None:
        into.tokens.append(Value)
        into.values.append(decode_plain(node))
        return 0
    if tag in ("tensor", "parameter"):
        ref = node[1]
        known = type(ref) is int and 0 <= ref < tensor_count
        if not known or len(node) > 3 or (len(node) == 3 and node[2] not in (0, 1)):
            raise ShardFormatError(f"malformed reference to a tensor: {str(node)[:80]}")
        into.tokens.append(Tensor if tag == "tensor" else Parameter)
        into.refs.append(ref)
        into.grads.append(bool(node[2]) if len(node) == 3 else tag == "parameter")
        return 0
    if tag == "leaf":
        if len(node) != 2 or type(node[1]) is not str:
            raise ShardFormatError("malformed leaf in the skeleton")
        into.tokens.append(Entry(node[1]))
        return 1
    if tag == "named":
        return _parse_named(node, into)
    cls = _CONTAINERS.get(tag)
    if cls is None:
        into.tokens.append(Value)
        into.values.append(decode_plain(node))
        return 0
    body = node[1]
    if len(node) != 2:
        raise ShardFormatError(f"malformed {tag} in the skeleton")
    if cls in KEYED and type(body) is list:
        keys = [decode_plain(key) for key in body]
        if len(set(keys)) != len(keys):
            raise ShardFormatError("a dictionary of the skeleton has one key twice")
        into.keys.extend(keys)
        size = len(keys)
    elif cls not in KEYED and type(body) is int and 0 <= body < 1 << 40:
        size = body
    else:
        raise ShardFormatError(f"malformed {tag} in the skeleton")
    into.tokens.extend((cls, size))
    return size


def _parse_named(node: list[Any], into: Skeleton) -> int:
    name, fields = node[1:] if len(node) == 3 else (None, None)
    if type(fields) is not list or not all(type(word) is str for word in (name, *fields)):
        raise ShardFormatError("malformed named tuple in the skeleton")
    words = (str(name), *fields)
    # namedtuple() builds source code from these words.
    if not all(word.isidentifier() and word.isascii() and not keyword.iskeyword(word) for word in words) or any(
        field.startswith("_") for field in fields
    ):
        raise ShardFormatError("a named tuple of the skeleton has impossible names")
    if len(set(fields)) != len(fields) or len(fields) > 1000:
        raise ShardFormatError("a named tuple of the skeleton has impossible fields")
    into.tokens.append(Named(str(name), tuple(fields)))
    return len(fields)


class Walk:
    """Names nodes as they come in preorder."""

    def __init__(self) -> None:
        self._pending: list[Iterator[str]] = [iter(("",))]

    def next(self) -> str:
        """Path of the next node, ``""`` for the state itself."""
        while True:
            path = next(self._pending[-1], None)
            if path is not None:
                return path
            self._pending.pop()

    def enter(self, children: Iterator[str]) -> None:
        self._pending.append(children)


def paths(tokens: list[Any], keys: list[Any], *, beyond: bool = False) -> Iterator[tuple[str, Any]]:
    """``(path, token)`` of each node; with ``beyond``, the path of the node that would come next too."""
    walk = Walk()
    upcoming = iter(keys)
    stream = iter(tokens)
    for token in stream:
        path = walk.next()
        yield path, token
        if type(token) is Named:
            walk.enter(iter([f"{path}.{field}" for field in token.fields]))
        elif type(token) is Entry:
            walk.enter(iter((path,)))
        elif token in _TAGS:
            size = next(stream)
            if token in KEYED:
                walk.enter(iter([_child(path, next(upcoming)) for _ in range(size)]))
            else:
                walk.enter(f"{path}[{index}]" for index in range(size))
    if beyond:
        yield walk.next(), None


def _child(path: str, key: Any) -> str:
    if type(key) is not str:
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key


def is_tensor_token(token: Any) -> bool:
    return token is torch.Tensor or token is Parameter
