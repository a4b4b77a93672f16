"""Where a node of a skeleton stands in the state, for example ``optimizer.state[0].exp_avg``."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

from mlflashpoint.core.nesting import shown_key
from mlflashpoint.core.skeleton import KEYED, TAGS, Entry, Named, is_tensor

#: characters of a place in a message
_LONGEST = 160


def tensor_names(tokens: Sequence[Any], keys: Sequence[Any]) -> list[str]:
    """The place of each tensor node; two places may read the same."""
    return [path for path, token in walk(tokens, keys) if is_tensor(token)]


def next_place(tokens: Sequence[Any], keys: Sequence[Any]) -> str:
    """The place of the node that comes after the given ones, as ``state.a.b``; of a long one its two ends."""
    *_, (path, _) = walk(tokens, keys, beyond=True)
    place = in_state(path)
    # What is wrong stands behind it, in records that are cut.
    return place if len(place) <= _LONGEST else f"{place[: _LONGEST // 2]} ... {place[-_LONGEST // 2 :]}"


def in_state(path: str) -> str:
    """``state.a.b`` for ``a.b``."""
    return f"state{path}" if not path or path[0] in ".[" else f"state.{path}"


def unique(names: Sequence[str], nodes: Sequence[int]) -> list[str]:
    """Names of the given tensor nodes; where two places read the same, the later get ``~2``, ``~3``, ..."""
    times: collections.Counter[str] = collections.Counter()
    taken = set(names)
    out = []
    for node in nodes:
        name = names[node]
        times[name] += 1
        if times[name] > 1:
            number = times[name]
            while f"{name}~{number}" in taken:
                number += 1
            name = f"{name}~{number}"
            taken.add(name)
        out.append(name)
    return out


def walk(tokens: Sequence[Any], keys: Sequence[Any], *, beyond: bool = False) -> Iterator[tuple[str, Any]]:
    """``(path, token)`` of each node in preorder; with ``beyond`` also ``(path, None)`` of the node after the last."""
    pending: list[Iterator[str]] = [iter(("",))]

    def following() -> str:
        while True:
            path = next(pending[-1], None)
            if path is not None:
                return path
            pending.pop()

    upcoming, stream = iter(keys), iter(tokens)
    for token in stream:
        path = following()
        yield path, token
        if type(token) is Named:
            pending.append(iter([f"{path}.{field}" for field in token.fields]))
        elif type(token) is Entry:
            pending.append(iter((path,)))
        elif token in KEYED:
            pending.append(iter([_child(path, next(upcoming)) for _ in range(next(stream))]))
        elif token in TAGS:
            pending.append(_items(path, next(stream)))
    if beyond:
        yield following(), None


def _items(path: str, size: int) -> Iterator[str]:
    return (f"{path}[{index}]" for index in range(size))


def _child(path: str, key: Any) -> str:
    if type(key) is not str:
        return f"{path}[{shown_key(key)}]"
    return f"{path}.{key}" if path else key
