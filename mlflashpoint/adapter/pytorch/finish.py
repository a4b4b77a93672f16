"""How a save of a DCP checkpoint becomes final on all ranks.

DCP tells the coordinator alone, after all ranks have written, that the checkpoint is whole, and only there is its
metadata known. Each rank's shard is committed when that word has reached it through the job's store, with the metadata
in it. So a version is complete exactly if DCP finished it, and any one shard describes all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlflashpoint.adapter.pytorch.shards import pack
from mlflashpoint.core.channel import Channel, poll
from mlflashpoint.core.deadline import Deadline
from mlflashpoint.core.rotation import slots_needed
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.core.shard import digest_of
from mlflashpoint.errors import DeadlineExceededError, FlashpointError, PeerError

#: characters of a record in the job's store
_PIECE = 512 << 10
#: versions whose saves are counted; a rollback goes back over fewer saves
_ATTEMPTS = 1 << 14
#: saves whose outcome stays there; the slowest rank is never that far behind
_OUTCOMES = 32


class Bulletin:
    """Metadata of checkpoints in the job's store, by digest: saves of one structure send it once.

    Args:
        connect: gives the talk that the DCP saves of this start alone use; None for a job of one rank. Called in the
            background, where waiting for the other ranks holds nobody up.
        under_way: saves that a rank may have staged and not settled: its slots. The metadata of so many stays.
    """

    def __init__(self, connect: Callable[[], Channel] | None, *, under_way: int = 2) -> None:
        self._connect = connect
        self._kept = under_way
        self._channel: Channel | None = None
        #: both by digest, the last used one last
        self._known: dict[str, str] = {}
        self._posted: dict[str, int] = {}
        self._outcomes: list[str] = []

    @property
    def channel(self) -> Channel | None:
        """Raises PeerError, DeadlineExceededError."""
        if self._channel is None and self._connect is not None:
            self._channel = self._connect()
        return self._channel

    def post(self, metadata: bytes) -> tuple[str, str]:
        """Make it readable for all; returns its digest and its packed text."""
        digest = digest_of(metadata)
        text = self._known.get(digest)
        if text is None:
            text = pack(metadata)
        self._remember(digest, text)
        channel = self.channel
        if channel is not None:
            count = self._posted.pop(digest, None)
            if count is None:
                pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
                for number, piece in enumerate(pieces):
                    channel.post(f"metadata/{digest}/{number}", piece)
                channel.post(f"metadata/{digest}", len(pieces))
                count = len(pieces)
            self._posted[digest] = count
            while len(self._posted) > self._kept:
                old = next(iter(self._posted))
                count = self._posted.pop(old)
                channel.delete(f"metadata/{old}", *(f"metadata/{old}/{n}" for n in range(count)))
        return digest, text

    def read(self, digest: str) -> str:
        """The packed text of that digest; raises PeerError if it is not there."""
        text = self._known.get(digest)
        if text is None:
            channel = self.channel
            assert channel is not None
            count = channel.read(f"metadata/{digest}")
            if not isinstance(count, int):
                raise PeerError("the checkpoint's metadata is not in the job's store")
            text = "".join(map(str, channel.read_many([f"metadata/{digest}/{n}" for n in range(count)])))
        self._remember(digest, text)
        return text

    def decide(self, key: str, final: bool, text: str) -> tuple[bool, str]:
        """Settle a save for all ranks; the first to speak wins."""
        channel = self.channel
        assert channel is not None
        self._outcomes.append(key)
        while len(self._outcomes) > _OUTCOMES:
            channel.delete(self._outcomes.pop(0))
        settled = channel.decide(key, [final, text])
        return bool(settled[0]), str(settled[1])

    def _remember(self, digest: str, text: str) -> None:
        self._known.pop(digest, None)
        self._known[digest] = text
        while len(self._known) > self._kept:
            del self._known[next(iter(self._known))]


class Bulletins:
    """Those of the stores that one writer saves to."""

    def __init__(self) -> None:
        self._found: dict[int, Bulletin] = {}

    def of(self, runtime: Runtime) -> Bulletin:
        found = self._found.get(id(runtime))
        if found is None:
            connect = (lambda: runtime.channel("dcp").under("dcp")) if runtime.world_size > 1 else None
            found = self._found[id(runtime)] = Bulletin(connect, under_way=slots_needed(runtime.config.keep_versions))
        return found


_begun: dict[str, int] = {}


def attempts_before(version: str) -> int:
    """How many saves of ``version`` this process has begun to write before the one that it begins to write now.

    Every rank writes the same saves, so all of them count alike. A checkpoint process has a new writer for each save,
    and a step that has failed may be saved again after a rollback: what was said of it must not hold for it then.
    """
    count = _begun.pop(version, 0)
    _begun[version] = count + 1
    while len(_begun) > _ATTEMPTS:
        del _begun[next(iter(_begun))]
    return count


@dataclass
class Save:
    """One save of one rank, from its begin to the coordinator's word.

    Attributes:
        step: training step.
        attempt: number of saves of that step before it, known once it is written.
        outcome: True once it is final, False once it is known not to be, None meanwhile.
        planning: whether the ranks have no plan yet, so that none of them has begun to write.
    """

    step: int
    attempt: int = 0
    outcome: bool | None = None
    planning: bool = False
    _metadata: bytes | None = None
    _shared: bool = False
    _failure: FlashpointError | None = None

    @property
    def key(self) -> str:
        return f"save/{self.step}-{self.attempt}"

    @property
    def is_open(self) -> bool:
        """Whether nobody has finished it, as DCP does on the coordinator, or given it up."""
        return self._metadata is None and self.outcome is None

    @property
    def alone(self) -> bool:
        """Whether this rank finished it for itself, without the others."""
        return self._metadata is not None and not self._shared

    def finish(self, metadata: bytes, *, shared: bool) -> None:
        """All ranks have written, DCP says; ``shared`` if the other ranks wait for this one to pass it on."""
        self._shared = shared
        self._metadata = metadata

    def abandon(self, failure: FlashpointError) -> None:
        """It will not be finished, as far as this rank can tell."""
        if self.outcome is None and self._metadata is None:
            self.outcome = False
            self._failure = failure

    def settle(self, bulletin: Bulletin, *, world_size: int, deadline_s: float) -> str:
        """Wait for the outcome; in the background, on every rank.

        Args:
            bulletin: where the metadata is.
            world_size: ranks of the group.
            deadline_s: longest wait in seconds.

        Returns:
            the packed metadata.

        Raises:
            PeerError: some rank could not write, or DCP did not finish the save.
            DeadlineExceededError: the coordinator did not finish it in time.
        """
        try:
            text = self._settle(bulletin, world_size, Deadline(deadline_s))
        except BaseException:
            self.outcome = False
            raise
        self.outcome = True
        return text

    def _settle(self, bulletin: Bulletin, world_size: int, deadline: Deadline) -> str:
        channel = bulletin.channel

        def look() -> tuple[bool, str] | None:
            if self._failure is not None:
                raise self._failure
            if self._metadata is not None:
                digest, _ = bulletin.post(self._metadata)
                return bulletin.decide(self.key, True, digest) if self._shared else (True, digest)
            raw = None if channel is None else channel.read(self.key)
            return None if raw is None else (bool(raw[0]), str(raw[1]))

        found = poll(look, deadline, world_size=world_size)
        if found is None:
            raise DeadlineExceededError(
                f"the coordinator did not finish the save within {deadline.seconds:g} s",
                step=self.step,
                setting="MLFLASHPOINT_DEADLINE_S",
                remedy="look whether dcp.save returned on rank 0",
            )
        final, text = found
        if not final:
            raise PeerError(f"another rank could not write: {text}", step=self.step)
        return bulletin.read(text)


def await_complete(runtime: Runtime, save: Save) -> None:
    """Wait until all ranks have committed it; raises PeerError if one could not."""
    if runtime.await_version(save.step) is False:
        raise PeerError(
            "the version is not complete: a rank could not commit it",
            step=save.step,
            remedy="look for the reason in the ranks' logs",
        )
