import shutil
import tempfile
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def seat():
    """A seat's folder on tmpfs, removed afterwards."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="mlflashpoint-test-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
