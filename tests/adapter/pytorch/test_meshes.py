"""States on device meshes of two dimensions: FSDP2 with tensor parallelism, and HSDP, killed and loaded bit for bit.

Every layout that they are loaded into has as many ranks, so that no version is refused for their number.
"""

from pathlib import Path

import pytest

from tests.adapter.pytorch import launch
from tests.adapter.pytorch.states import MESHES
from tests.core.ranks import memory_folder

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def job(warm, tmp_path_factory):
    """``(base container's folder, report of each rank of the start after the kill)``."""
    folder = tmp_path_factory.mktemp("meshes")
    worker = Path(__file__).with_name("meshes_worker.py")
    with memory_folder() as base:
        saved, loaded = (
            launch.fork(warm.zygote(False), worker, 4, [base, folder / "durable", what], folder / what)
            for what in ("save", "load")
        )
        assert all(report == dict.fromkeys(MESHES, 2) for report in saved), saved
        yield base, loaded


@pytest.mark.parametrize("layout", MESHES)
def test_it_is_loaded_bit_for_bit_into_its_own_and_into_other_layouts(said, layout):
    expected = {"-".join(map(str, (kind, *shape))): [2, [], True] for kind, shape in MESHES[layout]}
    assert said(layout) == [expected] * 4
