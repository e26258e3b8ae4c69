"""Every command and code block of the README and the tutorial does what the page says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.docs.page import blocks, matches, reading

PAGES = ("README.md", "docs/tutorial.md")

MADE_ELSEWHERE = ("make demo", "make test")
"""Walked through by tests/slow/test_newcomer.py, and what runs this test."""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_followed_to_its_end(
    page: str, checkout: tuple[Path, dict[str, str]]
) -> None:
    last = ""
    with reading(*checkout) as reader:
        for block in blocks(PROJECT / page):
            if block.text.startswith(MADE_ELSEWHERE):
                continue
            if block.language in ("sh", "python"):
                last = reader.as_printed(reader.do(block))
            elif block.language in ("text", "json"):
                assert matches(last, block.text), f"{page}:{block.line} is not what came:\n{last}"
