"""What a terminal would show, checked against pyte and by properties."""

from __future__ import annotations

import io
import re
import time
import tracemalloc

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyte import modes
from rich.console import Console
from rich.progress import Progress

from kernelpool.terminal import (
    WINDOW_LINES,
    LiveText,
    TerminalText,
    clean_text,
    redraws,
    strip_ansi,
)

ENOUGH = 1_000_000


def show(*chunks: str, head: int = ENOUGH, tail: int = ENOUGH, columns: int = 10_000) -> str:
    terminal = TerminalText(head, tail, columns)
    for chunk in chunks:
        terminal.feed(chunk)
    return terminal.text()


def live(*chunks: str) -> str:
    text = LiveText()
    return "".join(text.feed(chunk) for chunk in chunks)


def oracle(text: str, *, columns: int) -> list[str]:
    """The lines of pyte's screen. Its `display` is the same and takes 100 times as long."""
    screen = pyte.Screen(columns, WINDOW_LINES)
    screen.set_mode(modes.LNM)
    pyte.Stream(screen).feed(text)
    lines = []
    for y in range(WINDOW_LINES):
        cells = screen.buffer[y] if y in screen.buffer else {}
        lines.append(
            "".join(
                cells[x].data if x in cells else " " for x in range(max(cells, default=-1) + 1)
            ).rstrip()
        )
    return lines


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("plain\ntext\n", "plain\ntext\n"),
        ("no newline", "no newline"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("a\r\r\nb", "a\nb"),
        ("12345\rab", "ab345"),
        ("abc\b\bX", "aXc"),
        ("\b\bX", "X"),
        ("a\x1b[31mb\x1b[0mc", "abc"),
        ("\x1b[38;2;1;2;3mx\x1b[38:5:9my", "xy"),
        ("a\x1b[2K\x1b[1A\x1b[?25lb\x1b]8;;u\x07c", " bc"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://host/\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPq#0;2;0;0;0\x1b\\after", "after"),
        ("\x1b(B\x1b)0x\x1b=\x1b>", "x"),
        ("long line\r\x1b[Kshort", "short"),
        ("abcdef\x1b[3D\x1b[K", "abc"),
        ("abcdef\x1b[3D\x1b[1K", "    ef"),
        ("a\nb\nc\x1b[2A\x1b[Jz", "az"),
        ("one\ntwo\x1b[1A\rONE\n", "ONE\ntwo"),
        ("one\ntwo\x1b[H\x1b[2Jnew", "new"),
        ("a\x1b[5Gb", "a   b"),
        ("\x1b[3;2Hx", "\n\n x"),
        ("abc\x1b[2D\x1b[Pz", "az"),
        ("abc\x1b[2D\x1b[@z", "azbc"),
        ("abc\x1b[3D\x1b[2X", "  c"),
        ("a\nc\x1b[Lb", "a\nb\nc"),
        ("a\nb\nc\x1b[1A\x1b[M", "a\nc"),
        ("ab\x1b7cd\x1b8X", "abXd"),
        ("tab\there", "tab\there"),
        ("page\x0cnext\x0bline\x85end", "page\nnext\nline\nend"),
        ("nul\x00 bell\x07 del\x7f", "nul bell del"),
        ("lone \ud800 surrogate \udfff", "lone \ufffd surrogate \ufffd"),
        ("\x9b31mred\x9b0m", "red"),
        ("\x9d0;title\x9ctext", "text"),
        ("\x1b", ""),
        ("\x1b[12", ""),
        ("\x1b]never ended", ""),
        ("\x1b]never ended\nstill here", "\nstill here"),
        ("\x1b\x1b[1m[2K", "[2K"),
        ("\x1b\x00[2K", "[2K"),
        ("\x1b[?1049h\x1b[?2004lx", "x"),
        ("a\x1b[99999999999999999999Cb", "a" + " " * 9998 + "b"),
        ("x\by", "y"),
        ("ab\x1b[A\bX", "aX"),
        ("", ""),
    ],
)
def test_the_text_is_what_a_terminal_shows(written: str, shown: str) -> None:
    assert show(written) == shown
    assert show(*written) == shown
    assert strip_ansi(written) == shown


