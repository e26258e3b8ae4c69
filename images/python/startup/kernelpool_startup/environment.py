"""The process environment that user code and its child processes find.

Above: `__main__.py`, which calls `prepare` before IPython is imported. Below: the operating system.
A sandbox runs as a uid without a passwd entry on a read-only root, so names, a home and caches are
made here; what is meant for the kernel alone is read and then removed.
"""

import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

JOURNAL_CELL_BYTES = 32 * 1024 * 1024
"""Journal bytes of one cell when KERNELPOOL_JOURNAL_CELL_BYTES does not say otherwise."""

WORKSPACE = "/mnt/data"

FIGURE_DPI = 110
"""Between matplotlib's 100 and the size where one figure costs a model many image tokens."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the host told this kernel through KERNELPOOL_* variables."""

    journal: str | None
    journal_cell_bytes: int
    home: str | None
    font_cache: str | None
    workspace: str


def read_settings(environ: MutableMapping[str, str]) -> Settings:
    """Read the kernel's own variables and remove them, so that no child process inherits them."""
    settings = Settings(
        journal=environ.get("KERNELPOOL_JOURNAL") or None,
        journal_cell_bytes=int(environ.get("KERNELPOOL_JOURNAL_CELL_BYTES") or JOURNAL_CELL_BYTES),
        home=environ.get("KERNELPOOL_HOME") or None,
        font_cache=environ.get("KERNELPOOL_FONT_CACHE") or None,
        workspace=environ.get("KERNELPOOL_WORKSPACE") or WORKSPACE,
    )
    for name in [name for name in environ if name.startswith(("KERNELPOOL_", "JPY_"))]:
        del environ[name]
    return settings


def prepare() -> Settings:
    """Make the process fit for user code. Called once, before IPython is imported."""
    settings = read_settings(os.environ)
    if not sys.flags.safe_path:
        del sys.path[0]  # `-m` put the working directory there: its files must not shadow ours
    sys.argv = [""]  # as in an interactive Python, so that user code may parse its arguments
    home = _make_home(settings.home)
    _set_names(home)
    _set_library_variables(home)
    _make_matplotlib_directory(home / ".config" / "matplotlib", settings.font_cache)
    os.umask(0o022)
    if Path(settings.workspace).is_dir():
        os.chdir(settings.workspace)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return settings


def _make_home(wanted: str | None) -> Path:
    """Return a directory that only this uid can enter."""
    home = Path(wanted) if wanted else Path(tempfile.gettempdir(), f"home-{os.getuid()}")
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="home-"))
    if not wanted and (home.is_symlink() or home.stat().st_uid != os.getuid()):
        return Path(tempfile.mkdtemp(prefix="home-"))
    return home


def _set_names(home: Path) -> None:
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = "user"
    os.environ.update(
        HOME=str(home),
        USER=user,
        LOGNAME=user,
        XDG_CACHE_HOME=str(home / ".cache"),
        XDG_CONFIG_HOME=str(home / ".config"),
        XDG_DATA_HOME=str(home / ".local" / "share"),
        XDG_STATE_HOME=str(home / ".local" / "state"),
    )


def _set_library_variables(home: Path) -> None:
    os.environ.update(
        IPYTHONDIR=str(home / ".ipython"),
        MPLBACKEND="module://matplotlib_inline.backend_inline",
        MPLCONFIGDIR=str(home / ".config" / "matplotlib"),
        PLOTLY_RENDERER="plotly_mimetype",
        PYDEVD_DISABLE_FILE_VALIDATION="1",
    )


def _make_matplotlib_directory(directory: Path, font_cache: str | None) -> None:
    """Give matplotlib its defaults and a font cache, so that it need not scan for fonts.

    The defaults are a file because matplotlib_inline applies its own only when the first figure is
    made, over what the user had set by then.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    defaults = directory / "matplotlibrc"
    if not defaults.exists():
        defaults.write_text(f"figure.dpi: {FIGURE_DPI}\n", encoding="utf-8")
    if font_cache is None:
        return
    for source in Path(font_cache).glob("fontlist-*.json"):
        target = directory / source.name
        if not target.exists():
            shutil.copyfile(source, target)
