"""An environment as a stranger has it, with the plugins of ``examples``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.stranger import install

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with both plugins."""
    plugins = (EXAMPLES / "solver_plugin", EXAMPLES / "pass_plugin")
    return install(tmp_path_factory.mktemp("stranger"), *plugins)