def test_a_coloured_traceback_loses_its_colours_only() -> None:
    line = "\x1b[0;31mZeroDivisionError\x1b[0m                 Traceback (most recent call last)\n"
    assert strip_ansi(line) == re.sub("\x1b\\[[0-9;]*m", "", line)


def test_thousands_of_redraws_fold_to_the_last() -> None:
    assert show(*(f"\r{i}" for i in range(5000))) == "4999"
    assert show("".join(f"\r{i}" for i in range(5000))) == "4999"
    assert show(*(f"step {i}\x1b[1G" for i in range(5000))) == "step 4999"


def test_a_progress_bar_of_tqdm_leaves_its_last_state() -> None:
    bar = "".join(f"\r{i:3}%|{'#' * (i // 10):10}| {i}/100" for i in range(101))
    assert show(bar + "\n") == "100%|##########| 100/100\n"


def test_nested_progress_bars_of_tqdm_leave_two_lines() -> None:
    frames = "".join(f"\router {i}\n\rinner {i}\x1b[A" for i in range(50))
    assert show("\r" + frames + "\n\n") == "outer 49\ninner 49\n"


def test_progress_of_rich_leaves_its_last_frame() -> None:
    again = "\r\x1b[2K\x1b[1A\x1b[2K"
    frames = again.join(f"\x1b[36mload {i}\x1b[0m\n\x1b[35msave {i}\x1b[0m" for i in range(300))
    assert show("\x1b[?25l" + frames + "\n\x1b[?25h") == "load 299\nsave 299\n"


def test_a_real_progress_display_of_rich_leaves_one_line_per_task() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, color_system="truecolor")
    with Progress(console=console, auto_refresh=False) as progress:
        tasks = [progress.add_task(name, total=50) for name in ("load", "clean", "save")]
        for step in range(50):
            for task in tasks:
                progress.advance(task)
                progress.refresh()
            if step == 25:
                progress.console.print("half way")
    assert len(written.getvalue()) > 10_000
    lines = [line.rstrip() for line in show(*written.getvalue()).rstrip("\n").split("\n")]
    assert lines[0] == "half way"
    assert [line.split()[0] for line in lines[1:]] == ["load", "clean", "save"]
    assert all("100%" in line for line in lines[1:])


def test_lines_above_the_window_are_settled() -> None:
    lines = [f"line {i}" for i in range(3 * WINDOW_LINES)]
    shown = show("\n".join(lines) + f"\x1b[{10 * WINDOW_LINES}A\rtop").split("\n")
    assert shown[2 * WINDOW_LINES] == "tope 400"
    assert shown[: 2 * WINDOW_LINES] == lines[: 2 * WINDOW_LINES]
    assert shown[2 * WINDOW_LINES + 1 :] == lines[2 * WINDOW_LINES + 1 :]


def test_head_and_tail_are_kept_with_one_notice_between() -> None:
    terminal = TerminalText(1000, 500)
    for i in range(1_000_000):
        terminal.feed(f"{i}\n")
    whole = "".join(f"{i}\n" for i in range(1_000_000))
    left_out = len(whole) - 1500
    assert terminal.truncated
    assert terminal.dropped_characters == left_out
    assert terminal.text() == (
        whole[:1000] + f"\n... {left_out:,} characters left out ...\n" + whole[-500:]
    )


def test_limits_are_bytes_and_never_cut_a_character() -> None:
    terminal = TerminalText(10, 10)
    terminal.feed("é数😀" * 20)
    head, notice, tail = terminal.text().split("\n")
    assert (head, tail) == ("é数😀", "é数😀")
    assert notice == "... 54 characters left out ..."


def test_text_within_the_limits_is_whole() -> None:
    text = "x" * 1500
    terminal = TerminalText(1000, 500)
    terminal.feed(text)
    assert terminal.text() == text
    assert not terminal.truncated
    terminal.feed("y")
    assert terminal.truncated


def test_nothing_may_be_kept_at_all() -> None:
    terminal = TerminalText(0, 0)
    terminal.feed("secret")
    assert terminal.text() == "\n... 6 characters left out ...\n"


def test_a_line_of_eight_megabytes_stays_one_line() -> None:
    assert show("x" * 8_000_000, head=5_000_000, tail=5_000_000) == "x" * 8_000_000


