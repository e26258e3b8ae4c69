import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kernelpool.errors import NameRefused
from kernelpool.file_names import clean_name, display_paths, split_path


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        ("report.csv", "report.csv"),
        ("my file (1).csv", "my file (1).csv"),
        ("数据.csv", "数据.csv"),
        ("😱.txt", "😱.txt"),
        ("a#b&c%20.txt", "a#b&c%20.txt"),
        ("-rf", "-rf"),
        ("trailing dot.", "trailing dot."),
        ("ge\u0301ne\u0301ration.js", "g\u00e9n\u00e9ration.js"),
        ("../../x", "x"),
        ("/etc/passwd", "passwd"),
        ("a/../../b", "b"),
        ("..\\..\\y", "y"),
        ("C:\\Users\\me\\z.xlsx", "z.xlsx"),
        ("/mnt/data/plot.png", "plot.png"),
        ("nul\0l\r\n\x1b[31m.txt", "null[31m.txt"),
        ("exe.\u202efdp.txt", "exe.fdp.txt"),
        ("dir/", "dir"),
    ],
)
def test_a_name_is_kept_as_far_as_it_is_safe(raw: str, kept: str) -> None:
    assert clean_name(raw) == kept


@pytest.mark.parametrize("raw", ["", " ", ".", "..", "a/..", "/", "\\", "\0", "\x1b", ".\0.", "\n"])
def test_what_names_no_file_is_refused(raw: str) -> None:
    with pytest.raises(NameRefused):
        clean_name(raw)


@pytest.mark.parametrize(
    ("raw", "ending"),
    [("x" * 300 + ".csv", ".csv"), ("数" * 200 + ".tar", ".tar"), ("a." + "b" * 300, "b")],
)
def test_a_long_name_is_cut_and_keeps_its_extension(raw: str, ending: str) -> None:
    name = clean_name(raw)
    assert 250 <= len(name.encode()) <= 255
    assert name.endswith(ending)


@given(st.text(alphabet=st.characters(codec=None), max_size=400))
@example("\u0301" * 300)
@example("e\0\u0301")
@example("." * 300)
def test_a_cleaned_name_is_one_part_and_stays_as_it_is(raw: str) -> None:
    try:
        name = clean_name(raw)
    except NameRefused:
        return
    assert split_path(name) == [name]
    assert "\\" not in name
    assert name.isprintable() or not any(unicodedata.category(c) in {"Cc", "Cs"} for c in name)
    assert unicodedata.is_normalized("NFC", name)
    assert clean_name(name) == name


@pytest.mark.parametrize(
    "path",
    ["", "/a", "a//b", "a/", "./a", "a/..", "..", "a\0b", "x" * 256, "a/" * 2047 + "ab", "\udcff"],
)
def test_a_path_that_leaves_or_cannot_be_is_refused(path: str) -> None:
    with pytest.raises(NameRefused):
        split_path(path)


PARTS = st.text(alphabet="e\u0301\u00e9o\u0308\u00f6/", min_size=1, max_size=6)


@given(st.sets(PARTS, max_size=12))
def test_no_two_paths_are_shown_alike(paths: set[str]) -> None:
    shown = display_paths(paths)
    assert shown.keys() == paths
    assert len(set(shown.values())) == len(paths)
    for path, form in shown.items():
        assert form in {path, unicodedata.normalize("NFC", path)}


def test_a_lone_decomposed_name_is_shown_composed_and_twins_as_they_are() -> None:
    nfd, nfc = "cafe\u0301.txt", "caf\u00e9.txt"
    assert display_paths([nfd]) == {nfd: nfc}
    assert display_paths([nfd, nfc]) == {nfd: nfd, nfc: nfc}
