"""Taking a nested state apart into a skeleton and tensors.

A training loop saves the same structure again and again. So the walk gathers what it meets into flat lists, without
deciding anything per tensor, and compares those with the lists of the last time: only a new form is looked at closely.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mlflashpoint.core.dtypes import DTYPE_NAMES
from mlflashpoint.core.form import Form, crowds_of, flips_of, identity_of, of_host, strides_of, ties
from mlflashpoint.core.leaves import Leaf, leaf_of
from mlflashpoint.core.likeness import Likeness
from mlflashpoint.core.nesting import REMEDY, shown_key
from mlflashpoint.core.paths import in_state, next_place, tensor_names, unique, walk
from mlflashpoint.core.plain import PLAIN_TYPES, encode_plain, key_kinds
from mlflashpoint.core.skeleton import KEYED, Entry, Named, Skeleton, Value
from mlflashpoint.core.standard_leaves import LONG, chosen_leaf
from mlflashpoint.errors import FlashpointError, StateTypeError, in_words

MAX_DEPTH = 1_000
MAX_TOKENS = 50_000_000

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
        addresses: where each of ``tensors`` begins.
        devices: where each of ``tensors`` is.
        form: the same object as that of the state given as ``like``, if their forms are equal.
    """

    skeleton: Skeleton
    tensors: list[Tensor]
    addresses: list[int]
    devices: list[torch.device]
    form: Form

    @property
    def on_host(self) -> bool:
        """Whether all of ``tensors`` are in host memory."""
        return self.form.on_host if self.devices is self.form.devices else of_host(self.devices)

    @property
    def moved(self) -> bool:
        """Whether its tensors may lie elsewhere than when the form was found."""
        return self.devices is not self.form.devices

    def flipped(self) -> list[bool]:
        """Whether each of ``tensors`` is a conjugate or negative view."""
        return [self.form.flipped[node] for node in self.form.nodes]

    def names(self) -> list[str]:
        """A unique name for each of ``tensors``: the place in the state where it first appears."""
        return unique(tensor_names(self.form.tokens, self.form.keys), self.form.nodes)


def flatten(state: Any, like: Form | None = None) -> Flat:
    """Take ``state`` apart.

    Args:
        state: dictionaries, lists, tuples, sets, plain values, tensors, and what is on the allow-list.
        like: form of an earlier state; makes it cheaper if this one's is equal.

    Raises:
        StateTypeError: it holds something else, or a tensor without data of its own, or contains itself, or is nested
            more than 1,000 deep, or changed meanwhile. Names the place.
    """
    if like is None or like.has_entries:
        return _Walk().take(state, like)
    return _Walk().take_trusting(state, like) or _Walk().take(state, None)


