"""Jupyter messages as bytes. Above: every part that sends. Below: jupyter_client.

jupyter_client encodes strictly: one lone surrogate (`print(chr(0xd800))`, a file name that is
not UTF-8) and the message is lost, with whatever waited behind it. Here it is replaced.
"""

import itertools
import json
import os
from typing import Any

import jupyter_client.session
from jupyter_client.jsonutil import json_clean, json_default
from traitlets import Callable

try:
    import orjson
except ModuleNotFoundError:
    _fast = None
else:
    _OPTIONS = orjson.OPT_NAIVE_UTC | orjson.OPT_UTC_Z

    def _fast(value: Any) -> bytes:
        return orjson.dumps(value, default=json_default, option=_OPTIONS)


_strict = json.JSONEncoder(default=json_default, ensure_ascii=False, allow_nan=False)


def encode_text(text: str) -> bytes:
    """Return UTF-8, with U+FFFD in place of each surrogate that has no partner."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def pack(value: Any) -> bytes:
    """Return a message part as JSON."""
    if _fast is not None:
        try:
            return _fast(value)
        except (TypeError, ValueError):
            pass
    try:
        text = _strict.encode(value)
    except (TypeError, ValueError):
        text = _strict.encode(json_clean(value))
    return encode_text(text)


class Session(jupyter_client.session.Session):
    """A session that encodes with replacement.

    Whether a forked child may send is decided where it sends (`iopub.py`), hence no `check_pid`.
    """

    pack = Callable(pack)
    check_pid = False

    def __init__(self, **kwargs: Any) -> None:
        self._numbers = itertools.count()
        super().__init__(**kwargs)

    @property
    def msg_id(self) -> str:
        """A new message id; unlike the inherited one never the same in two threads."""
        return f"{self.session}_{os.getpid()}_{next(self._numbers)}"
