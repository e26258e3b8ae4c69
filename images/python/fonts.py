"""Give matplotlib a font with Chinese, Japanese and Korean glyphs, whatever style is in force.

Run once by the environment's own Python while the image or the environment is built:

    python fonts.py CACHE_DIRECTORY

A fallback in matplotlibrc would last until the first `seaborn.set_theme()` or style sheet, which
set the font family again. So the font is put among matplotlib's own fonts, and matplotlib's lookup
ends every list of fonts with it. Child processes (`!python plot.py`) have it too.

The font cache names only fonts inside matplotlib, relative to it, so it holds wherever the
environment is mounted.
"""

import dataclasses
import importlib.util
import os
import shutil
import sys
from pathlib import Path

FONT_PACKAGE = "paperang_p2_fonts_cjk"
FONT_FILE = "wqy-microhei.ttc"
FONT_NAME = "WenQuanYi Micro Hei"

OTHER_NAMES = (
    "AppleGothic", "Arial Unicode MS", "FangSong", "Heiti SC", "Heiti TC", "Hiragino Sans",
    "Hiragino Sans GB", "IPAexGothic", "IPAGothic", "KaiTi", "Malgun Gothic", "Meiryo",
    "Microsoft JhengHei", "Microsoft YaHei", "MS Gothic", "NanumGothic", "Noto Sans CJK JP",
    "Noto Sans CJK KR", "Noto Sans CJK SC", "Noto Sans CJK TC", "Noto Sans JP", "Noto Sans KR",
    "Noto Sans SC", "Noto Sans TC", "PingFang SC", "PingFang TC", "SimHei", "SimSun",
    "Source Han Sans CN", "Source Han Sans SC", "STHeiti", "STSong", "WenQuanYi Zen Hei",
    "Yu Gothic",
)  # fmt: skip
"""Fonts that programs ask for by name to get these glyphs; asked for here, this one answers."""

PATCH = f'''

# kernelpool: every list of fonts ends with one that has Chinese, Japanese and Korean glyphs.
def _end_with_cjk(find):
    cjk = FontPath(_cached_realpath(cbook._get_data_path("fonts", "ttf", "{FONT_FILE}")), 0)

    @functools.wraps(find)
    def find_fonts(self, prop, fontext="ttf", *args, **kwargs):
        paths = find(self, prop, fontext, *args, **kwargs)
        return paths if fontext != "ttf" or cjk in paths else [*paths, cjk]

    return find_fonts


FontManager._find_fonts_by_props = _end_with_cjk(FontManager._find_fonts_by_props)
'''


def directory_of(package: str) -> Path:
    """Return where a package is installed, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"fonts.py: {package} is not installed")
    return Path(spec.origin).parent


def write_beside(path: Path, text: str) -> None:
    """Replace a file by a new one: the old may be a hard link into an installer's cache."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.chmod(0o644)
    new.replace(path)


def install() -> None:
    """Copy the font and extend the lookup."""
    matplotlib = directory_of("matplotlib")
    font = matplotlib / "mpl-data" / "fonts" / "ttf" / FONT_FILE
    shutil.copyfile(directory_of(FONT_PACKAGE) / "fonts" / FONT_FILE, font)
    font.chmod(0o644)
    lookup = matplotlib / "font_manager.py"
    source = lookup.read_text(encoding="utf-8")
    if PATCH not in source:
        if "import functools" not in source:
            source = source.replace("\nimport ", "\nimport functools\nimport ", 1)
        write_beside(lookup, source + PATCH)


def write_cache(directory: Path) -> None:
    """Write the font cache that the kernel's start-up code copies to a writable place."""
    directory.mkdir(parents=True, exist_ok=True)
    os.environ["MPLCONFIGDIR"] = str(directory)
    from matplotlib import cbook, font_manager

    manager = font_manager.FontManager()
    own = str(cbook._get_data_path("fonts"))
    manager.ttflist = [entry for entry in manager.ttflist if entry.fname.startswith(own)]
    manager.afmlist = [entry for entry in manager.afmlist if entry.fname.startswith(own)]
    cjk = next(entry for entry in manager.ttflist if entry.name == FONT_NAME)
    manager.ttflist += [
        # There is one weight; named as both, or each bold title would print a warning.
        dataclasses.replace(cjk, name=name, weight=weight)
        for name in OTHER_NAMES
        for weight in (400, 700)
    ]
    for stale in directory.iterdir():
        if stale.is_file():
            stale.unlink()
    cache = directory / f"fontlist-v{manager.__version__}.json"
    font_manager.json_dump(manager, cache)
    cache.chmod(0o644)


if __name__ == "__main__":
    install()
    write_cache(Path(sys.argv[1]))
