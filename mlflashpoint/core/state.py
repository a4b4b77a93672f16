"""A nested state, taken apart into skeleton and tensors and put together again; and what such a state may hold.

Dictionaries (any plain keys, in their order), lists, tuples, named tuples, sets, plain values, tensors of any dtype of
whole bytes and any layout, and what is on the allow-list.

- Tied tensors (one memory, one shape, one stride) are stored once, and are one again after loading.
- A tensor comes back dense: with its stride if it was dense, contiguous if not. ``Parameter`` and ``requires_grad`` are
  kept; ``grad``, hooks and other attributes of the Python object are not, nor is the graph that made it.
- A named tuple comes back as one of equal name and fields, of a new class, unless its class is registered.
- Meta, quantized and nested tensors, and subclasses of ``Tensor``, are refused unless registered.
"""

from __future__ import annotations

from mlflashpoint.core.flatten import Flat, flatten
from mlflashpoint.core.leaves import register_leaf
from mlflashpoint.core.unflatten import unflatten

__all__ = ["Flat", "flatten", "register_leaf", "unflatten"]
