"""Taking a nested state apart into a skeleton and tensors, and putting it together again."""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mlflashpoint.core.dtypes import DTYPE_NAMES
from mlflashpoint.core.leaves import Leaf, leaf_named, leaf_of, register_leaf
from mlflashpoint.core.plain import PLAIN_TYPES, encode_plain
from mlflashpoint.core.skeleton import KEYED, Entry, Named, Skeleton, Value, paths
from mlflashpoint.core.standard_leaves import LONG_BYTES, long_bytes, sparse_leaf, untyped_leaf
from mlflashpoint.errors import FlashpointError, ShardFormatError, StateTypeError

__all__ = ["Flat", "flatten", "register_leaf", "unflatten"]

MAX_DEPTH = 10_000
MAX_NODES = 20_000_000

_shape = operator.attrgetter("shape")
_dtype = operator.attrgetter("dtype")
_device = operator.attrgetter("device")
_grad = operator.attrgetter("requires_grad")


@dataclass(frozen=True)
class Flat:
    """A state taken apart. The skeleton is a snapshot; the tensors are the state's own.

    Attributes:
        skeleton: the state without its tensors.
        tensors: strided tensors; those that are one memory with one shape and stride are listed once.
        nodes: index of the tensor node that gave each of ``tensors``.
        shapes, dtypes, devices: of each of ``tensors``.
    """

    skeleton: Skeleton
    tensors: list[Tensor]
    nodes: list[int]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    devices: list[torch.device]

    def names(self) -> list[str]:
        """A unique name for each of ``tensors``: its first place in the state."""
        return unique_names(self.skeleton.names(), self.nodes)


def unique_names(all_names: Sequence[str], nodes: Sequence[int]) -> list[str]:
    """Names of the given tensor nodes; where two places read the same, the later get ``~2``, ``~3``, ..."""
    seen: collections.Counter[str] = collections.Counter()
    names = []
    taken = set(all_names)
    for node in nodes:
        name = all_names[node]
        seen[name] += 1
        if seen[name] > 1:
            number = seen[name]
            while f"{name}~{number}" in taken:
                number += 1
            name = f"{name}~{number}"
            taken.add(name)
        names.append(name)
    return names


def flatten(state: Any) -> Flat:
    """Take ``state`` apart.

    Raises:
        StateTypeError: it holds an object that is neither plain data, a container, a tensor with data, nor of a type on
            the allow-list; or contains itself; or is nested more than 10,000 deep. Names the place.
    """
    walk = _Walk()
    try:
        walk.run(state)
    except StateTypeError as error:
        raise walk.located(error) from error.__cause__
    except (RuntimeError, NotImplementedError) as error:
        raise walk.located(StateTypeError(f"the state can't be read: {error}")) from error
    return walk.finish()


