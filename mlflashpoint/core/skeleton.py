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
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from mlflashpoint.core.plain import decode_plain, encode_plain, key_kinds
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
TAGS = {cls: tag for tag, cls in _CONTAINERS.items()}
KEYED = (dict, collections.OrderedDict)


@dataclass(frozen=True)
class Skeleton:
    """A state without its tensors' bytes.

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

    def same_structure(self, other: Skeleton) -> bool:
        """Whether both differ in plain values alone."""
        return (
            self.tokens == other.tokens
            and self.keys == other.keys
            and key_kinds(self.keys) == key_kinds(other.keys)
            and self.refs == other.refs
            and self.grads == other.grads
        )

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
                out.append(dumps([TAGS[token], body]))
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
    return skeleton


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


def is_tensor(token: Any) -> bool:
    """Whether the token stands for a tensor."""
    return token is Tensor or token is Parameter