CONTROLS = [
    *("\r", "\n", "\b", "\t", "\r\n", "\x00", "\x07", "\x0c", "\x1b", "\x7f", "\x85", "\x9b"),
    *("\x1b[K", "\x1b[1K", "\x1b[2K", "\x1b[J", "\x1b[1J", "\x1b[2J", "\x1b[H", "\x1b[3;4H"),
    *("\x1b[A", "\x1b[2B", "\x1b[3C", "\x1b[2D", "\x1b[E", "\x1b[F", "\x1b[5G", "\x1b[2d"),
    *("\x1b[@", "\x1b[2P", "\x1b[2X", "\x1b[L", "\x1b[M", "\x1b7", "\x1b8", "\x1b[s", "\x1b[u"),
    *("\x1b[31m", "\x1b[?25l", "\x1b]0;t\x07", "\x1b]8;;u\x1b\\", "\x1b(B", "\x1b[", "\x1b]x"),
    *("\x1bM", "\x1bD", "\x1bE", "\x1bc", "\ud800", "数", "😀", "\x18", "\x1bP", "\x1b\\"),
]
pieces = st.one_of(
    st.sampled_from(CONTROLS), st.text("abcdef 12;[]m?", max_size=8), st.text(max_size=3)
)
written_texts = st.lists(pieces, max_size=40).map("".join)


@given(written_texts, st.data(), st.sampled_from([1, 2, 7, 10_000]))
@settings(max_examples=200, deadline=None)
def test_any_split_shows_the_same(text: str, data: st.DataObject, columns: int) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    terminal = TerminalText(ENOUGH, ENOUGH, columns)
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        terminal.feed(text[start:end])
        if data.draw(st.booleans()):
            terminal.text()
    assert terminal.text() == show(text, columns=columns)


@given(written_texts)
@settings(max_examples=150, deadline=None)
def test_no_control_is_left_but_newline_and_tab(text: str) -> None:
    shown = show(text)
    assert re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", shown) is None
    shown.encode()
    assert strip_ansi(shown) == shown


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]) | st.sampled_from("\n\t")))
def test_plain_text_is_shown_as_it_is(text: str) -> None:
    assert show(text) == text == show(*text) == show(text, columns=3) == live(*text)


@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                [*"\r\n\b\0\a", "\r\n", "\x1b7", "\x1b8", "\x1b(B", "\x1b[2K", "\x1b[2J"]
                + ["\x1b]0;title\x07", "\x1b]8;;u\x1b\\", "\x1b[31;1m", "\x1b[?25l"]
                + [f"\x1b[{count}{final}" for count in ("", "2") for final in "ABCDEFG@PXLd"]
                + [f"\x1b[{part}{final}" for part in ("", "1") for final in "JK"]
                + ["\x1b[H", "\x1b[3;4H", "\x1b[7;1f", "\x1b[9G"]
            ),
            st.text("abcdefgh XYZ0189", min_size=1, max_size=12),
        ),
        max_size=60,
    ).map("".join)
)
@settings(max_examples=300, deadline=None)
def test_the_text_is_what_pyte_shows(text: str) -> None:
    expected = oracle(text, columns=1000)
    shown = [line.rstrip() for line in show(text, columns=1000).split("\n")]
    assert shown + [""] * (len(expected) - len(shown)) == expected


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["\r", "\n", "\x1b[A", "\x1b[B", "\x1b[K", "\x1b[2K", "\x1b[J"]),
            st.text("abcdefgh XYZ0189", min_size=1, max_size=25),
        ),
        max_size=30,
    ).map("".join)
)
@settings(max_examples=150, deadline=None)
def test_a_line_over_the_width_wraps_as_in_pyte(text: str) -> None:
    columns = 10
    terminal = TerminalText(ENOUGH, ENOUGH, columns)
    terminal.feed(text)
    terminal.text()
    rows = [row if isinstance(row, str) else row.decode("utf-32-le") for row in terminal._rows]
    expected = oracle(text, columns=columns)
    assert [row.rstrip() for row in rows] + [""] * (len(expected) - len(rows)) == expected


