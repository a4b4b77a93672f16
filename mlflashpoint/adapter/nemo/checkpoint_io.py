"""CheckpointIO that sends each path where it belongs: those of the base container to memory, all others on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlflashpoint.adapter.nemo import local_state
from mlflashpoint.adapter.nemo.bases import CheckpointIO
from mlflashpoint.adapter.nemo.megatron_kind import CONTENT_METADATA
from mlflashpoint.adapter.nemo.routing import Routing
from mlflashpoint.errors import CheckpointIdError, NoVersionError

if TYPE_CHECKING:
    from mlflashpoint.adapter.lightning.found import FromMemory
    from mlflashpoint.adapter.lightning.session import FitSession


class MLFlashpointCheckpointIO(CheckpointIO):  # type: ignore[misc, valid-type]
    """Stands before the CheckpointIO of NeMo's MegatronStrategy, which calls it on every rank.

    Args:
        fallback: the CheckpointIO for all other paths; whatever attribute this one lacks is taken from it.
        routing: which paths name memory versions.
        session: the fit that saves and resumes.
        trainer: its Trainer.
    """

    def __init__(self, fallback: Any, routing: Routing, session: FitSession, trainer: Any) -> None:
        super().__init__()
        self.fallback = fallback
        self.routing = routing
        self.session = session
        self.trainer = trainer

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> Any:
        """Save to memory or pass on; what the fallback returns is returned (an AsyncRequest of an async NeMo save).

        Raises:
            CheckpointIdError: the path lies in the container and names no version.
            StateTypeError: the checkpoint contains itself or nests too deep.
        """
        if not self.routing.is_memory(path):
            result = self.fallback.save_checkpoint(checkpoint, path, storage_options)
            self.session.wrote(self.trainer, checkpoint)
            return result
        step = version_of(self.routing, path)
        options = storage_options or {}
        attributes = {CONTENT_METADATA: options.get(CONTENT_METADATA)}
        try:
            state = local_state.split(checkpoint)
        except Exception as error:
            # The other ranks would wait for this one's part.
            self.session.runtime.save_failed(step, error)
            raise
        self.session.store(self.trainer, step, state, attributes)
        finalize: Callable[[], None] | None = options.get("finalize_fn")
        if finalize is not None:
            # Staging is what the caller has to wait for; the commit is on the store's own queue.
            finalize()
        return None

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load this rank's part of a memory version into ``sharded_state_dict``, or pass on.

        Raises:
            NoVersionError: it is not the version that the ranks found.
            StateMismatchError: the model differs; names the first shards that do.
        """
        if not self.routing.is_memory(path):
            return self.fallback.load_checkpoint(path, *args, **kwargs)  # type: ignore[no-any-return]
        found = found_version(self.session, self.trainer, self.routing, path)
        template = kwargs["sharded_state_dict"] if "sharded_state_dict" in kwargs else args[0]
        loaded = local_state.join(found.state, template)
        self.session.used(self.trainer, found)
        return loaded

    def load_content_metadata(self, path: Any = None, preloaded_state_dict: Any = None) -> Any:
        """What the strategy told about the layout of the version when it saved it."""
        if path is None or not self.routing.is_memory(path):
            return self.fallback.load_content_metadata(path, preloaded_state_dict)
        return found_version(self.session, self.trainer, self.routing, path).attributes[CONTENT_METADATA]

    def remove_checkpoint(self, path: Any) -> None:
        """Pass on; the store alone decides when a memory version goes."""
        if not self.routing.is_memory(path):
            self.fallback.remove_checkpoint(path)

    def teardown(self) -> None:
        self.fallback.teardown()

    def __getattr__(self, name: str) -> Any:
        if name == "fallback":
            raise AttributeError(name)
        return getattr(self.fallback, name)


def found_version(session: FitSession, trainer: Any, routing: Routing, path: Any) -> FromMemory:
    """The version that ``path`` names, if it is what the ranks go on from; collective the first time.

    Raises:
        NoVersionError: it is not.
    """
    step = version_of(routing, path)
    found = session.found or session.find(trainer, None)
    if found is None or found.step != step:
        newest = "none" if found is None else f"step {found.step}"
        raise NoVersionError(
            f"the newest version of this Trainer (group {session.group!r}) that every rank can load is {newest}",
            step=step,
            path=path,
            remedy="let AutoResume choose the path, or name that step; each Trainer of a process has its own versions",
        )
    return found


def version_of(routing: Routing, path: Any) -> int:
    """The step that a path of the container names; raises CheckpointIdError if it names none."""
    step = routing.step_of(path)
    if step is None:
        raise CheckpointIdError("the path lies in the base container and names no version in it", path=path)
    return step


try:
    from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizableCheckpointIO as _AsyncFinalizable
except ImportError:
    _AsyncFinalizable = None

if _AsyncFinalizable is not None:

    class MLFlashpointAsyncFinalizableCheckpointIO(_AsyncFinalizable):  # type: ignore[misc, valid-type]
        """NeMo's async CheckpointIO around a MLFlashpointCheckpointIO: memory saves never enter its queue.

        Args:
            checkpoint_io: a MLFlashpointCheckpointIO whose fallback can save asynchronously.
            async_calls_queue: the queue of the CheckpointIO that this replaces, with what it is still busy with.
        """

        def __init__(self, checkpoint_io: MLFlashpointCheckpointIO, async_calls_queue: Any = None) -> None:
            super().__init__(checkpoint_io)
            if async_calls_queue is not None:
                self.async_calls_queue = async_calls_queue

        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            if self.checkpoint_io.routing.is_memory(path):
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
            else:
                super().save_checkpoint(checkpoint, path, storage_options)


def before(present: Any, routing: Routing, session: FitSession, trainer: Any) -> Any:
    """What takes the place of ``present``, the strategy's CheckpointIO: the outermost one stays an async one if it is.

    Wrapping what is wrapped already replaces the inner part.
    """
    if _AsyncFinalizable is not None and isinstance(present, _AsyncFinalizable):
        inner = MLFlashpointCheckpointIO(_unwrapped(present.checkpoint_io), routing, session, trainer)
        return MLFlashpointAsyncFinalizableCheckpointIO(inner, present.async_calls_queue)
    return MLFlashpointCheckpointIO(_unwrapped(present), routing, session, trainer)


def _unwrapped(present: Any) -> Any:
    return present.fallback if isinstance(present, MLFlashpointCheckpointIO) else present
