"""Megatron-LM's own loop, megatron.training.pretrain, on two ranks: killed with SIGKILL and resumed.

Under torchrun where how it is started is what is tested; else forked from a process that has imported Megatron-LM,
under the agent or not: importing is most of a start.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.adapter.megatron_bridge.fleet import ENV, OVERLAYS, RANKS, START_S, environment, missing, torchrun
from tests.warm import Zygote

TRAIN = Path(__file__).parent / "train.py"
#: in the environment of every start
ALWAYS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
#: the overlay that has megatron-core 0.19.2; its Megatron Bridge is not used here
OVERLAY = "0.6.2"

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(missing() is not None and not os.environ.get("REQUIRE_FRAMEWORKS"), reason=str(missing())),
]

RECIPE = shlex.split("""
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 6 --seed 4321
--lr 1e-3 --min-lr 1e-4 --lr-decay-iters 100 --lr-decay-style cosine --lr-warmup-iters 1 --weight-decay 0.01
--clip-grad 1.0 --hidden-dropout 0 --attention-dropout 0 --bf16 --use-distributed-optimizer
--tokenizer-type NullTokenizer --vocab-size 127 --mock-data --split 1,0,0 --num-workers 0
--eval-iters 0 --eval-interval 1000 --log-interval 1 --ckpt-format torch_dist
--transformer-impl local --attention-backend unfused --use-cpu-initialization --distributed-backend gloo
--disable-jit-fuser --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
--no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
""")


#: how a job is started: under torchrun, or forked from a warm process that has imported Megatron-LM
TORCHRUN, WARM = "torchrun", "warm"


class Job:
    """One job: its memory, its durable folder, and what its ranks have noted of each start."""

    def __init__(self, folder: Path, warm: Callable[[bool], Zygote]) -> None:
        self.folder = folder
        self.memory = Path("/dev/shm") / f"mlflashpoint-test-{uuid.uuid4().hex}"
        self.durable = folder / "durable"
        self.log = ""
        self._warm = warm

    def start(
        self,
        *arguments: object,
        stop_after: int = 0,
        agent: str | None = "1",
        every: int = 2,
        recipe: Sequence[str] = RECIPE,
        by: str = WARM,
        **variables: object,
    ) -> Start:
        """Run to the end, or until every rank kills itself after a step."""
        record = self.folder / f"record-{uuid.uuid4().hex}."
        settings = {
            **{"JOB_ID": "megatron-lm", "BASE_CONTAINER": self.memory, "REPLICAS": 0, "DEADLINE_S": 60},
            "SAVE_EVERY_N_STEPS": every,
        }
        added = {f"MLFLASHPOINT_{name}": str(value) for name, value in settings.items()}
        if agent is not None:
            added["MLFLASHPOINT_ENABLED"] = agent
        added |= {name: str(value) for name, value in variables.items()}
        added["RECORD"] = str(record)
        argv = [str(argument) for argument in (stop_after, *recipe, *arguments)]
        ended = self._torchrun(argv, added, agent) if by == TORCHRUN else self._fork(argv, added, agent)
        assert ended != bool(stop_after), self.log[-6000:]
        return Start([[json.loads(line) for line in open(f"{record}{rank}")] for rank in range(RANKS)])

    def _torchrun(self, argv: list[str], added: dict[str, str], agent: str | None) -> bool:
        command = [*torchrun(), str(TRAIN), *argv]
        if agent is not None:
            command[1:1] = ["-m", "mlflashpoint.run"]
        with open(self.folder / "log", "w+") as log:
            process = subprocess.Popen(
                command,
                env=environment(OVERLAY, {**added, **ALWAYS}, bootstrap=False),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                code = process.wait(START_S)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            log.seek(0)
            self.log = log.read()
        return code == 0

    def _fork(self, argv: list[str], added: dict[str, str], agent: str | None) -> bool:
        outcome = self._warm(agent == "1").run(
            argv, ranks=RANKS, environ=added, deadline_s=START_S, grace_s=START_S, script=TRAIN
        )
        self.log = outcome.log
        return not any(outcome.statuses)


class Start:
    """What the ranks have noted of one start."""

    def __init__(self, events: list[list[dict]]) -> None:
        self.events = events

    def of(self, rank: int, kind: str) -> list[dict]:
        return [event for event in self.events[rank] if event["event"] == kind]

    @property
    def began(self) -> set[int]:
        """Steps at which the ranks went on."""
        return {self.of(rank, "start")[0]["step"] for rank in range(RANKS)}

    def goes_on_like(self, straight: Start) -> None:
        """What was loaded, and each step from there on, is what the straight run had."""
        for rank in range(RANKS):
            known = {event["step"]: event for event in straight.of(rank, "step")}
            (start,) = self.of(rank, "start")
            assert self.of(rank, "loaded")[0]["rng"] == known[start["step"]]["rng"]
            for event in [start, *self.of(rank, "step")]:
                # The data loader's seed is drawn from torch's generator once more.
                assert _but_torch(event) == _but_torch(known[event["step"]])
            assert self.of(rank, "step")[-1]["step"] == 6


def _but_torch(event: dict) -> dict:
    return {**event, "event": "", "rng": {name: value for name, value in event["rng"].items() if name != "torch"}}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], Zygote]]:
    """The warm process with the agent, or the one without it, each started when it is first asked for."""
    made: dict[bool, Zygote] = {}

    def get(agent: bool) -> Zygote:
        if agent not in made:
            # A process with threads can't be forked safely, and pyarrow starts one.
            variables = {**ALWAYS, "JE_ARROW_MALLOC_CONF": "background_thread:false"}
            if agent:
                # The patches are made here, for which the agent asks what job it is.
                variables |= {"MLFLASHPOINT_ENABLED": "1", "MLFLASHPOINT_JOB_ID": "megatron-lm"}
            environ = environment(OVERLAY, variables, bootstrap=False)
            folder, recipe = tmp_path_factory.mktemp("warm"), TRAIN.with_name("imports.py")
            made[agent] = Zygote(ENV / "bin" / "python", recipe, environ, agent=agent, folder=folder)
        return made[agent]

    yield get
    for zygote in made.values():
        zygote.close()


@pytest.fixture
def job(tmp_path: Path, warm: Callable[[bool], Zygote]) -> Iterator[Job]:
    made = Job(tmp_path, warm)
    yield made
    shutil.rmtree(made.memory, ignore_errors=True)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, warm: Callable[[bool], Zygote]) -> Callable[..., Start]:
    """An unbroken run without us, by arguments."""
    made: dict[tuple[object, ...], Start] = {}

    def get(*arguments: object) -> Start:
        if arguments not in made:
            made[arguments] = Job(tmp_path_factory.mktemp("straight"), warm).start(*arguments, agent=None)
        return made[arguments]

    return get


def folders(job: Job, interval: int = 100) -> tuple[object, ...]:
    return "--save", job.durable, "--load", job.durable, "--save-interval", interval


def test_a_killed_job_resumes_from_memory_bit_for_bit(job: Job, straight: Callable[..., Start]) -> None:
    job.start(*folders(job), stop_after=4)
    assert not (job.durable / "latest_checkpointed_iteration.txt").exists()
    second = job.start(*folders(job), by=TORCHRUN)
    assert second.began == {4}
    second.goes_on_like(straight())
    assert '"kind": "non_persistent"' in job.log and "save-checkpoint-non-persistent" in job.log


def test_with_tensor_parallelism_and_the_recipes_own_cadence(job: Job, straight: Callable[..., Start]) -> None:
    parallel = ("--tensor-model-parallel-size", 2)
    own = (
        *("--non-persistent-ckpt-type", "local", "--non-persistent-save-interval", 3),
        *("--non-persistent-local-ckpt-dir", job.folder / "local", "--non-persistent-local-ckpt-algo", "atomic"),
    )
    job.start(*folders(job), *parallel, *own, stop_after=5, every=1)
    second = job.start(*folders(job), *parallel, *own, every=1)
    assert second.began == {3}
    second.goes_on_like(straight(*parallel))
    assert not (job.folder / "local").exists()


def test_a_job_that_saves_nowhere_resumes_too(job: Job, straight: Callable[..., Start]) -> None:
    job.start(stop_after=4)
    second = job.start()
    assert second.began == {4}
    second.goes_on_like(straight())


def test_what_sigterm_drains_serves_when_all_memory_is_lost(job: Job, straight: Callable[..., Start]) -> None:
    drain = {"MLFLASHPOINT_DRAIN_DIR": job.folder / "drain"}
    job.start(stop_after=4, DIE_BY="SIGTERM", **drain)
    shutil.rmtree(job.memory)
    second = job.start(**drain)
    assert second.began == {4}
    second.goes_on_like(straight())


def test_a_newer_durable_checkpoint_wins_and_serves_when_memory_is_lost(
    job: Job, straight: Callable[..., Start]
) -> None:
    job.start(*folders(job, 4), stop_after=5, every=3)
    again = job.start(*folders(job, 4), stop_after=5, every=100)
    assert again.began == {4}
    shutil.rmtree(job.memory)
    third = job.start(*folders(job, 4), every=100)
    assert third.began == {4}
    third.goes_on_like(straight())


def test_asynchronous_durable_saves_and_memory_saves_live_together(job: Job, straight: Callable[..., Start]) -> None:
    both = (*folders(job, 3), "--async-save", "--use-persistent-ckpt-worker")
    job.start(*both, stop_after=4)
    assert "refusing to serialize" not in job.log
    # The third step's is durable, and the second and the fourth are in memory.
    assert [f"scheduled an async checkpoint save at iteration {step:7d}" in job.log for step in (2, 3, 4)] == [True] * 3
    second = job.start(*both)
    assert second.began == {4}
    second.goes_on_like(straight())
    assert (job.durable / "latest_checkpointed_iteration.txt").read_text() == "6"


def test_a_layout_that_does_not_fit_is_named_and_not_used(job: Job) -> None:
    job.start(*folders(job), stop_after=4)
    second = job.start(*folders(job), "--tensor-model-parallel-size", 2)
    assert second.began == {0}
    assert "saved with tp=1 etp=1, the job now has tp=2 etp=2" in job.log


def test_durable_checkpoints_are_the_same_with_us_and_without(job: Job) -> None:
    found = []
    # The distributed optimizer's buckets are padded with what happens to lie in memory: no two runs save the same.
    recipe = [argument for argument in RECIPE if argument != "--use-distributed-optimizer"]
    for agent in (None, "0", "1"):
        start = job.start(*folders(job, 3), agent=agent, recipe=recipe, by=TORCHRUN if agent == "0" else WARM)
        steps = [[_but_torch(event) for event in start.of(rank, "step")] for rank in range(RANKS)]
        found.append((steps, _contents(job.durable)))
        shutil.rmtree(job.durable)
        assert job.memory.exists() == (agent == "1")
    assert found[0] == found[1]
    assert found[0] == found[2]


def _contents(folder: Path) -> dict[str, bytes]:
    # .metadata holds an id of its own for each save
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".metadata"]
    assert any(path.suffix == ".distcp" for path in files)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_an_unknown_version_is_a_visible_skip_in_the_doctor(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay"
    (overlay / "megatron_core-0.21.0.dist-info").mkdir(parents=True)
    metadata = next((OVERLAYS / OVERLAY).glob("megatron_core-*.dist-info")) / "METADATA"
    text = metadata.read_text().replace("\nVersion: 0.19.2\n", "\nVersion: 0.21.0\n")
    (overlay / "megatron_core-0.21.0.dist-info" / "METADATA").write_text(text)
    for path, version, applies in ((OVERLAYS / OVERLAY, "0.19.2", True), (overlay, "0.21.0", False)):
        variables = environment(str(path), {"MLFLASHPOINT_ENABLED": "1", "MLFLASHPOINT_JOB_ID": "j"}, bootstrap=True)
        command = [ENV / "bin" / "python", "-m", "mlflashpoint.cli", "doctor", "--json"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
        (row,) = [row for row in json.loads(done.stdout)["frameworks"] if row["framework"] == "megatron_lm"]
        assert row["error"] is None and len(row["patches"]) == 6
        for patch in row["patches"]:
            assert (patch["version"], patch["will_apply"]) == (version, applies)
            assert applies or "outside the tested range >=0.19,<0.20" in patch["reason"]


def test_a_job_that_died_behind_its_last_step_makes_its_last_durable_checkpoint(job: Job) -> None:
    durable = ("--save", job.durable, "--load", job.durable, "--save-interval", 4)
    job.start(*durable, stop_after=6)
    assert not (job.durable / "iter_0000006").exists()
    again = job.start(*durable)
    assert again.began == {6}
    assert (job.durable / "latest_checkpointed_iteration.txt").read_text() == "6"


def test_a_training_that_leaves_at_a_memory_save_of_ours_leaves_a_durable_checkpoint_of_it(job: Job) -> None:
    """The loop takes the memory save for its last one. A job whose time is over may go on elsewhere, without memory."""
    job.start("--save", job.durable, "--save-interval", 5, "--exit-interval", 4)
    assert (job.durable / "latest_checkpointed_iteration.txt").read_text() == "4"
