from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.support import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A framework ``fw.core`` with one of each kind of target, and a table that is still to be written."""
    made = Workspace(tmp_path)
    made.write("fw/__init__.py")
    made.write(
        "fw/core.py",
        """
import functools

class Refused(Exception):
    pass

RUNS = []

def save(state, *, step=1):
    "Save it."
    RUNS.append((state, step))
    if step < 0:
        raise Refused("a negative step")
    return ("saved", state, step)

async def save_async(state):
    RUNS.append(state)
    if state is None:
        raise Refused("no state")
    return ("saved", state)

class Base:
    def inherited(self):
        return "base"

class Manager(Base):
    def __init__(self, folder):
        self.folder = folder
    def save(self, state):
        return (self.folder, state)
    @staticmethod
    def where(name):
        return "/" + name
    @classmethod
    def make(cls, folder):
        return cls(folder)
    @property
    def latest(self):
        return 7
    async def load(self, step):
        return (self.folder, step)
""",
    )
    return made
