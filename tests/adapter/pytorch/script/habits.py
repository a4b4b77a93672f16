"""A user's script that treats its checkpoints as scripts do: renames, alternates, keeps the best, links the latest.

It knows nothing of mlflashpoint. ``--habit`` names what this start does; a report says what it saw.
"""

import argparse
import json
import os
import shutil
import signal
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

SCORES = {1: 0.9, 2: 0.1, 3: 0.3, 4: 0.2, 5: 0.5, 6: 0.4}


class Tripwire:
    """A small object in the state; once armed, the process dies when it is pickled for the ``after``th time.

    Or it takes a ``nap`` of so many seconds.
    """

    after = nap = 0

    def __reduce__(self):
        nap, Tripwire.nap = Tripwire.nap, 0
        time.sleep(nap)
        if Tripwire.after:
            Tripwire.after -= 1
            if not Tripwire.after:
                os.kill(os.getpid(), signal.SIGKILL)
        return Tripwire, ()


class Progress(Stateful):
    def __init__(self):
        self.step, self.weight = 0, torch.zeros(4)
        self.fails = False

    def state_dict(self):
        if self.fails:
            self.fails = False
            raise RuntimeError("the weights of rank 1 can't be gathered now")
        return {"step": self.step, "weight": self.weight, f"rank-{rank()}": self.step}

    def load_state_dict(self, state):
        self.step, self.weight = state["step"], state["weight"]

    def at(self, step):
        self.step, self.weight = step, torch.full((4,), float(step))
        return {"p": self}


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def on_rank_0(work):
    if rank() == 0:
        work()
    if dist.is_initialized():
        dist.barrier()


def point(link, target):
    temporary = link.with_name(f"{link.name}-new")
    temporary.symlink_to(target)
    os.replace(temporary, link)


def keep_best(folder, many):
    saved = sorted(folder.glob("step-*"), key=lambda path: SCORES[int(path.name[5:])])
    for worst in saved[:-many]:
        shutil.rmtree(worst)


def loaded(folder):
    progress = Progress()
    dcp.load({"p": progress}, checkpoint_id=folder)
    assert progress.weight.tolist() == [float(progress.step)] * 4
    return progress.step


def lines(folder):
    """Four lines of checkpoints at once, until the node dies while the last of them overwrites a folder."""
    progress = Progress()
    for step in (1, 2, 3):
        dcp.save(progress.at(step), checkpoint_id=folder / "renamed" / f"tmp-{step}")
        on_rank_0(lambda step=step: os.rename(folder / "renamed" / f"tmp-{step}", folder / "renamed" / f"step-{step}"))
        for decay in ("0.9", "0.99", "0.999"):
            dcp.save(progress.at(step), checkpoint_id=folder / f"ema-{decay}" / f"step-{step}")
        for number in (2 * step - 1, 2 * step):
            dcp.save(progress.at(number), checkpoint_id=folder / "best" / f"step-{number}")
            on_rank_0(lambda: keep_best(folder / "best", 2))
        # to memory first, then to disk
        Tripwire.after = 2 if step == 3 else 0
        dcp.save(progress.at(step) | {"t": Tripwire()}, checkpoint_id=folder / "two" / f"slot-{(step + 1) % 2}")


def plain(folder):
    """Steps that go up, the newest three kept, ``latest`` points to the newest; then the newest gets another name."""
    progress = Progress()
    for step in (1, 2, 3, 4, 5):
        dcp.save(progress.at(step), checkpoint_id=folder / "run-1" / f"step-{step}")
        point(folder / "run-1" / "latest", f"step-{step}")
        for old in sorted((folder / "run-1").glob("step-*"))[:-3]:
            shutil.rmtree(old)
    os.rename(folder / "run-1" / "step-5", folder / "run-1" / "kept")
    os.kill(os.getpid(), signal.SIGKILL)


def other_run(folder):
    """Another run starts from what the first one left."""
    report = {"resumed": loaded(folder / "run-1" / "kept")}
    (folder / "run-2").mkdir()
    (folder / "run-2" / "notes.txt").write_text("mine")
    progress = Progress()
    for step in (1, 2):
        dcp.save(progress.at(10 + step), checkpoint_id=folder / "run-2" / f"step-{step}")
        point(folder / "run-2" / "latest", f"step-{step}")
    return report


def latest(folder):
    return {"resumed": loaded(folder / "run-2" / "latest")}


def raising(folder):
    """Rank 1's state can't be had once; the script says so and goes on."""
    progress, caught, steps = Progress(), [], []
    for step in range(1, 6):
        progress.fails = step in (2, 4) and rank() == 1
        try:
            if step == 4:
                dcp.load(progress.at(step), checkpoint_id=folder / "step-3")
            else:
                dcp.save(progress.at(step), checkpoint_id=folder / f"step-{step}")
                steps.append(step)
        except (Exception, CheckpointException) as error:
            caught.append([step, type(error).__name__, str(error)])
    return {"caught": caught, "saved": steps, "resumed": loaded(folder / "step-5")}