class _Walk:
    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self.leaves: list[Tensor] = []

    def take(self, state: Any, like: Form | None) -> Flat:
        try:
            self._run(state)
        except StateTypeError as error:
            raise StateTypeError(
                f"{next_place(self.tokens, self.keys)}: {error.message}", remedy=error.remedy
            ) from error.__cause__
        except FlashpointError:
            raise
        except Exception as error:
            # Above all: a dictionary that another thread changes while we go through it.
            place = next_place(self.tokens, self.keys)
            raise StateTypeError(f"{place}: it can't be read: {in_words(error)}") from error
        try:
            return self._flat(like)
        except RuntimeError as error:
            raise self._culprit(error) from error

    def take_trusting(self, state: Any, like: Form) -> Flat | None:
        """The state, if it has that form, which has no entries; None for any other, and for one that can't be taken."""
        try:
            # Whether a tensor is strided is not asked one by one: one that is not has no address, or is not alike.
            self._run(state, trusting=True)
            return self._matching(like)
        except Exception:
            return None

    def _run(self, state: Any, *, trusting: bool = False) -> None:
        tokens, values, leaves = self.tokens, self.values, self.leaves
        strided = torch.strided
        stack: list[Iterator[Any]] = [iter((state,))]
        entered: list[Any] = [None]
        inside: set[int] = set()
        while stack:
            for item in stack[-1]:
                kind = type(item)
                if (kind is Tensor or kind is Parameter) and (trusting or item.layout is strided):
                    tokens.append(kind)
                    leaves.append(item)
                    continue
                if kind in PLAIN_TYPES and not ((kind is str or kind is bytes) and len(item) >= LONG):
                    tokens.append(Value)
                    values.append(item)
                    continue
                if id(item) in inside:
                    raise StateTypeError("the state contains itself", remedy=REMEDY)
                if len(stack) > MAX_DEPTH or len(tokens) > MAX_TOKENS:
                    raise StateTypeError(
                        f"nested more than {MAX_DEPTH} deep, or more than {MAX_TOKENS} entries", remedy=REMEDY
                    )
                stack.append(self._open(item, kind))
                # Held, so that no other object gets its id while we are inside it.
                entered.append(item)
                inside.add(id(item))
                break
            else:
                stack.pop()
                inside.discard(id(entered.pop()))

    def _open(self, item: Any, kind: type) -> Iterator[Any]:
        if kind in KEYED:
            self.tokens += (kind, len(item))
            self.keys.extend(item)
            return iter(item.values())
        if kind is list or kind is tuple or kind is set or kind is frozenset:
            # A list that another thread makes longer would have more items than we counted.
            items = tuple(item)
            self.tokens += (kind, len(items))
            return iter(items)
        leaf = chosen_leaf(item) or leaf_of(kind)
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

    def _flat(self, like: Form | None) -> Flat:
        return (None if like is None else self._matching(like)) or self._anew()

    def _matching(self, like: Form) -> Flat | None:
        """The state in the form that it had before, if it still has it."""
        if (like.tokens, like.keys, like.key_kinds) != (self.tokens, self.keys, key_kinds(self.keys)):
            return None
        leaves, nodes = self.leaves, like.nodes
        addresses = list(map(Tensor.data_ptr, leaves))
        once = leaves if len(nodes) == len(leaves) else [leaves[node] for node in nodes]
        if not like.likeness.holds(once) and not self._facts_equal(like):
            return None
        # Ties are compared below, but whether two tied tensors require gradients is each one's own.
        if once is not leaves and list(map(_grad, leaves)) != like.grads:
            return None
        if like.addresses == addresses:
            # The same memory is on the same device; whether it is still seen in the same way has to be asked.
            if all(identity_of(leaves[node]) == identity for node, identity in like.crowds.items()):
                return self._of(like, addresses, like.devices)
            return None
        self._check_memory(addresses, like.addresses)
        devices = list(map(_device, leaves))
        refs, _ = ties(len(leaves), crowds_of(leaves, addresses))
        return self._of(like, addresses, devices) if refs == like.refs and set(devices) == set(like.devices) else None

    def _facts_equal(self, like: Form) -> bool:
        leaves = self.leaves
        dtypes, contiguous = list(map(_dtype, leaves)), list(map(Tensor.is_contiguous, leaves))
        return (
            (like.dtypes, like.contiguous) == (dtypes, contiguous)
            and all(tensor.layout is torch.strided for tensor in leaves)
            and like.shapes == list(map(_shape, leaves))
            and like.grads == list(map(_grad, leaves))
            and like.flipped == flips_of(leaves, dtypes)
            and like.strides == strides_of(leaves, contiguous)
        )

    def _anew(self) -> Flat:
        leaves = self.leaves
        addresses = list(map(Tensor.data_ptr, leaves))
        devices, dtypes = list(map(_device, leaves)), list(map(_dtype, leaves))
        if not DTYPE_NAMES.keys() >= set(dtypes) or any(device.type == "meta" for device in set(devices)):
            raise self._culprit()
        self._check_memory(addresses, [])
        self._check_keys()
        crowds = crowds_of(leaves, addresses)
        refs, nodes = ties(len(leaves), crowds)
        contiguous = list(map(Tensor.is_contiguous, leaves))
        form = Form(
            tokens=self.tokens,
            keys=self.keys,
            key_kinds=key_kinds(self.keys),
            shapes=list(map(_shape, leaves)),
            dtypes=dtypes,
            grads=list(map(_grad, leaves)),
            contiguous=contiguous,
            strides=strides_of(leaves, contiguous),
            flipped=flips_of(leaves, dtypes),
            addresses=addresses,
            devices=devices,
            refs=refs,
            nodes=nodes,
            crowds=crowds,
            likeness=Likeness([leaves[node] for node in nodes]),
        )
        return self._of(form, addresses, devices)

    def _of(self, form: Form, addresses: list[int], devices: list[torch.device]) -> Flat:
        skeleton = Skeleton(form.tokens, form.keys, self.values, form.refs, form.grads)
        tensors = self.leaves
        if len(form.nodes) != len(tensors):
            tensors = [tensors[node] for node in form.nodes]
            addresses, devices = [addresses[node] for node in form.nodes], [devices[node] for node in form.nodes]
        return Flat(skeleton, tensors, addresses, devices, form)

    def _check_memory(self, addresses: list[int], known: list[int]) -> None:
        """Refuse tensors whose storage was taken away, as sharded training does between uses; memory known is good."""
        for place, (tensor, address) in enumerate(zip(self.leaves, addresses, strict=True)):
            if place < len(known) and known[place] == address:
                continue
            reach = tensor.numel()
            if reach and not tensor.is_contiguous():
                reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            if reach and (tensor.storage_offset() + reach) * tensor.itemsize > tensor.untyped_storage().nbytes():
                name = tensor_names(self.tokens, self.keys)[place]
                raise StateTypeError(
                    f"{in_state(name)}: the tensor's storage does not hold its elements",
                    remedy="save while the parameters are gathered, or save the sharded ones",
                )

    def _check_keys(self) -> None:
        for key in self.keys:
            try:
                encode_plain(key)
            except StateTypeError as error:
                ending = f"[{shown_key(key)}]"
                place = next(path for path, _ in walk(self.tokens, self.keys) if path.endswith(ending))
                raise StateTypeError(f"{in_state(place)}: the key: {error.message}", remedy="use plain keys") from None

    def _culprit(self, cause: RuntimeError | None = None) -> StateTypeError:
        if isinstance(cause, RecursionError):
            self._check_keys()
        for name, tensor in zip(tensor_names(self.tokens, self.keys), self.leaves, strict=True):
            try:
                if tensor.device.type == "meta":
                    return StateTypeError(f"{in_state(name)}: a meta tensor has no data", remedy="leave it out")
                if tensor.is_nested:
                    return StateTypeError(f"{in_state(name)}: a nested tensor", remedy="store its components in a list")
                if tensor.dtype not in DTYPE_NAMES:
                    return StateTypeError(
                        f"{in_state(name)}: a tensor of dtype {tensor.dtype}",
                        remedy="store it in a dtype of whole bytes; a quantized one as its int_repr and scales",
                    )
                _ = (tensor.data_ptr(), tensor.shape, tensor.stride())
            except RuntimeError as error:
                return StateTypeError(f"{in_state(name)}: {error}", remedy="store a tensor that has its own memory")
        return StateTypeError(f"the state can't be read: {cause}")


def _encoded(leaf: Leaf, item: Any) -> Any:
    try:
        return leaf.encode(item)
    except StateTypeError:
        raise
    except Exception as error:
        remedy = REMEDY if isinstance(error, RecursionError) else None
        raise StateTypeError(f"leaf {leaf.name!r} can't encode its object: {in_words(error)}", remedy=remedy) from error
