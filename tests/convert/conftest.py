"""Tiny models of every family, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.convert.support import tiny

Models = Callable[[str], Path]


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """family -> its folder; `tied` appended: with tied embeddings."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            family, _, tied = name.partition("-")
            made[name] = tiny(tmp_path_factory.mktemp(name), family, tie_word_embeddings=tied == "tied")
        return made[name]

    return get
