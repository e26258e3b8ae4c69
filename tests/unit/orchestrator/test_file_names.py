"""Names that callers give to files."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.file_names import NAME_BYTES, safe_name


@given(st.text())
@example("a/.\x00.")
@example("..\\..")
@example("e\x00\u0301" * 200)
@example("\u1100\u1161\u11a8" * 120 + ".txt")
def test_a_safe_name_is_one_part_below_the_workspace(given_name: str) -> None:
    name = safe_name(given_name)
    if name is None:
        return
    assert name not in {"", ".", ".."}
    assert not set(name) & {"/", "\\", "\0", "\n", "\r", "\x1b", "\x7f"}
    assert len(name.encode()) <= NAME_BYTES
    assert unicodedata.is_normalized("NFC", name)


@given(st.text())
def test_a_safe_name_is_safe_already(given_name: str) -> None:
    name = safe_name(given_name)
    assert name is None or safe_name(name) == name


@given(st.text(), st.sampled_from([".csv", ".tar.gz", ".数据", ".😱"]))
def test_a_long_name_keeps_its_extension(stem: str, extension: str) -> None:
    name = safe_name("x" + stem.replace("/", "").replace("\\", "") + "y" * 300 + extension)
    assert name is not None
    assert name.endswith("." + extension.rpartition(".")[2])
    assert len(name.encode()) >= NAME_BYTES - 4


@given(
    st.text(
        st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="/\\"),
        min_size=1,
        max_size=60,
    )
)
def test_an_ordinary_name_is_kept_as_it_is(given_name: str) -> None:
    if given_name.strip() and given_name not in {".", ".."}:
        assert safe_name(given_name) == unicodedata.normalize("NFC", given_name)


@pytest.mark.parametrize(
    ("given_name", "expected"),
    [
        ("my file (1).csv", "my file (1).csv"),
        ("génération.js", "génération.js"),
        ("ge\u0301ne\u0301ration.js", "génération.js"),
        ("数据.csv", "数据.csv"),
        ("😱.txt", "😱.txt"),
        ("a#b&c%20.txt", "a#b&c%20.txt"),
        ("-rf", "-rf"),
        ("trailing.", "trailing."),
        ("...", "..."),
        ("../../x", "x"),
        ("..\\..\\y", "y"),
        ("/mnt/data/z.txt", "z.txt"),
        ("C:\\dir\\w.txt", "w.txt"),
        ("a/../../b", "b"),
        ("a\x00b\r\n.txt", "ab.txt"),
        ("", None),
        (".", None),
        ("..", None),
        ("a/", None),
        ("\x00", None),
        ("   ", None),
    ],
)
def test_names_seen_in_the_field(given_name: str, expected: str | None) -> None:
    assert safe_name(given_name) == expected