class _Walk:
    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self.leaves: list[Tensor] = []

    def run(self, state: Any) -> None:
        tokens, values, leaves = self.tokens, self.values, self.leaves
        strided = torch.strided
        stack: list[Iterator[Any]] = [iter((state,))]
        entered: list[int] = [0]
        inside: set[int] = set()
        while stack:
            for item in stack[-1]:
                kind = type(item)
                if (kind is Tensor or kind is Parameter) and item.layout is strided:
                    tokens.append(kind)
                    leaves.append(item)
                    continue
                if kind in PLAIN_TYPES and not (kind is bytes and len(item) >= LONG_BYTES):
                    tokens.append(Value)
                    values.append(item)
                    continue
                if id(item) in inside:
                    raise StateTypeError("the state contains itself", remedy="break the cycle before saving")
                if len(stack) > MAX_DEPTH or len(tokens) > MAX_NODES:
                    raise StateTypeError(
                        f"the state is nested more than {MAX_DEPTH} deep or has more than {MAX_NODES} entries"
                    )
                children = self._open(item, kind)
                # The iterator, or the frame below it, keeps the object alive, so that its id stays its own.
                inside.add(id(item))
                entered.append(id(item))
                stack.append(children)
                break
            else:
                stack.pop()
                inside.discard(entered.pop())

    def _open(self, item: Any, kind: type) -> Iterator[Any]:
        if kind in KEYED:
            self.tokens += (kind, len(item))
            self.keys.extend(item)
            return iter(item.values())
        if kind is list or kind is tuple or kind is set or kind is frozenset:
            self.tokens += (kind, len(item))
            return iter(item)
        leaf = self._leaf(item, kind)
        if leaf is not None:
            child = _encoded(leaf, item)
            self.tokens.append(Entry(leaf.name))
            return iter((child,))
        fields = getattr(kind, "_fields", None)
        if issubclass(kind, tuple) and type(fields) is tuple and len(fields) == len(item):
            self.tokens.append(Named(kind.__name__, fields))
            return iter(item)
        raise StateTypeError(
            f"{kind.__module__}.{kind.__qualname__} is neither plain data nor registered",
            remedy="leave it out, or call mlflashpoint.core.state.register_leaf for its type",
        )

    def _leaf(self, item: Any, kind: type) -> Leaf | None:
        if kind is bytes:
            return long_bytes
        if kind is Tensor or kind is Parameter:
            return sparse_leaf(item)
        return leaf_of(kind)

    def located(self, error: StateTypeError) -> StateTypeError:
        """The same error with the place where the walk stands."""
        *_, (place, _) = paths(self.tokens, self.keys, beyond=True)
        return StateTypeError(f"state{_dotted(place)}: {error.message}", remedy=error.remedy)

    def finish(self) -> Flat:
        leaves = self.leaves
        try:
            addresses = list(map(Tensor.data_ptr, leaves))
            shapes, dtypes, devices = list(map(_shape, leaves)), list(map(_dtype, leaves)), list(map(_device, leaves))
        except RuntimeError as error:
            raise self._unreadable() from error
        if not DTYPE_NAMES.keys() >= set(dtypes) or any(device.type == "meta" for device in set(devices)):
            raise self._unreadable()
        refs = _ties(leaves, addresses, shapes, dtypes, devices)
        skeleton = Skeleton(self.tokens, self.keys, self.values, refs, list(map(_grad, leaves)))
        nodes = list(range(len(leaves)))
        if refs and max(refs) + 1 < len(refs):
            nodes = [node for node, ref in _firsts(refs)]
            leaves, shapes, dtypes, devices = (
                [items[node] for node in nodes] for items in (leaves, shapes, dtypes, devices)
            )
        return Flat(skeleton, leaves, nodes, shapes, dtypes, devices)

    def _unreadable(self) -> StateTypeError:
        names = Skeleton(self.tokens, self.keys, [], [], []).names()
        for name, tensor in zip(names, self.leaves, strict=True):
            try:
                if tensor.device.type == "meta":
                    return StateTypeError(f"state{_dotted(name)}: a meta tensor has no data", remedy="leave it out")
                if tensor.dtype not in DTYPE_NAMES:
                    return StateTypeError(
                        f"state{_dotted(name)}: a tensor of dtype {tensor.dtype}",
                        remedy="store it in a dtype of whole bytes, and a quantized one by its int_repr and scales",
                    )
                tensor.data_ptr()
                len(tensor.shape)
            except RuntimeError as error:
                return StateTypeError(f"state{_dotted(name)}: {error}", remedy="store a tensor that has its own memory")
        return StateTypeError("the state changed while it was being read")


def _encoded(leaf: Leaf, item: Any) -> Any:
    try:
        return leaf.encode(item)
    except StateTypeError:
        raise
    except Exception as error:
        raise StateTypeError(f"leaf {leaf.name!r} can't encode its object: {type(error).__name__}: {error}") from error


def _dotted(place: str) -> str:
    return place if not place or place[0] in ".[" else f".{place}"


