"""Which slot the next save may overwrite: a pure decision, so that it can be proven.

The rule: at every moment the newest complete version lies whole in memory. A rank therefore overwrites a slot only if
it is empty, or its version failed for good, or a *newer* version is known complete on all ranks. What it does not
know, it does not overwrite. Two slots suffice for that: one that is protected, one to write. How many saves may be
under way before one has to wait is the number of slots less one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Version(NamedTuple):
    """Names a version within one group; a higher one is newer."""

    incarnation: int
    step: int


@dataclass(frozen=True)
class Tenant:
    """What a slot holds.

    Attributes:
        version: whose shard it holds, None if nothing that anyone could recover.
        busy: being written, committed or replicated at this moment.
        failed: its version has been declared failed, or abandoned, which is final.
    """

    version: Version | None = None
    busy: bool = False
    failed: bool = False


def slots_needed(keep_versions: int) -> int:
    """How many slots a rank needs to keep that many complete versions between saves: as many, and 2 at least."""
    return max(2, keep_versions)


def may_overwrite(tenant: Tenant, newest_complete: Version | None) -> bool:
    """Whether the rule above lets a save overwrite the slot of ``tenant``."""
    if tenant.busy:
        return False
    if tenant.version is None or tenant.failed:
        return True
    return newest_complete is not None and tenant.version < newest_complete


def choose_slot(tenants: Sequence[Tenant], newest_complete: Version | None) -> int | None:
    """Index of the slot that the next save overwrites, None if none may be: empty first, then failed, then oldest."""
    allowed = [index for index, tenant in enumerate(tenants) if may_overwrite(tenant, newest_complete)]

    def cost(index: int) -> tuple[int, Version]:
        tenant = tenants[index]
        if tenant.version is None:
            return 0, Version(0, 0)
        return (1 if tenant.failed else 2), tenant.version

    return min(allowed, key=cost, default=None)
