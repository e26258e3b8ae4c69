"""Terminal text: what a terminal would show of a stream of text, in flat memory and linear time.

Above: orchestrator/transcript.py. Below: nothing.

The model is a terminal of `WINDOW_LINES` lines and `line_limit` columns with a scrollback. Lines in
the window can be rewritten by cursor movements, lines above are settled. A line of more columns
wraps as on a real terminal, but the wrap is not part of the text: what was one line stays one line.
A newline implies a carriage return, as behind every pseudo-terminal. One code point is one column,
a tab too (it stays a tab). Form feed, vertical tab and NEL are newlines. Colours, titles, links,
modes and character sets leave no trace; a control string ends at its terminator or at the end of
the line, so that an unfinished one cannot swallow the rest of the output.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from typing import Final

WINDOW_LINES: Final = 200
"""Lines that cursor movements can reach. The tallest progress display seen has some forty bars."""

LINE_LIMIT: Final = 10_000
"""Columns of the window when nobody asks for others; bounds the window to 8 MB."""

_BLOCK: Final = 65_536
"""Characters interpreted at once: small text waits until as much has come or someone looks."""

_BULK: Final = 4096
"""Characters from which it pays to look whether most of a text scrolls away at once."""

_BLANK: Final = " ".encode("utf-32-le")

_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
_MAYBE_WITHOUT_EFFECT: Final = re.compile("[\x00-\x07\x0e-\x1f\x7f]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_C1: Final = re.compile("[\x80-\x9f]")
_OVERSTRUCK: Final = re.compile("[^\x00-\x1f]\b(?=[^\x00-\x1f])")

_CSI_WITH_EFFECT: Final = r"\[([0-9;]{0,256})([@A-HJ-MPXad-fsu`])"
_ESCAPE_WITH_EFFECT: Final = "([78cDEM])"
_CSI: Final = r"\[[0-?]{0,256}[ -/]{0,16}"
_STRING: Final = "[]PX^_][^\x07\x18\x1a\x1b\n]*"

_WITHOUT_EFFECT: Final = re.compile(
    # The groups inside the lookahead cost nothing and keep one spelling of what has an effect.
    f"\x1b(?!{_CSI_WITH_EFFECT}|{_ESCAPE_WITH_EFFECT})"
    f"(?:{_CSI}[@-~]?|{_STRING}(?:\x07|\x1b\\\\)?|[ -/]{{1,4}}[0-~]?|[0-~])?"
    "|[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f]"
)
_WITH_EFFECT: Final = re.compile(f"\x1b{_CSI_WITH_EFFECT}|\x1b{_ESCAPE_WITH_EFFECT}|\b")
_REDRAW: Final = re.compile("\r(?!\n)|\b|\x1b\\[[0-9;]{0,256}[A-HJKdf]")
_UNFINISHED: Final = re.compile(f"\x1b(?:{_CSI}|({_STRING})(\x1b)?|[ -/]{{0,4}})?")


class TerminalText:
    """Folds text as it was written to a terminal into the text that the terminal shows."""

    def __init__(self, limit_head: int, limit_tail: int, line_limit: int = LINE_LIMIT) -> None:
        """Start with an empty screen.

        Args:
            limit_head: UTF-8 bytes kept from the beginning, whatever comes later.
            limit_tail: UTF-8 bytes kept from the end.
            line_limit: columns of the window; a carriage return goes back at most that far.
        """
        self._limit_tail = limit_tail
        self._line_limit = max(1, line_limit)
        self._waiting: list[str] = []
        self._waiting_size = 0
        self._unfinished = ""
        self._rows: list[str | bytearray] = []
        """Lines of the window: text, or UTF-32 once a line has been edited in place."""
        self._wrapped: list[bool] = []
        """Whether a row goes on in the next one, without a newline between them."""
        self._y = 0
        self._x = 0
        self._saved = (0, 0)
        self._settled: list[str] = []
        self._settled_size = 0
        self._head: list[str] = []
        self._head_room = limit_head
        self._tail: deque[tuple[str, int]] = deque()
        self._tail_bytes = 0
        self._dropped = 0
        self._rendered: tuple[str, int] | None = ("", 0)

    def feed(self, text: str) -> None:
        """Take the next piece, cut anywhere."""
        self._waiting.append(text)
        self._waiting_size += len(text)
        if self._waiting_size >= _BLOCK:
            self._catch_up()

    def text(self) -> str:
        """What is shown now. Costs time in proportion to its length, once per change."""
        return self._render()[0]

    @property
    def truncated(self) -> bool:
        """Whether something is left out between head and tail."""
        return self._render()[1] > 0

    @property
    def dropped_characters(self) -> int:
        """How many characters are left out between head and tail."""
        return self._render()[1]

    @property
    def unfinished(self) -> str:
        """The beginning of a sequence whose end has not come yet."""
        self._catch_up()
        return self._unfinished

    @property
    def after_cursor(self) -> int:
        """How many characters of the last line lie at or behind the cursor, if it is there."""
        self._catch_up()
        if not self._rows or self._y != len(self._rows) - 1:
            return 0
        return max(0, _columns(self._rows[-1]) - self._x)

    def _catch_up(self) -> None:
        if not self._waiting:
            return
        text = "".join(self._waiting)
        self._waiting.clear()
        self._waiting_size = 0
        self._rendered = None
        for start in range(0, len(text), _BLOCK):
            self._interpret(text[start : start + _BLOCK])

    def _interpret(self, text: str) -> None:
        text = self._unfinished + _seven_bit(text)
        self._unfinished = ""
        if _CONTROL.search(text) is None:
            self._write(text)
            return
        text, self._unfinished = _split_unfinished(text)
        if _MAYBE_WITHOUT_EFFECT.search(text) is not None:
            text = _WITHOUT_EFFECT.sub("", text)
        text = text.replace("\x0b", "\n").replace("\x0c", "\n").replace("\r\n", "\n")
        if "\b" in text and "\x1b" not in text:
            text = _OVERSTRUCK.sub("", text)
        position = 0
        if "\x1b" in text or "\b" in text:
            for token in _WITH_EFFECT.finditer(text):
                if token.start() > position:
                    self._write_with_returns(text[position : token.start()])
                position = token.end()
                self._apply(token)
        if position < len(text):
            self._write_with_returns(text[position:])

    def _write_with_returns(self, text: str) -> None:
        """Write text whose only controls are newlines, tabs and carriage returns."""
        if "\r" not in text:
            self._write(text)
            return
        first, *lines = text.split("\n")
        self._redraw(first)
        if not lines:
            return
        if self._y < len(self._rows) - 1 or len(max(lines, key=len)) > self._line_limit:
            for line in lines:
                self._newline()
                self._redraw(line)
            return
        shown = [_overlay(line.split("\r")) if "\r" in line else line for line in lines]
        self._write("\n" + "\n".join(shown))
        self._x = len(lines[-1]) - lines[-1].rfind("\r") - 1

    def _redraw(self, line: str) -> None:
        """Write a line that may contain carriage returns at the cursor."""
        first, *redraws = line.split("\r")
        self._put(first)
        if not redraws:
            return
        if len(max(redraws, key=len)) > self._line_limit:
            for redraw in redraws:
                self._x = 0
                self._put(redraw)
            return
        self._x = 0
        self._put(_overlay(redraws))
        self._x = len(redraws[-1])

    def _write(self, text: str) -> None:
        """Write text whose only controls are newlines and tabs."""
        if len(text) > _BULK and self._at_end():
            text = self._settle_all_but_window(text)
        first, *lines = text.split("\n")
        self._put(first)
        if not lines:
            return
        if self._y < len(self._rows) - 1 or len(max(lines, key=len)) > self._line_limit:
            for line in lines:
                self._newline()
                self._put(line)
            return
        self._reach(self._y)
        self._rows += lines
        self._wrapped += [False] * len(lines)
        self._y = len(self._rows) - 1
        self._x = len(lines[-1])
        self._scroll()

    def _at_end(self) -> bool:
        """Whether what is written now comes after everything that is shown."""
        if self._y != len(self._rows) - 1:
            return not self._rows and self._y == self._x == 0
        return self._x == _columns(self._rows[-1])

    def _settle_all_but_window(self, text: str) -> str:
        """Settle the window and as much of what comes next as will scroll away at once."""
        end = len(text)
        for _ in range(WINDOW_LINES):
            end = text.rfind("\n", 0, end)
            if end < 0:
                return text
        self._settle(self._window() + text[: end + 1])
        self._rows.clear()
        self._wrapped.clear()
        self._x = self._y = 0
        return text[end + 1 :]

    def _put(self, text: str) -> None:
        """Write text without newlines at the cursor, over what is there."""
        start = 0
        while start < len(text):
            if self._x >= self._line_limit:
                self._reach(self._y)
                self._wrapped[self._y] = True
                self._newline()
            piece = text[start : start + self._line_limit - self._x]
            self._reach(self._y)
            row = self._rows[self._y]
            if isinstance(row, str) and self._x >= len(row):
                self._rows[self._y] = row + " " * (self._x - len(row)) + piece
            else:
                cells = self._cells(self._x)
                cells[4 * self._x : 4 * (self._x + len(piece))] = piece.encode("utf-32-le")
            self._x += len(piece)
            start += len(piece)

    def _newline(self) -> None:
        self._x = 0
        self._reach(self._y + 1)
        self._y += 1
        self._scroll()

    def _reach(self, y: int) -> None:
        """Make the rows down to `y`: below what was written they exist only once needed."""
        missing = y + 1 - len(self._rows)
        if missing > 0:
            self._rows += [""] * missing
            self._wrapped += [False] * missing

    def _cells(self, length: int = 0) -> bytearray:
        """The row under the cursor as editable cells, padded with blanks to `length`."""
        self._reach(self._y)
        row = self._rows[self._y]
        if isinstance(row, str):
            row = bytearray(row.encode("utf-32-le"))
            self._rows[self._y] = row
        missing = length - len(row) // 4
        if missing > 0:
            row += _BLANK * missing
        return row

    def _apply(self, token: re.Match[str]) -> None:
        """Carry out a backspace or an escape sequence that moves or erases."""
        parameters, final, escape = token.groups()
        if escape is not None:
            self._apply_escape(escape)
            return
        if final is None:
            self._move_to(self._y, self._x - 1)
            return
        first, _, second = parameters.partition(";")
        argument = int(first or 0)
        count = max(1, argument)
        match final:
            case "A":
                self._y = max(0, self._y - count)
            case "B" | "e":
                self._y = min(WINDOW_LINES - 1, self._y + count)
            case "C" | "a":
                self._move_to(self._y, self._x + count)
            case "D":
                self._move_to(self._y, self._x - count)
            case "E":
                self._move_to(self._y + count, 0)
            case "F":
                self._move_to(self._y - count, 0)
            case "G" | "`":
                self._move_to(self._y, count - 1)
            case "H" | "f":
                self._move_to(count - 1, max(1, int(second.partition(";")[0] or 0)) - 1)
            case "d":
                self._y = min(WINDOW_LINES, count) - 1
            case "J":
                self._erase_display(argument)
            case "K":
                self._erase_line(argument)
            case "L" | "M":
                self._shift_rows(min(count, WINDOW_LINES), insert=final == "L")
            case "@" | "P" | "X":
                self._shift_cells(min(count, self._line_limit), final)
            case "s":
                self._saved = (self._y, self._x)
            case _:
                self._move_to(*self._saved)

    def _apply_escape(self, escape: str) -> None:
        match escape:
            case "7":
                self._saved = (self._y, self._x)
            case "8":
                self._move_to(*self._saved)
            case "c":
                self._erase_display(2)
                self._move_to(0, 0)
            case "D":
                x = self._x
                self._newline()
                self._x = x
            case "E":
                self._newline()
            case _:
                self._y = max(0, self._y - 1)

    def _move_to(self, y: int, x: int) -> None:
        self._y = min(max(y, 0), WINDOW_LINES - 1)
        self._x = min(max(x, 0), self._line_limit - 1)

    def _erase_display(self, part: int) -> None:
        if part == 0:
            self._erase_line(0)
            del self._rows[self._y + 1 :], self._wrapped[self._y + 1 :]
        elif part == 1:
            above = min(self._y, len(self._rows))
            self._rows[:above] = [""] * above
            self._wrapped[:above] = [False] * above
            self._erase_line(1)
        elif part == 2:
            self._rows.clear()
            self._wrapped.clear()

    def _erase_line(self, part: int) -> None:
        if self._y >= len(self._rows):
            return
        if part == 0:
            del self._cells()[4 * self._x :]
            self._wrapped[self._y] = False
        elif part == 1:
            cells = self._cells()
            end = min(4 * (self._x + 1), len(cells))
            cells[:end] = _BLANK * (end // 4)
        elif part == 2:
            self._rows[self._y] = ""
            self._wrapped[self._y] = False

    def _shift_rows(self, count: int, *, insert: bool) -> None:
        self._x = 0
        if self._y >= len(self._rows):
            return
        if insert:
            self._rows[self._y : self._y] = [""] * count
            self._wrapped[self._y : self._y] = [False] * count
            del self._rows[WINDOW_LINES:], self._wrapped[WINDOW_LINES:]
        else:
            del self._rows[self._y : self._y + count], self._wrapped[self._y : self._y + count]

    def _shift_cells(self, count: int, final: str) -> None:
        cells = self._cells()
        start = 4 * self._x
        if start >= len(cells):
            return
        if final == "@":
            cells[start:start] = _BLANK * count
            del cells[4 * self._line_limit :]
        elif final == "P":
            del cells[start : start + 4 * count]
        else:
            end = min(start + 4 * count, len(cells))
            cells[start:end] = _BLANK * ((end - start) // 4)

    def _scroll(self) -> None:
        """Settle the rows that have left the window."""
        excess = len(self._rows) - WINDOW_LINES
        if excess <= 0:
            return
        self._settle(_join(self._rows[:excess], self._wrapped[:excess]))
        del self._rows[:excess], self._wrapped[:excess]
        self._y -= excess

    def _window(self) -> str:
        return _join(self._rows, [*self._wrapped[:-1], True]) if self._rows else ""

    def _settle(self, text: str) -> None:
        self._settled.append(text)
        self._settled_size += len(text)
        if self._settled_size < _BLOCK:
            return
        text = "".join(self._settled)
        self._settled.clear()
        self._settled_size = 0
        if self._head_room:
            start, text = _cut(text, self._head_room)
            self._head.append(start)
            self._head_room = 0 if text else self._head_room - _size(start)
        if text:
            size = _size(text)
            self._tail.append((text, size))
            self._tail_bytes += size
            while self._tail_bytes - self._tail[0][1] >= self._limit_tail:
                oldest, size = self._tail.popleft()
                self._tail_bytes -= size
                self._dropped += len(oldest)

    def _render(self) -> tuple[str, int]:
        self._catch_up()
        if self._rendered is None:
            parts = [*(text for text, _ in self._tail), *self._settled, self._window()]
            head, rest = "".join(self._head), "".join(parts)
            if self._head_room:
                start, rest = _cut(rest, self._head_room)
                head += start
            tail = _cut_from_end(rest, self._limit_tail)
            dropped = self._dropped + len(rest) - len(tail)
            notice = f"\n... {dropped:,} characters left out ...\n" if dropped else ""
            self._rendered = (head + notice + tail, dropped)
        return self._rendered


class LiveText:
    """Turns the same stream into pieces that make sense when appended one to the other.

    No piece contains an escape code. Redraws within a piece are folded; where a piece goes over
    what an earlier one showed on the same line it says so with one carriage return or with
    backspaces, and that is all a reader need understand. What moves further up is shown again, and
    what an unfinished redraw has not reached yet is left for it to write.
    """

    def __init__(self, unfinished: str = "") -> None:
        """Start at the beginning of a line, in the middle of a sequence if that is given."""
        self._unfinished = unfinished
        self._at_line_start = True

    def feed(self, text: str) -> str:
        """The piece to append for the next text, maybe empty."""
        if not self._unfinished and text.isascii() and _CONTROL.search(text) is None:
            if text:
                self._at_line_start = text[-1] == "\n"
            return text
        text, self._unfinished = _split_unfinished(self._unfinished + _seven_bit(text))
        text = _WITHOUT_EFFECT.sub("", text).replace("\r\n", "\n")
        if text.endswith("\r"):
            text = text.rstrip("\r")
            self._unfinished = "\r" + self._unfinished
        line, newline, lines = text.partition("\n")
        backspaces = len(line) - len(line.lstrip("\b"))
        before, returned, after = line[backspaces:].partition("\r")
        if returned:
            mark = "" if self._at_line_start and not before else "\r"
            piece = strip_ansi(before) + mark + _up_to_cursor(after + newline + lines)
        else:
            piece = _up_to_cursor(before + newline + lines)
        if not self._at_line_start:
            piece = "\b" * backspaces + piece
        if piece:
            self._at_line_start = piece[-1] == "\n"
        return piece


def redraws(text: str) -> bool:
    """Whether the text goes back over what was written, as progress displays do."""
    if "\r" not in text and "\x1b" not in text and "\b" not in text:
        return False
    return _REDRAW.search(text) is not None


def strip_ansi(text: str) -> str:
    """The text as a terminal would show it, of any length."""
    if text.isascii() and _CONTROL.search(text) is None:
        return text
    terminal = TerminalText(sys.maxsize, 0)
    terminal.feed(text)
    return terminal.text()


def _up_to_cursor(text: str) -> str:
    """The text as a terminal would show it, its last line only as far as it is rewritten."""
    if text.isascii() and _CONTROL.search(text) is None:
        return text
    terminal = TerminalText(sys.maxsize, 0)
    terminal.feed(text)
    shown = terminal.text()
    return shown[: len(shown) - terminal.after_cursor]


def clean_text(text: str) -> str:
    """The text with lone surrogates replaced, so that it can be encoded as UTF-8."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _seven_bit(text: str) -> str:
    return text if text.isascii() else _C1.sub(_as_escape, clean_text(text))


