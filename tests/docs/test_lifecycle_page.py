"""The state diagrams show what the tables and enums say."""

from __future__ import annotations

import runpy

import pytest

from tests.conftest import PROJECT


def test_the_state_diagrams_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(PROJECT / "scripts" / "lifecycle_pages.py"))["main"]
    assert main(["--check"]) == 0, capsys.readouterr().out
