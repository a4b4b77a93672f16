"""Checks that need Lightning imported: each function runs in a process of its own, forked from a warm one."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import shutil
from pathlib import Path

import ingredients
import recipe
import torch
from recipe import L

from mlflashpoint.errors import SettingError, UnsupportedStrategyError


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str):
    try:
        yield
    except kind as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


@contextlib.contextmanager
def memory():
    base = Path("/dev/shm") / f"mlf-inside-{os.getpid()}-{secrets.token_hex(4)}"
    base.mkdir(mode=0o700)
    try:
        yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)


def trainer(folder: Path, **more):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 4,
            "default_root_dir": folder,
            "enable_checkpointing": False,
            **quiet,
            **more,
        }
    )


def every_leaf_comes_back_as_it_was(folder: Path) -> None:
    import collections

    from mlflashpoint.adapter.lightning import leaves
    from mlflashpoint.core.state import flatten, unflatten

    leaves.register(L.__name__)
    leaves.register(L.__name__)
    import importlib

    attributes = importlib.import_module(f"{ingredients.FABRIC}.utilities.data").AttributeDict
    now = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.timezone.utc)
    state = {
        "counter": collections.Counter({5: 1, 9: 2}),
        "delta": datetime.timedelta(days=1, microseconds=7),
        "moment": now,
        "day": now.date(),
        "last values": collections.deque([1.5, "a"], maxlen=3),
        "endless": collections.deque([[2]]),
        "attributes": attributes(a=1, b=torch.ones(2)),
    }
    flat = flatten(state)
    found = unflatten(flat.skeleton, flat.tensors)
    assert {name: type(value) for name, value in found.items()} == {name: type(value) for name, value in state.items()}
    assert found["last values"].maxlen == 3 and found["endless"].maxlen is None
    assert torch.equal(found["attributes"].pop("b"), state["attributes"].pop("b"))
    assert found == state


def the_library_refuses_what_it_cannot_do(folder: Path) -> None:
    from mlflashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback
    from mlflashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint as wrap

    strange = trainer(folder, strategy=recipe.make_strategy("strange", 1))
    with refused(UnsupportedStrategyError, "StrangeStrategy", "save_checkpoint", "remedy"):
        wrap(strange, folder / "job-1", async_save=True)
    with refused(UnsupportedStrategyError, "DDPStrategy", "MultiProcessing"):
        wrap(trainer(folder, strategy="ddp_spawn", devices=2), folder / "job-1", async_save=True)
    with refused(SettingError, "no Lightning Trainer"):
        wrap(object(), folder / "job-1", async_save=True)
    with refused(SettingError, "write_thread_count"):
        wrap(trainer(folder), folder / "job-1", async_save=True, write_thread_count=0)
    with refused(SettingError, "every_n_steps"):
        MLFlashpointCheckpointCallback(folder, 0)
    callback = MLFlashpointCheckpointCallback(folder / "job-1", 2)
    with refused(SettingError, "was not wrapped", "wrap_trainer_and_auto_resume_with_mlflashpoint"):
        trainer(folder, callbacks=[callback]).fit(recipe.Model(), recipe.Batches(0))
    keeper = recipe.ModelCheckpoint(folder / "job-1" / "kept", save_top_k=1)
    kept = trainer(folder, callbacks=[callback, keeper], enable_checkpointing=True)
    wrap(kept, folder / "job-1", async_save=True)
    with refused(SettingError, "dirpath of ModelCheckpoint", "job-1/kept", "remedy"):
        kept.fit(recipe.Model(), recipe.Batches(0))
    root = trainer(folder / "job-1", callbacks=[callback, recipe.ModelCheckpoint()], enable_checkpointing=True)
    wrap(root, folder / "job-1", async_save=True)
    with refused(SettingError, "dirpath of ModelCheckpoint", "job-1/checkpoints", "remedy"):
        root.fit(recipe.Model(), recipe.Batches(0))
    other = trainer(folder, callbacks=[callback])
    wrap(other, folder / "job-10", async_save=True)
    with refused(SettingError, "job-1", "job-10"):
        other.fit(recipe.Model(), recipe.Batches(0))


def a_disabled_callback_does_nothing(folder: Path) -> None:
    from mlflashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback

    one = trainer(folder, callbacks=[MLFlashpointCheckpointCallback(folder, 1, enabled=False)])
    one.fit(recipe.Model(), recipe.Batches(0))
    assert one.global_step == 4


def a_trainer_that_never_fits_stops_no_other(folder: Path) -> None:
    from mlflashpoint.adapter.lightning import fits
    from mlflashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback
    from mlflashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint as wrap

    with memory() as base:
        os.environ["MLFLASHPOINT_KEEP_ON_SUCCESS"] = "1"
        idle = trainer(folder)
        for _ in range(2):
            wrap(idle, base, async_save=True)
            assert fits.session_of(idle).runtime.problem is None
        other = trainer(folder, callbacks=[MLFlashpointCheckpointCallback(base, 2)])
        wrap(other, base, async_save=True)
        other.fit(recipe.Model(), recipe.Batches(0))
        assert other.global_step == 4
        assert len(list(base.glob("lightning-2/seat-*/*.commit"))) == 2, "steps 2 and 4"


def a_wrapped_trainer_that_nobody_holds_is_given_up(folder: Path) -> None:
    import gc
    import weakref

    from mlflashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint as wrap

    with memory() as base:
        one = trainer(folder)
        wrap(one, base, async_save=True)
        held = weakref.ref(one)
        del one
        gc.collect()
        assert held() is None


def ranks_that_cannot_agree_before_fit_choose_within_it(folder: Path) -> None:
    from mlflashpoint.adapter.lightning import fits
    from mlflashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback
    from mlflashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint as wrap

    with memory() as base:
        os.environ["MLFLASHPOINT_KEEP_ON_SUCCESS"] = "1"
        first = trainer(folder, callbacks=[MLFlashpointCheckpointCallback(base, 2)])
        wrap(first, base, async_save=False)
        first.fit(recipe.Model(), recipe.Batches(0))
        second = trainer(folder, max_steps=6)
        resume = wrap(second, base, async_save=False)
        session = fits.session_of(second)
        session.group = fits.session_of(first).group
        session._open_store = fits.session_of(first)._open_store
        runtime = session.runtime
        agree, runtime.agree = runtime.agree, lambda key, ok: False
        resume.setup(second)
        assert second.ckpt_path is None
        runtime.agree = agree
        starts = []
        second.callbacks.append(start_noted_in(starts))
        second.fit(recipe.Model(), recipe.Batches(0))
        assert starts == [4]


def start_noted_in(starts: list[int]) -> L.Callback:
    class Start(L.Callback):
        def on_train_batch_start(self, trainer, *rest) -> None:
            if not starts:
                starts.append(trainer.global_step)

    return Start()


def a_path_of_another_step_or_of_none_is_refused(folder: Path) -> None:
    from mlflashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback
    from mlflashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint as wrap
    from mlflashpoint.errors import CheckpointIdError, NoVersionError

    with memory() as base:
        os.environ["MLFLASHPOINT_KEEP_ON_SUCCESS"] = "1"
        one = trainer(folder, callbacks=[MLFlashpointCheckpointCallback(base, 2)])
        wrap(one, base, async_save=False)
        one.fit(recipe.Model(), recipe.Batches(0))
        one.fit_loop.epoch_loop.max_steps = 6
        for path, kind in ((base / "step-3_ckpt", NoVersionError), (base / "other", CheckpointIdError)):
            wrap(one, base, async_save=True)
            with refused(kind):
                one.fit(recipe.Model(), recipe.Batches(0), ckpt_path=path)
        other = trainer(folder, max_steps=6)
        wrap(other, base, async_save=True)
        with refused(NoVersionError, "'lightning-2'", "each Trainer of a process has its own versions"):
            other.fit(recipe.Model(), recipe.Batches(0), ckpt_path=base / "step-4_ckpt")
        # every spelling of the version's path is that version
        link = folder / "link"
        link.symlink_to(base)
        wrap(one, base, async_save=True)
        one.fit(recipe.Model(), recipe.Batches(0), ckpt_path=f"{link}/step-4_ckpt/")
        assert one.global_step == 6


def the_same_trainer_fits_twice(folder: Path) -> None:
    from mlflashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback
    from mlflashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint as wrap

    with memory() as base:
        one = trainer(folder, callbacks=[MLFlashpointCheckpointCallback(base, 2)])
        wrap(one, base, async_save=True)
        model = recipe.Model()
        one.fit(model, recipe.Batches(0))
        one.fit_loop.epoch_loop.max_steps = 8
        one.fit(model, recipe.Batches(0))
        assert one.global_step == 8
        assert not list(base.glob("*/seat-*/*.commit"))


def strategies_whose_library_is_missing_here_are_refused_by_name(folder: Path) -> None:
    """Lightning's own classes, of which no instance can be made without DeepSpeed and XLA."""
    import importlib
    import types

    from mlflashpoint.adapter.lightning.kinds import kind_of

    strategies = importlib.import_module(f"{L.__name__}.strategies")
    for name in ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy"):
        kind = getattr(strategies, name)
        strategy = kind.__new__(kind)
        strategy._launcher = None
        with refused(UnsupportedStrategyError, f"{L.__name__}.strategies", name, "remedy"):
            kind_of(types.SimpleNamespace(strategy=strategy))


