"""Megatron Bridge: which of its functions are patched."""

from __future__ import annotations

from mlflashpoint.agent.patch import Patch

PATCHES: tuple[Patch, ...] = ()