def _split_unfinished(text: str) -> tuple[str, str]:
    """Separate a sequence whose end has not come yet; what a string says is not kept."""
    last = text.rfind("\x1b")
    starts = [last]
    if 0 < last == len(text) - 1:
        starts.insert(0, text.rfind("\x1b", 0, last))
    for start in starts:
        found = _UNFINISHED.fullmatch(text, start) if start >= 0 else None
        if found is not None:
            string, terminator = found.groups()
            unfinished = found[0] if string is None else "\x1b" + string[0] + (terminator or "")
            return text[:start], unfinished
    return text, ""


def _as_escape(control: re.Match[str]) -> str:
    """The two-character form of an eight-bit control (ECMA-48, 5.3)."""
    return "\x1b" + chr(ord(control[0]) - 0x40)


def _overlay(redraws: list[str]) -> str:
    """What texts leave behind that are written one over the other from the same column."""
    shown = redraws[-1]
    for earlier in reversed(redraws):
        if len(earlier) > len(shown):
            shown += earlier[len(shown) :]
    return shown


def _columns(row: str | bytearray) -> int:
    return len(row) if isinstance(row, str) else len(row) // 4


def _join(rows: list[str | bytearray], wrapped: list[bool]) -> str:
    """The rows as text, each with its newline unless it goes on in the next."""
    texts = [row if isinstance(row, str) else row.decode("utf-32-le") for row in rows]
    if True not in wrapped:
        return "\n".join(texts) + "\n"
    return "".join(
        text if goes_on else text + "\n" for text, goes_on in zip(texts, wrapped, strict=True)
    )


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _cut(text: str, size: int) -> tuple[str, str]:
    """The longest beginning of at most `size` bytes, and the rest."""
    if 4 * len(text) <= size or _size(text) <= size:
        return text, ""
    start = text[:size] if text.isascii() else text.encode()[:size].decode(errors="ignore")
    return start, text[len(start) :]


def _cut_from_end(text: str, size: int) -> str:
    """The longest end of at most `size` bytes."""
    surplus = _size(text) - size
    if surplus <= 0:
        return text
    return text[surplus:] if text.isascii() else text.encode()[surplus:].decode(errors="ignore")