def _ties(
    tensors: list[Tensor],
    addresses: list[int],
    shapes: list[torch.Size],
    dtypes: list[torch.dtype],
    devices: list[torch.device],
) -> list[int]:
    """For each tensor the number of its memory, counted from 0 in the order of first appearance."""
    count = len(tensors)
    if len(set(addresses)) == count:
        return list(range(count))
    often = {address for address, times in collections.Counter(addresses).items() if times > 1}
    seen: dict[Any, int] = {}
    refs: list[int] = []
    fresh = 0
    for index, address in enumerate(addresses):
        if address in often and 0 not in shapes[index]:
            tensor = tensors[index]
            key: Any = (
                *(address, devices[index], dtypes[index], shapes[index], tensor.stride()),
                *(tensor.is_conj(), tensor.is_neg()),
            )
            ref = seen.setdefault(key, fresh)
        else:
            ref = fresh
        fresh += ref == fresh
        refs.append(ref)
    return refs


def _firsts(refs: list[int]) -> Iterator[tuple[int, int]]:
    following = 0
    for node, ref in enumerate(refs):
        if ref == following:
            yield node, ref
            following += 1


def unflatten(skeleton: Skeleton, tensors: Sequence[Tensor]) -> Any:
    """Put a state together.

    Args:
        skeleton: from ``flatten``, or parsed from a file.
        tensors: one per index that the skeleton refers to; they become part of the state, nothing is copied.

    Raises:
        ShardFormatError: a leaf of the allow-list is not registered in this process, or can't be decoded.
    """
    root: list[Any] = []
    frames: list[_Frame] = [_Frame(_only, 1, root)]
    tokens, keys, values = iter(skeleton.tokens), iter(skeleton.keys), iter(skeleton.values)
    places = zip(skeleton.refs, skeleton.grads, strict=True)
    made: dict[Any, Tensor] = {}
    for token in tokens:
        if token is Value:
            frames[-1].children.append(next(values))
        elif token is Tensor or token is Parameter:
            ref, grad = next(places)
            key = (ref, token, grad)
            if key not in made:
                made[key] = _as_kind(tensors[ref], token, grad)
            frames[-1].children.append(made[key])
        else:
            frames.append(_frame(token, tokens, keys))
        while len(frames) > 1 and len(frames[-1].children) == frames[-1].size:
            frame = frames.pop()
            frames[-1].children.append(_built(frame))
    return root[0]


@dataclass
class _Frame:
    build: Any
    size: int
    children: list[Any]


def _only(children: list[Any]) -> Any:
    return children[0]


def _built(frame: _Frame) -> Any:
    try:
        return frame.build(frame.children)
    except FlashpointError:
        raise
    except Exception as error:
        what = getattr(frame.build, "what", "a container")
        raise ShardFormatError(
            f"{what} of the skeleton can't be rebuilt: {type(error).__name__}: {error}",
            remedy="resume with the release that saved it, or from a durable checkpoint",
        ) from error


def _frame(token: Any, tokens: Iterator[Any], keys: Iterator[Any]) -> _Frame:
    if type(token) is Named:
        return _Frame(_named_type(token)._make, len(token.fields), [])
    if type(token) is Entry:
        leaf = untyped_leaf(token.name) or leaf_named(token.name)
        if leaf is None:
            raise ShardFormatError(
                f"the state holds a leaf {token.name!r} that this process has not registered",
                remedy="import what registers it (register_leaf) before loading",
            )
        return _Frame(_Decode(leaf), 1, [])
    size = next(tokens)
    if token in KEYED:
        own = [next(keys) for _ in range(size)]
        return _Frame(lambda children: token(zip(own, children, strict=True)), size, [])
    return _Frame((lambda children: children) if token is list else token, size, [])


class _Decode:
    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self.what = f"leaf {leaf.name!r}"

    def __call__(self, children: list[Any]) -> Any:
        return self._leaf.decode(children[0])


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


def check_plain(skeleton: Skeleton) -> list[Any]:
    """JSON values of the skeleton's plain values; raises StateTypeError for one that JSON can't hold."""
    return [encode_plain(value) for value in skeleton.values]
