"""One ``fit`` of one Trainer: its memory store, its cadence, what it resumed from, and how it ended."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mlflashpoint.adapter.lightning import fits, last_step, logged, loops, rng, tuners
from mlflashpoint.adapter.lightning.cadence import Cadence
from mlflashpoint.adapter.lightning.durable import durable_save_due
from mlflashpoint.adapter.lightning.found import FromMemory
from mlflashpoint.adapter.lightning.kinds import StateKind
from mlflashpoint.adapter.lightning.left import LeftSteps
from mlflashpoint.adapter.lightning.need import Need
from mlflashpoint.adapter.lightning.places import lies_in, misplaced
from mlflashpoint.adapter.lightning.search import Search
from mlflashpoint.adapter.lightning.side_files import SideFiles
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.errors import FlashpointError, StoreInUseError

if TYPE_CHECKING:
    from mlflashpoint.core.runtime import Runtime, SaveResult

_log = logging.getLogger(__name__)


class FitSession:
    """See the module.

    Args:
        kind: how the strategy's state is captured and put back.
        cadence: when to save; None until somebody says.
        open_store: makes this rank's Runtime; called once, when the job's process group is up.
        base: the job's base container.
        group: name of this fit's versions in it, see ``fits.next_group``.
        skip_durable: leave the steps that the recipe saves durably to the recipe.
        keep_on_success: keep the versions when the fit ends well.
        strict: raise what would otherwise be logged (tests only).
        of_agent: the agent made it, for one fit; otherwise the recipe did, for all that the Trainer makes.
    """

    def __init__(
        self,
        kind: StateKind,
        cadence: Cadence | None,
        open_store: Callable[[], Runtime],
        *,
        base: CheckpointContainerId,
        group: str,
        skip_durable: bool = True,
        keep_on_success: bool = False,
        strict: bool = False,
        of_agent: bool = False,
    ) -> None:
        self.kind = kind
        self.cadence = cadence
        self.base = base
        self.group = group
        self.skip_durable = skip_durable
        self.keep_on_success = keep_on_success
        self.strict = strict
        self.of_agent = of_agent
        self._open_store = open_store
        self._runtime: Runtime | None = None
        self._durable_step = -1
        self._need = Need()
        #: what ``find`` found, kept until training goes on
        self.found: FromMemory | None = None
        #: whether what this fit goes on from has been chosen; what the recipe restores later is its own affair
        self.decided = False
        #: files that are kept beside the versions, if any
        self.side_files: SideFiles | None = None
        self._resumed: FromMemory | None = None
        self._in_resumed_epoch = False
        self._at_last_step = False
        self._can_end = self._ended = False
        self._skipped_for: int | None = None
        self._left = LeftSteps()
        self._told: set[str] = set()
        self.closed = False

    @property
    def runtime(self) -> Runtime:
        """The store of this rank, opened at first use; raises what opening it raises."""
        if self._runtime is None:
            self._runtime = self._open_store()
        return self._runtime

    def path_of(self, step: int) -> str:
        return str(CheckpointContainerId.create_child(self.base, CheckpointContainerId.format_version_container(step)))

    # -- resuming ------------------------------------------------------------------------------------------------

    def find(self, trainer: Any, durable_step: int | None, durable: object = None) -> FromMemory | None:
        """The newest version that fits, checked by every rank; None if there is none or the durable one is newer.

        Collective; all ranks give the same answer. The log tells which was taken, and why.

        Args:
            trainer: the Trainer that is about to fit.
            durable_step: step of the checkpoint that the recipe asks for, None if it asks for none.
            durable: the path of it, for the log.
        """
        try:
            runtime = self.runtime
        except StoreInUseError as taken:
            # Another Trainer of this process has it, on every rank.
            self.abandon(taken)
            return None
        search = Search(runtime, self.kind, self.path_of, strict=self.strict, told=self._told)
        self.found = search.newest(trainer, durable_step, durable)
        self._need.found(search.seen, durable_step)
        return self.found

    @contextlib.contextmanager
    def serving(self, trainer: Any, found: FromMemory) -> Iterator[None]:
        """While it is open, the trainer's strategy loads ``found`` whatever path it is given."""
        with self.kind.serving(trainer, found.state, found.attributes):
            yield
        self.used(trainer, found)

    def used(self, trainer: Any, found: FromMemory) -> None:
        """The Trainer has loaded ``found``."""
        self._resumed = found
        tuners.leave_out(trainer, found.tuned)
        last_step.watch(trainer, lambda: self._is_last_step(trainer), self._ran)

    def reopen(self, trainer: Any) -> None:
        """The Trainer of a recipe's own session fits, perhaps not for the first time."""
        self.closed = self.decided = False
        try:
            fits.enter(trainer, self)
        except StoreInUseError as taken:
            self.abandon(taken)

    def check_places(self, trainer: Any) -> None:
        """See whether a ModelCheckpoint saves into the container. The agent's fits go on, with an error in the log.

        Raises:
            SettingError: it does, and the recipe itself has asked for the session.
        """
        error = misplaced(trainer, self.base)
        if error is None or str(error) in self._told:
            return
        if not self.of_agent:
            raise error
        self._told.add(str(error))
        _log.error("%s. It counts for no durable save", error)

    def _ran(self) -> None:
        """The fit loop has come to its end; if it trained nothing, it may have been left the end of an epoch to do."""
        if self._at_last_step or self._ended:
            self._need.finished()

    def _is_last_step(self, trainer: Any) -> bool:
        """Whether this fit goes on from the last step of its training, and is to end it; one answer for all ranks."""
        resumed = self._resumed
        if self.closed or resumed is None or not last_step.is_reached(trainer):
            return False
        # Where a durable checkpoint has the step too, its end may have begun.
        can = self._need.held is not None and last_step.can_be_ended(trainer, resumed)
        self._at_last_step = self.runtime.agree("lightning/last-step", can)
        if self._at_last_step:
            _log.info("step %d is the last of the training: what comes behind it is done now", resumed.step)
        return self._at_last_step

    # -- saving --------------------------------------------------------------------------------------------------

    def started(self, trainer: Any) -> None:
        """The first batch is next: what earlier starts saved above the step that training goes on from is given up."""
        self._need.began(trainer.global_step)
        self._left = LeftSteps()
        if self.cadence is not None:
            self.cadence.start(trainer.global_step)
        if not self.closed:
            self.runtime.resumed(trainer.global_step)
        self._in_resumed_epoch = self._resumed is not None
        resumed, self._resumed, self.found = self._resumed, None, None
        self._ended = False
        self._can_end = False
        tuners.allow(trainer)
        if resumed is not None:
            self._can_end = loops.makes_up(trainer.fit_loop.epoch_loop) and last_step.can_be_ended(trainer, resumed)
            if resumed.logged is not None:
                logged.restore(trainer, resumed.logged)
            whole = resumed.logged is not None and resumed.logged["whole"]
            loops.go_on(trainer, whole=whole, last=self._at_last_step)
            # Last: a loader may have drawn from the generators.
            if resumed.rng is not None:
                rng.restore(resumed.rng)
        if self.side_files is not None and not self.closed and self.runtime.problem is None:
            self.side_files.begin(None if resumed is None else resumed.step)

    def saved_durably(self, trainer: Any, *, weights_only: bool, path: object = None) -> None:
        """The recipe has saved the present step its own way, to ``path``.

        Weights alone are nothing to resume from, and what lies in the container is lost with it.
        """
        if weights_only or lies_in(path, self.base):
            return
        self._durable_step = step = trainer.global_step
        self._need.saved(step)
        if self._skipped_for == step:
            self._skipped_for = None

    def wrote(self, trainer: Any, checkpoint: Mapping[str, Any]) -> None:
        """The same, told by what was written: under Lightning's name of the optimizers' states, or under NeMo's."""
        complete = checkpoint.get("optimizer_states") or checkpoint.get("optimizer")
        self.saved_durably(trainer, weights_only=not complete)

    def epoch_ended(self, trainer: Any) -> None:
        """An epoch is trained; its schedulers have not been stepped yet."""
        if self._in_resumed_epoch:
            self._in_resumed_epoch = False
            self._ended = self._can_end
            loops.end_epoch(trainer)

    def batch_ended(self, trainer: Any) -> None:
        """Save if the cadence says so; ModelCheckpoint has had its turn at this batch."""
        step = trainer.global_step
        self._need.trained(step)
        if self.closed or self.cadence is None or not self.cadence.due(step) or trainer.fast_dev_run:
            return
        if self._skipped_for is not None:
            _log.warning("step %s was left to a durable save that did not come", self._skipped_for)
            self.skip_durable = False
            self._left.in_memory()
        self._skipped_for = None
        saved = step == self._durable_step
        if self.skip_durable and (saved or _durable_save_due(trainer, self.base)):
            self._skipped_for = None if saved else step
            _log.debug("step %d is saved durably, no memory save", step)
            self._left.left(trainer, step)
            return
        self.save(trainer, step)

    def save(self, trainer: Any, step: int) -> SaveResult | None:
        """Save this rank's state as ``step`` now; None if it could not even be captured. Raises nothing unless strict.

        A rank without a shard makes that version incomplete, and tells the others so; nobody waits for it.
        """
        if self.closed:
            return None
        try:
            state, attributes = self.kind.capture(trainer)
        except Exception as error:
            # A strategy or an optimizer that is refused is refused at every step: once is enough for the log.
            level = logging.DEBUG if str(error) in self._told else logging.ERROR
            self._told.add(str(error))
            _log.log(level, "step %d is not saved to memory: %s: %s", step, type(error).__name__, error)
            _log.debug("capturing step %d failed", step, exc_info=error)
            if self._runtime is not None:
                self._runtime.save_failed(step, error)
            if self.strict:
                raise
            return None
        return self.store(trainer, step, state, attributes)

    def store(self, trainer: Any, step: int, state: Mapping[str, Any], attributes: Mapping[str, Any]) -> SaveResult:
        """Stage ``state`` as this rank's shard of ``step``."""
        result = self.runtime.save(
            {
                "state": state,
                "rng": rng.capture(),
                "logged": logged.capture(trainer),
                "tuned": tuners.found(trainer),
                "hook": trainer.lightning_module._current_fx_name,
            },
            step=step,
            topology=self.kind.topology(trainer),
            attributes=attributes,
        )
        if result.ok:
            self._left.in_memory()
            if self.side_files is not None:
                self.side_files.add(step)
        return result

    # -- the end -------------------------------------------------------------------------------------------------

    def abandon(self, error: FlashpointError) -> None:
        """Let this fit go on without memory checkpoints."""
        _log.error("no memory checkpoints for this fit: %s", error)
        if self.strict:
            raise error
        self.closed = True
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.close()

    def finish(self, *, success: bool) -> None:
        """The fit is over: if it ended well on all ranks the versions go, unless they are to be kept, or needed."""
        # A session of the recipe's own lives as long as its Trainer.
        self.found = self._resumed = None
        self._at_last_step = self._ended = False
        need, self._need = self._need, Need()
        if self.closed:
            return
        self.closed = True
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return
        try:
            left = success and not self.keep_on_success and need.is_left()
            if left and runtime.rank == 0:
                _log.warning(
                    "the memory versions are kept: this fit has trained no step, and no durable checkpoint has the "
                    "state of step %d that they hold. Let it train on, or save the Trainer's state behind fit and free "
                    "the memory with `mlflashpoint clean`",
                    need.held,
                )
            if runtime.agree("lightning/ended-well", success and not left) and not self.keep_on_success:
                # The rank that hosts the job's store must not leave before the others have heard of the above.
                runtime.agree("lightning/heard", True)
                runtime.discard()
                if self.side_files is not None:
                    self.side_files.remove()
        except Exception as error:
            _log.error("the memory versions could not be removed: %s: %s", type(error).__name__, error)
        finally:
            runtime.close()


def _durable_save_due(trainer: Any, base: str) -> bool:
    try:
        return durable_save_due(trainer, base)
    except Exception as error:  # a release, or a callback, that keeps its plans another way
        _log.debug("whether this step is saved durably can't be foreseen: %s", error)
        return False
