"""What every measurement is given: the runtime, the image, how often. Above: the measurements.

Below: plain.py, product.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.plain import PlainKernel, Starter, plain_kernel
from benchmarks.product import Product, product


@dataclass(frozen=True, slots=True)
class Bench:
    """One run's circumstances."""

    runtime: str
    image: str
    environments: Path
    repeat: int
    """Repetitions of each measurement."""
    starter: Starter

    def turns(self, count: int, *, within: float) -> Iterator[int]:
        """Count repetitions: `count` of them, fewer on a machine too slow for that, at least one.

        Args:
            count: As many as are wanted.
            within: Seconds after which no other is begun.
        """
        deadline = time.monotonic() + within
        for turn in range(count):
            if turn and time.monotonic() > deadline:
                return
            yield turn

    def plain(self) -> AbstractAsyncContextManager[PlainKernel]:
        """A plain kernel."""
        return plain_kernel(self.starter)

    def product(
        self,
        *,
        pool_size: int,
        settings: Mapping[str, str] | None = None,
        tapped: bool = False,
    ) -> AbstractAsyncContextManager[Product]:
        """The service, with that many warm slots kept; `tapped`: its calls to Docker are noted."""
        return product(
            self.runtime,
            self.image,
            self.environments,
            pool_size=pool_size,
            settings=settings,
            tapped=tapped and self.runtime == "docker",
        )