def hanging(folder):
    """The same, and then a line whose ranks wait five seconds for each other, and one of them takes longer: once."""
    report, progress = raising(folder), Progress()
    dist.barrier()
    os.environ["MLFLASHPOINT_DEADLINE_S"] = "5"
    for step in range(1, 6):
        Tripwire.nap = 8 if step == 2 and rank() == 1 else 0
        dcp.save(progress.at(step) | {f"t-{rank()}": Tripwire()}, checkpoint_id=folder / "slow" / f"step-{step}")
    return report


def around(folder):
    """The newest checkpoint is saved to once more in a way that is left alone."""
    progress, group = Progress(), dist.new_group()
    for step in (1, 2, 3):
        dcp.save(progress.at(step), checkpoint_id=folder / f"step-{step}")
    dcp.save(progress.at(4), checkpoint_id=folder / "step-3", process_group=group)


def going_back(folder):
    """In the middle of training an older checkpoint is loaded again, and one that memory does not keep any more."""
    progress, caught = Progress(), ""
    for step in (1, 2, 3, 4):
        dcp.save(progress.at(step), checkpoint_id=folder / f"step-{step}")
    try:
        loaded(folder / "step-2")
    except Exception as error:
        caught = f"{type(error).__name__}: {error}"
    left = sorted(path.name for path in folder.iterdir())
    resumed = loaded(folder / "step-3")
    dcp.save(progress.at(5), checkpoint_id=folder / "step-5")
    return {"caught": caught, "left": left, "resumed": resumed}


def refused(folder):
    """The disk refuses the newest checkpoint when the script ends."""
    progress = Progress()
    for step in (1, 2, 3):
        dcp.save(progress.at(step), checkpoint_id=folder / f"step-{step}")
    on_rank_0((folder / "step-3" / "__0_0.distcp").mkdir)


def dying(folder, steps=(1, 2, 3)):
    """The node dies when the newest checkpoint is in memory only."""
    progress = Progress()
    for step in steps:
        dcp.save(progress.at(step), checkpoint_id=folder / f"step-{step}")
    on_rank_0(lambda: None)
    os.kill(os.getpid(), signal.SIGKILL)


def dying_later(folder):
    dying(folder, (1, 2, 3, 4))


def looking_back(folder):
    """A start looks at older checkpoints before and behind the newest, trains nothing, and ends well."""
    seen, caught = [loaded(folder / f"step-{step}") for step in (3, 4, 3, 1)], ""
    try:
        loaded(folder / "step-2")
    except Exception as error:
        caught = f"{type(error).__name__}: {error}"
    return {"resumed": seen, "caught": caught, "left": sorted(path.name for path in folder.iterdir())}


def scored(folder):
    """The best two are kept, until the node dies; started again, it goes on from the newest of them."""
    progress, kept = Progress(), sorted(int(path.name[5:]) for path in folder.glob("step-*"))
    if kept:
        loaded(folder / f"step-{kept[-1]}")
    for step in (6,) if kept else (1, 2, 3, 4):
        dcp.save(progress.at(step), checkpoint_id=folder / f"step-{step}")
        on_rank_0(lambda: keep_best(folder, 2))
    on_rank_0(lambda: None)
    os.kill(os.getpid(), signal.SIGKILL)


def newest(folder):
    return {"resumed": loaded(folder / "step-3")}


def again(folder):
    on_rank_0((folder / "step-3" / "__0_0.distcp").rmdir)
    return {"resumed": loaded(folder / "step-3")}


HABITS = {function.__name__: function for function in (
    lines, plain, other_run, latest, raising, hanging, around, going_back, refused, again, dying, newest,
    scored, dying_later, looking_back,
)}  # fmt: skip


def run(arguments):
    warnings.filterwarnings("ignore")
    report = HABITS[arguments.habit](arguments.folder)
    (arguments.out / f"report-{rank()}.json").write_text(json.dumps(report))
    if arguments.habit == "other_run":
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.is_initialized():
        dist.destroy_process_group()


def spawned(number, arguments):
    dist.init_process_group("gloo", init_method=f"file://{arguments.out}/meet", rank=number, world_size=2)
    run(arguments)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--habit", choices=sorted(HABITS), required=True)
    parser.add_argument("--spawn", action="store_true", help="start two ranks with mp.spawn, and no launcher")
    arguments = parser.parse_args()
    if arguments.spawn:
        mp.spawn(spawned, (arguments,), nprocs=2)
        return
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    run(arguments)


if __name__ == "__main__":
    main()
