"""docs/configuration.md is the schema."""

from __future__ import annotations

from pathlib import Path

from jetrl_megatron.config.schema_doc import schema_text

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_page_lists_the_schema() -> None:
    """The page's listing is `jetrl schema`, to the letter; fix a failure by pasting its output."""
    listing = PAGE.read_text(encoding="utf-8").partition("```\n")[2].rpartition("```")[0]
    assert listing == schema_text()
