"""The reference pages that are made from tables say what the tables say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "reference_pages.py"


def test_the_reference_pages_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main(["--check"]) == 0, capsys.readouterr().out
