from __future__ import annotations

import pytest

from tests.adapter.pytorch.script.jobs import Warm


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    started = Warm(tmp_path_factory.mktemp("warm"))
    yield started
    started.close()