def parameters_of_the_guide_that_the_store_decides_itself_change_nothing(folder: Path) -> None:
    import logging

    from mlflashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback
    from mlflashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint as wrap

    os.environ["MLFLASHPOINT_KEEP_ON_SUCCESS"] = "1"
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("mlflashpoint").addHandler(handler)

    def fit(**parameters) -> list[tuple[str, int]]:
        with memory() as base:
            L.seed_everything(3)
            one = trainer(folder, callbacks=[MLFlashpointCheckpointCallback(base, 2)])
            wrap(one, base, async_save=False, **parameters)
            one.fit(recipe.Model(), recipe.Batches(0))
            return [(path.name, path.stat().st_size) for path in sorted(base.glob("*/seat-*/slot-*"))]

    usual = fit()
    assert len(usual) > 4
    for parameters in (
        {"write_thread_count": 7},
        {"initial_write_buffer_size_bytes": 1 << 40},
        {"use_optimized_save": False},
        {"use_cached_ckpt_structure": True},
        {"use_fully_parallel_wrapper": False},
        {"always_save_context": True},
    ):
        told.clear()
        # a commit record tells which group it is of, and a Trainer's number may have one more digit
        assert [name for name, _ in fit(**parameters)] == [name for name, _ in usual], parameters
        no_effect = [line for line in told if "always_save_context has no effect" in line]
        assert len(no_effect) == ("always_save_context" in parameters)
    with refused(SettingError, "initial_write_buffer_size_bytes"):
        wrap(trainer(folder), folder / "job-1", async_save=True, initial_write_buffer_size_bytes=0)


