"""Every command and code block of these pages does what the page says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.docs.page import blocks, reading

PAGES = ("README.md", "docs/tutorial.md", "docs/howto/server.md")

MADE_ELSEWHERE = ("make demo",)
"""Walked through by tests/slow/test_newcomer.py."""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]


def _certificate(directory: Path) -> None:
    """A certificate for the pages' server, and a curl that trusts it and finds it here."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "1", "-subj", "/CN=code.example.com",
         "-addext", "subjectAltName=DNS:code.example.com",
         "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=directory,
        check=True,
        capture_output=True,
    )  # fmt: skip
    (directory / ".curlrc").write_text(
        'cacert = "cert.pem"\nconnect-to = "code.example.com::127.0.0.1:"\nsilent\n',
        encoding="utf-8",
    )


@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_followed_to_its_end(
    page: str, checkout: tuple[Path, dict[str, str]]
) -> None:
    directory, settings = checkout
    _certificate(directory)
    last = ""
    with reading(directory, {**settings, "HOME": str(directory)}) as reader:
        for block in blocks(PROJECT / page):
            if block.text.startswith(MADE_ELSEWHERE):
                continue
            if block.language in ("sh", "python"):
                last = reader.do(block)
            elif block.language in ("text", "json"):
                told = f"{page}:{block.line} is not what came:\n{last}"
                assert reader.matches(last, block.text), told
