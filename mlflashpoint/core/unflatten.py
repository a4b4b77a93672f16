"""Putting a state together from a skeleton and tensors."""

from __future__ import annotations

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from mlflashpoint.core.leaves import leaf_named
from mlflashpoint.core.skeleton import KEYED, TAGS, Entry, Named, Skeleton, Value
from mlflashpoint.core.standard_leaves import chosen_leaf_named
from mlflashpoint.errors import FlashpointError, ShardFormatError, in_words

_LEAF_TOKENS = frozenset((Tensor, Parameter, Value))
#: tokens behind which comes a number of children
_SIZED = frozenset(TAGS)
_DIRECT = frozenset((*KEYED, list))


def unflatten(skeleton: Skeleton, tensors: Sequence[Tensor], *, fit: bool = False) -> Any:
    """Put a state together.

    Args:
        skeleton: from ``flatten``, or parsed from a file.
        tensors: one per index that the skeleton refers to; they become part of the state, nothing is copied.
        fit: whether there is one for each node, known to be what the node asks for.

    Raises:
        ShardFormatError: a leaf of the allow-list is not registered in this process, or can't be decoded.
    """
    tokens, values = skeleton.tokens, iter(skeleton.values)
    keys, leaves = iter(skeleton.keys), iter(tensors if fit else _leaves(skeleton, tensors))
    outer: list[_Frame] = []
    frame = _Frame(operator.itemgetter(0), 1)
    place = 0
    while True:
        while frame.left:
            token = tokens[place]
            place += 1
            frame.left -= 1
            if token in _LEAF_TOKENS:
                frame.children.append(next(values) if token is Value else next(leaves))
                continue
            size = 0
            if token in _SIZED:
                size = tokens[place]
                place += 1
                # Most containers hold no others: they are made in one go.
                coming = tokens[place : place + size]
                kinds = set(coming)
                if token in _DIRECT and kinds <= _LEAF_TOKENS:
                    if Value in kinds:
                        children = [next(values) if token is Value else next(leaves) for token in coming]
                    else:
                        children = list(itertools.islice(leaves, size))
                    keyed = token in KEYED
                    frame.children.append(
                        token(zip(itertools.islice(keys, size), children, strict=True)) if keyed else children
                    )
                    place += size
                    continue
            outer.append(frame)
            frame = _frame(token, size, keys)
        built = _built(frame)
        if not outer:
            return built
        frame = outer.pop()
        frame.children.append(built)


def _leaves(skeleton: Skeleton, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensor of each node, as the kind that the node asks for; tied nodes of a kind get one object."""
    kinds = [token for token in skeleton.tokens if token is Tensor or token is Parameter]
    found = [tensors[ref] for ref in skeleton.refs]
    if kinds == list(map(type, found)) and skeleton.grads == [tensor.requires_grad for tensor in found]:
        return found
    made: dict[Any, Tensor] = {}
    for place, key in enumerate(zip(skeleton.refs, kinds, skeleton.grads, strict=True)):
        if key not in made:
            try:
                made[key] = _as_kind(found[place], *key[1:])
            except RuntimeError as error:
                raise ShardFormatError(f"a tensor of the skeleton can't be what it asks for: {error}") from error
        found[place] = made[key]
    return found


@dataclass(slots=True)
class _Frame:
    """A container of which ``left`` children are still to come."""

    build: Callable[[list[Any]], Any]
    left: int
    what: str = "a container"
    children: list[Any] = field(default_factory=list)


def _frame(token: Any, size: int, keys: Iterator[Any]) -> _Frame:
    if type(token) is Named:
        return _Frame(_named_type(token)._make, len(token.fields))
    if type(token) is Entry:
        leaf = chosen_leaf_named(token.name) or leaf_named(token.name)
        if leaf is None:
            raise ShardFormatError(
                f"the state holds a leaf {token.name!r} that this process has not registered",
                remedy="import what registers it (register_leaf) before loading",
            )
        decode = leaf.decode
        return _Frame(lambda children: decode(children[0]), 1, f"leaf {token.name!r}")
    if token in KEYED:
        own = list(itertools.islice(keys, size))
        return _Frame(lambda children: token(zip(own, children, strict=True)), size)
    return _Frame(token if token is not list else lambda children: children, size)


def _built(frame: _Frame) -> Any:
    try:
        return frame.build(frame.children)
    except FlashpointError:
        raise
    except Exception as error:
        raise ShardFormatError(
            f"{frame.what} of the skeleton can't be rebuilt: {in_words(error)}",
            remedy="resume with the release that saved it, or from a durable checkpoint",
        ) from error


@functools.lru_cache(maxsize=256)
def _named_type(token: Named) -> Any:
    return collections.namedtuple(token.name, token.fields)  # type: ignore[misc]


def _as_kind(tensor: Tensor, token: Any, grad: bool) -> Tensor:
    if token is Parameter:
        if type(tensor) is Parameter and tensor.requires_grad == grad:
            return tensor
        return Parameter(tensor.detach(), requires_grad=grad)
    if type(tensor) is Tensor and tensor.requires_grad == grad:
        return tensor
    return tensor.detach().requires_grad_(grad)