def what_the_recipe_saves_into_the_container_is_its_own_and_not_durable(folder: Path) -> None:
    """Under the agent, whatever way the place is written: one error, every step saved to memory, no file touched."""
    import logging

    told: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append((record.levelname, record.getMessage()))
    logging.getLogger("mlflashpoint").addHandler(handler)
    with memory() as base:
        os.environ.update(MLFLASHPOINT_BASE_CONTAINER=str(base), MLFLASHPOINT_SAVE_EVERY_N_STEPS="2")
        (folder / "link").symlink_to(base)
        os.chdir(base.parent)
        ways = {
            "plain": {"dirpath": base / "plain"},
            "relative": {"dirpath": f"{base.name}/./relative"},
            "linked": {"dirpath": folder / "link" / "linked"},
            "epochs": {"dirpath": base / "epochs", "every_n_epochs": 1},
            "checkpoints": {},
        }
        for name, way in ways.items():
            told.clear()
            every = {} if "every_n_epochs" in way else {"every_n_train_steps": 2}
            keeper = recipe.ModelCheckpoint(**every, **way, save_top_k=-1, filename="{step}")
            one = trainer(folder / "link", callbacks=[keeper], enable_checkpointing=True, limit_train_batches=2)
            one.fit(recipe.Model(), recipe.Batches(0))
            (error,) = [line for level, line in told if level in ("WARNING", "ERROR")]
            assert f"dirpath of ModelCheckpoint, {keeper.dirpath}, lies in the base container" in error, error
            assert f"MLFLASHPOINT_BASE_CONTAINER='{base}'" in error and "remedy: give it a dirpath" in error, error
            saved = [line for _, line in told if line.startswith("mlflashpoint save")]
            assert [f'"step": {step}' in line for step, line in zip((2, 4), saved, strict=True)] == [True, True], told
            assert sorted(path.name for path in (base / name).iterdir()) == ["step=2.ckpt", "step=4.ckpt"]
        assert len(list(base.rglob("*.ckpt"))) == 2 * len(ways) and not list(base.glob("*/seat-*/*.commit"))


