"""When a fit saves to memory: every N optimizer steps."""

from __future__ import annotations

from mlflashpoint.errors import SettingError


class Cadence:
    """Says at which optimizer steps a memory save is due.

    A step is due once, at the end of the batch that reaches it: batches that only accumulate gradients leave the step
    as it is, and several optimizers may advance it by more than one at a time.

    Args:
        every_n_steps: optimizer steps between two saves.
        skip_every_n_steps: multiples of this are left to the recipe's own checkpoints.

    Raises:
        SettingError: if either is below 1.
    """

    def __init__(self, every_n_steps: int, skip_every_n_steps: int | None = None) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("skip_every_n_steps", skip_every_n_steps)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SettingError(f"{name} is {value!r}", remedy="use a whole number from 1")
        self.every_n_steps = every_n_steps
        self.skip_every_n_steps = skip_every_n_steps
        self.start(0)

    def start(self, step: int) -> None:
        """Training goes on from ``step``, which is not due again."""
        self._first = step - step % self.every_n_steps
        self._next = self._first + self.every_n_steps

    def due(self, step: int) -> bool:
        """Whether the memory save is due now that ``step`` optimizer steps are done."""
        if self._first <= step < self._next:
            return False
        self.start(step)
        return not (self.skip_every_n_steps and step % self.skip_every_n_steps == 0)