@given(st.lists(st.text("ab\n", max_size=30), max_size=20), st.integers(0, 40), st.integers(0, 40))
def test_what_is_kept_and_left_out_adds_up(chunks: list[str], head: int, tail: int) -> None:
    whole = "".join(chunks)
    terminal = TerminalText(head, tail)
    for chunk in chunks:
        terminal.feed(chunk)
    dropped = max(0, len(whole) - head - tail)
    assert terminal.dropped_characters == dropped
    assert terminal.truncated == (dropped > 0)
    if dropped:
        assert terminal.text() == (
            whole[:head]
            + f"\n... {dropped:,} characters left out ...\n"
            + whole[len(whole) - tail :]
        )
    else:
        assert terminal.text() == whole


def test_memory_is_flat_whatever_comes() -> None:
    for flood in ("y" * 1000 + "\n", "\x1b[9999Cx\n", "\n", "\rx", "\x1b[", "\x1b]x", "\x1b[1;"):
        terminal = TerminalText(100_000, 100_000)
        tracemalloc.start()
        for _ in range(10):
            terminal.feed(flood * (70_000 // len(flood)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 30_000_000, flood


@pytest.mark.parametrize(
    ("flood", "seconds"),
    [
        ("line of text\n" * 100_000, 0.5),
        ("x" * 8_000_000, 2),
        ("\rx" * 500_000, 2),
        ("x\b" * 500_000, 2),
        ("\x1b[" * 500_000, 4),
        ("\x1b]" * 500_000, 4),
        ("\x1b[31m" * 200_000, 2),
        ("\x1b]" + "x" * 4_000_000, 2),
        ("\x1b[" + "1" * 4_000_000, 2),
        ("\x1b[A\x1b[Bx" * 50_000, 4),
        ("\r" * 2_000_000, 2),
        ("\x1b[9999Gx\r" * 20_000, 4),
    ],
    ids=lambda value: repr(value[:8]) if isinstance(value, str) else str(value),
)
def test_time_is_linear(flood: str, seconds: float) -> None:
    begun = time.process_time()
    show(flood)
    live(flood)
    assert time.process_time() - begun < seconds


def test_live_pieces_are_appended_and_redraws_start_with_one_return() -> None:
    text = LiveText()
    assert text.feed("\r 1%\r 2%") == " 2%"
    assert text.feed("\r 3%\r 4%") == "\r 4%"
    assert text.feed(" done\r") == " done"
    assert text.feed("\nnext \x1b[3") == "\nnext "
    assert text.feed("1mred\x1b[0m") == "red"
    assert text.feed("\b\bX") == "\b\bX"
    assert text.feed("\n") == "\n"
    assert text.feed("\b\r.") == "."
    assert text.feed("a\rb\nc\rd\n") == "a\rb\nd\n"


@given(st.lists(written_texts, max_size=8))
@settings(max_examples=150, deadline=None)
def test_live_pieces_never_carry_escape_codes(chunks: list[str]) -> None:
    joined = live(*chunks)
    assert re.search("[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]", joined) is None


@given(
    st.lists(
        st.tuples(
            st.lists(st.text("abc", min_size=5, max_size=5), min_size=1, max_size=4),
            st.sampled_from(["\r", "\r\x1b[K", "\x1b[31m\r\x1b[0m"]),
            st.sampled_from(["\n", "\r\n"]),
        ),
        max_size=6,
    ),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_live_pieces_show_the_same_to_whoever_honours_returns(
    lines: list[tuple[list[str], str, str]], data: st.DataObject
) -> None:
    text = "".join(mark.join(frames) + end for frames, mark, end in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown = show(live(*chunks))
    assert re.search("[^\na-c]", shown) is None
    for line, whole in zip(shown.split("\n"), show(text).split("\n"), strict=True):
        assert whole.startswith(line)


def test_a_spinner_made_of_backspaces_stays_one_character() -> None:
    assert show(live(*(f"\b{frame}" for frame in "|/-\\" * 100))) == "\\"


def test_redraws_are_told_from_newlines_and_colours() -> None:
    assert not redraws("a\r\nb\n\x1b[31mc\x1b[0m")
    assert redraws("\r50%")
    assert redraws("\x1b[2K")
    assert redraws("\b")


def test_clean_text_replaces_lone_surrogates_only() -> None:
    assert clean_text("a\ud83dé\x1b") == "a\ufffdé\x1b"