def trainers_that_fit_in_threads_at_once_save_once(folder: Path) -> None:
    """Under the agent: the second thread's fit begins while the first one's is under way."""
    import threading

    with memory() as base:
        os.environ.update(MLFLASHPOINT_BASE_CONTAINER=str(base), MLFLASHPOINT_SAVE_EVERY_N_STEPS="2")
        os.environ["MLFLASHPOINT_KEEP_ON_SUCCESS"] = "1"
        under_way, over = threading.Event(), threading.Event()

        class Hold(L.Callback):
            def on_train_batch_end(self, trainer, *rest) -> None:
                under_way.set()
                assert over.wait(60)

        first = threading.Thread(
            target=trainer(folder, callbacks=[Hold()]).fit, args=(recipe.Model(), recipe.Batches(0))
        )
        first.start()
        assert under_way.wait(60)
        second = trainer(folder)
        second.fit(recipe.Model(), recipe.Batches(0))
        over.set()
        first.join(60)
        assert second.global_step == 4
        assert len(list(base.glob("lightning/seat-*/*.commit"))) == 2
        assert not list(base.glob("lightning-*"))


def trainers_that_begin_in_threads_at_once_save_once(folder: Path) -> None:
    """Under the agent: both have seen that no other fits before either is known to fit."""
    import threading
    import types

    from mlflashpoint.adapter.lightning import hooks

    both, trained = threading.Barrier(2), threading.Barrier(2)
    read = hooks.StoreConfig.from_env
    hooks.StoreConfig = types.SimpleNamespace(from_env=lambda: (both.wait(60), read())[1])
    with memory() as base:
        os.environ.update(MLFLASHPOINT_BASE_CONTAINER=str(base), MLFLASHPOINT_SAVE_EVERY_N_STEPS="2")
        os.environ["MLFLASHPOINT_KEEP_ON_SUCCESS"] = "1"
        fit_in_threads([trainer(folder, callbacks=[waiting_for(trained)]) for _ in range(2)])
        assert len(list(base.glob("*/seat-*/*.commit"))) == 2


def wrapped_trainers_that_begin_in_threads_at_once_save_once(folder: Path) -> None:
    """In the library form: both ask at the same moment whether another one fits."""
    import threading

    from mlflashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback
    from mlflashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint as wrap

    os.environ["MLFLASHPOINT_KEEP_ON_SUCCESS"] = "1"
    with memory() as base:
        both, trained = threading.Barrier(2), threading.Barrier(2)

        class SetUp(L.Callback):
            def setup(self, *args, **kwargs) -> None:
                both.wait(60)

        trainers = []
        for _ in range(2):
            callbacks = [SetUp(), MLFlashpointCheckpointCallback(base, 2), waiting_for(trained)]
            trainers.append(trainer(folder, callbacks=callbacks))
            wrap(trainers[-1], base, async_save=True)
        fit_in_threads(trainers)
        assert len(list(base.glob("*/seat-*/*.commit"))) == 2


def waiting_for(trained) -> L.Callback:
    class Wait(L.Callback):
        def on_train_start(self, *args) -> None:
            trained.wait(60)

        def on_train_end(self, *args) -> None:
            trained.wait(60)

    return Wait()


