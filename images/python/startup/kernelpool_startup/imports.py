"""Something to do once a module has been imported, without importing it.

Above: `threads.py` and `libraries.py`. Below: the import system.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], None]

_hooks: dict[str, Hook] = {}


class _HookFinder:
    """Finds nothing by itself; lets the loaders of awaited modules call their hook."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        hook = _hooks.pop(name, None)
        if hook is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                _call_after_execution(spec.loader, hook)
                return spec
        _hooks[name] = hook  # not installed, or not yet
        return None


def after_import(name: str, hook: Hook) -> None:
    """Call a hook with the module when it is imported, or now if it has been."""
    if name in sys.modules:
        hook(sys.modules[name])
        return
    _hooks[name] = hook
    if not any(isinstance(finder, _HookFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _HookFinder())


def _call_after_execution(loader: Any, hook: Hook) -> None:
    execute = loader.exec_module

    def execute_and_call(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        hook(module)

    loader.exec_module = execute_and_call
