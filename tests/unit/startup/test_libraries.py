"""Libraries that show things do so for a reader without a terminal or a browser."""

from collections.abc import Callable, Coroutine

from .started_kernel import StartedKernel, StartKernel

Needs = Callable[[str], Coroutine[None, None, None]]


async def test_figures_left_open_are_shown_once_at_the_end_of_their_cell(
    needs: Needs, kernel: StartedKernel
) -> None:
    await needs("matplotlib")
    outcome = await kernel.run("import matplotlib.pyplot as plt\nplt.plot([1, 2]); print('end')")
    assert len(outcome.pictures) == 1
    assert outcome.stderr == ""
    assert (await kernel.run("1")).pictures == []
    failed = await kernel.run("plt.plot([1, 2])\n1 / 0")
    assert len(failed.pictures) == 1
    awaited = await kernel.run("import asyncio\nplt.plot([1]); await asyncio.sleep(0)")
    assert len(awaited.pictures) == 1


async def test_show_shows_at_that_point(needs: Needs, kernel: StartedKernel) -> None:
    await needs("matplotlib")
    outcome = await kernel.run(
        "import matplotlib.pyplot as plt\n"
        "for i in range(4): plt.figure(); plt.plot([i]); print(i); plt.show()\nprint('end')"
    )
    assert len(outcome.pictures) == 4
    types = [m.type for m in outcome.published if m.type in ("stream", "display_data")]
    assert types == ["stream", "display_data"] * 4 + ["stream"]


async def test_figures_have_a_sensible_size_that_the_user_can_change(
    needs: Needs, kernel: StartedKernel
) -> None:
    await needs("matplotlib")
    assert (
        await kernel.run("import matplotlib.pyplot as plt; plt.rcParams['figure.dpi']")
    ).result == "110.0"
    changed = "plt.rcParams['figure.dpi'] = 50; print(plt.figure().dpi); plt.close('all')"
    assert (await kernel.run(changed)).stdout == "50.0\n"


async def test_a_script_may_plot_too(needs: Needs, kernel: StartedKernel) -> None:
    await needs("matplotlib")
    outcome = await kernel.run(
        "import subprocess, sys\n"
        "code = 'import matplotlib.pyplot as p; p.plot([1]); p.show(); p.savefig(\"a.png\")'\n"
        "subprocess.run([sys.executable, '-c', code]).returncode"
    )
    assert outcome.result == "0"
    assert outcome.stderr == ""


async def test_a_reset_closes_figures(needs: Needs, kernel: StartedKernel) -> None:
    await needs("matplotlib")
    await kernel.run("%config InlineBackend.close_figures = False\nimport matplotlib.pyplot as plt")
    await kernel.run("plt.figure()")
    outcome = await kernel.run("import matplotlib.pyplot as plt; plt.get_fignums()", reset=True)
    assert outcome.result == "[]"


async def test_the_font_cache_is_copied_to_where_matplotlib_may_write(
    start_kernel: StartKernel,
) -> None:
    async with start_kernel() as source:
        await source.run("open('fontlist-v999.json', 'w').write('{}')")
        async with start_kernel(KERNELPOOL_FONT_CACHE=f"{source.directory}/data") as kernel:
            outcome = await kernel.run("import os; sorted(os.listdir(os.environ['MPLCONFIGDIR']))")
            assert outcome.result == "['fontlist-v999.json', 'matplotlibrc']"


async def test_a_plotly_figure_is_shown_as_data_without_a_browser(
    needs: Needs, kernel: StartedKernel
) -> None:
    await needs("plotly")
    await needs("nbformat")
    outcome = await kernel.run(
        "import plotly.graph_objects as go\ngo.Figure(go.Scatter(y=[1, 2])).show()"
    )
    assert outcome.error is None
    shown = next(m for m in outcome.published if m.type == "display_data")
    assert "application/vnd.plotly.v1+json" in shown.content["data"]


async def test_wide_tables_are_not_cut(needs: Needs, kernel: StartedKernel) -> None:
    await needs("pandas")
    outcome = await kernel.run(
        "import sys; print('pandas' in sys.modules)\nimport pandas as pd\n"
        "print(pd.DataFrame([[0.0] * 40] * 3, columns=[f'column{i}' for i in range(40)]))"
    )
    assert outcome.stdout.startswith("False\n")
    assert all(f"column{i}" in outcome.stdout for i in range(40))
    assert "..." not in outcome.stdout


async def test_a_hook_runs_once_after_its_module_and_leaves_no_trace(
    kernel: StartedKernel,
) -> None:
    outcome = await kernel.run(
        "from kernelpool_startup.imports import after_import\n"
        "import importlib, inspect, sys\n"
        "open('first.py', 'w').write('value = 1')\n"
        "calls = []\n"
        "after_import('first', lambda module: calls.append(module.value))\n"
        "after_import('absent', calls.append)\n"
        "after_import('json', lambda module: calls.append(module.__name__))\n"
        "import first; importlib.reload(first)\n"
        "try: import absent\nexcept ModuleNotFoundError: calls.append('absent')\n"
        "calls, inspect.getsource(first), 'exec_module' in vars(first.__loader__)"
    )
    assert outcome.result == "(['json', 1, 'absent'], 'value = 1\\n', False)"