def fit_in_threads(trainers: list) -> None:
    import threading

    threads = [threading.Thread(target=one.fit, args=(recipe.Model(), recipe.Batches(0))) for one in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [one.global_step for one in trainers] == [4, 4]


def a_trainer_that_has_fitted_is_given_up(folder: Path) -> None:
    """Under the agent: nothing of ours holds the Trainer, its model or its optimizer."""
    with memory() as base:
        os.environ.update(MLFLASHPOINT_BASE_CONTAINER=str(base), MLFLASHPOINT_SAVE_EVERY_N_STEPS="2")
        for keep in ("0", "1"):
            os.environ["MLFLASHPOINT_KEEP_ON_SUCCESS"] = keep
            assert alive_after(lambda: trainer(folder)) == []
        os.environ["MLFLASHPOINT_DRAIN_DIR"] = str(folder / "drain")
        assert alive_after(lambda: trainer(folder)) == []
        assert alive_after(lambda: trainer(folder, callbacks=[failing_at(2)])) == []


def a_wrapped_trainer_that_has_fitted_is_given_up(folder: Path) -> None:
    from mlflashpoint.adapter.lightning.replicated import Replicated
    from mlflashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback
    from mlflashpoint.adapter.nemo.context import ContextFiles
    from mlflashpoint.adapter.nemo.routing import Routing
    from mlflashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint as wrap

    def wrapped(*callbacks) -> L.Trainer:
        one = trainer(folder, callbacks=[MLFlashpointCheckpointCallback(base, 2), *callbacks])
        wrap(one, base, async_save=True, always_save_context=True).setup(one)
        return one

    # Without NeMo they are not written, and know their Trainer all the same.
    Replicated.side_files = lambda self, trainer, base, group: ContextFiles(Routing(base), trainer, group)
    with memory() as base:
        for keep in ("1", "0"):
            os.environ["MLFLASHPOINT_KEEP_ON_SUCCESS"] = keep
            assert alive_after(wrapped) == []
            assert alive_after(lambda: wrapped(failing_at(2))) == []


def failing_at(step: int) -> L.Callback:
    class Fail(L.Callback):
        def on_train_batch_end(self, trainer, *rest) -> None:
            if trainer.global_step == step:
                raise ValueError("the recipe failed")

    return Fail()


def alive_after(make) -> list[str]:
    """Let the Trainer that ``make`` gives fit, and let go of it: what lives on all the same."""
    import gc

    held = fitted(make)
    gc.collect()
    return [name for name, reference in held.items() if reference() is not None]


def fitted(make) -> dict:
    # In a frame of its own: Lightning looks at the variables of its callers' frames, which keep what was looked at.
    import weakref

    one, model = make(), recipe.Model()
    with contextlib.suppress(ValueError):
        one.fit(model, recipe.Batches(0))
    assert one.global_step > 0
    (optimizer,), (weight, *_) = one.optimizers, model.parameters()
    held = {"Trainer": one, "model": model, "optimizer": optimizer, "weight": weight}
    held["moment"] = optimizer.state[weight]["exp_avg"]
    return {name: weakref.ref(value) for name, value in held.items()}


def a_batch_has_one_hook_of_ours_and_the_others_are_lightnings_own(folder: Path) -> None:
    """Under the agent: whoever goes through the Trainer's callbacks can call each, and the others do nothing."""
    with memory() as base:
        os.environ.update(MLFLASHPOINT_BASE_CONTAINER=str(base), MLFLASHPOINT_SAVE_EVERY_N_STEPS="1000")
        called: list[set[str]] = []

        class Probe(L.Callback):
            def on_train_batch_end(self, trainer, *rest) -> None:
                ours = [one for one in trainer.callbacks if type(one).__module__.startswith("mlflashpoint")]
                names = [name for name in dir(L.Callback) if name.startswith("on_")]
                assert len(ours) == 1 and all(callable(getattr(ours[0], name)) for name in names)
                called.append({name for name in names if getattr(type(ours[0]), name) is not getattr(L.Callback, name)})

        trainer(folder, callbacks=[Probe()]).fit(recipe.Model(), recipe.Batches(0))
        per_batch = {name for name in called[0] if any(part in name for part in ("batch", "backward", "step", "grad"))}
        assert per_batch == {"on_train_batch_end"} and len(called) == 4
