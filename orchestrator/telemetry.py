"""What operators see: logs, request ids, and counters in Prometheus' text format.

Above: app.py, __main__.py. Below: nothing of ours. Logs name an event and carry fields; code, file
contents, file names and keys are never among them.
"""

from __future__ import annotations

import bisect
import logging
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TextIO, TypeVar

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LATENCY_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1, 5, 30, 120, 600)
"""Upper bounds in seconds. Below 10 ms is a warm cell, 600 s is a client's read timeout."""

CLIENT_CLOSED: Final = 499
"""Status that a request is counted under when its client left before the answer."""


def configure_logging(
    level: str = "info", *, as_json: bool | None = None, stream: TextIO | None = None
) -> None:
    """Set structlog and the standard library up, once per process.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        as_json: One JSON object per line; by default when the stream is no terminal.
        stream: Where lines go; standard error by default.
    """
    out = stream or sys.stderr
    render: Any = (
        structlog.processors.JSONRenderer()
        if (not out.isatty() if as_json is None else as_json)
        else structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    )
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                render,
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)


class Counter:
    """A number per set of label values that only grows."""

    kind: Final = "counter"

    def __init__(self, name: str, meaning: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.meaning = meaning
        self._labels = tuple(labels)
        self._values: dict[tuple[str, ...], float] = {}

    def add(self, *label_values: str, amount: float = 1) -> None:
        """Count something under these label values."""
        self._values[label_values] = self._values.get(label_values, 0) + amount

    def lines(self) -> list[str]:
        """The samples, one a line."""
        return [
            f"{self.name}{_labels(self._labels, values)} {_number(value)}"
            for values, value in sorted(self._values.items())
        ]


class Gauge:
    """A number read when somebody asks."""

    kind: Final = "gauge"

    def __init__(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        self.name = name
        self.meaning = meaning
        self._read = read

    def lines(self) -> list[str]:
        """The sample."""
        return [f"{self.name} {_number(self._read())}"]


class Histogram:
    """How often a value lay below each bound, per set of label values."""

    kind: Final = "histogram"

    def __init__(
        self,
        name: str,
        meaning: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = LATENCY_BUCKETS,
    ) -> None:
        self.name = name
        self.meaning = meaning
        self._labels = tuple(labels)
        self._buckets = tuple(buckets)
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, value: float, *label_values: str) -> None:
        """Count one value."""
        counts = self._counts.get(label_values)
        if counts is None:
            counts = self._counts[label_values] = [0] * (len(self._buckets) + 1)
        counts[bisect.bisect_left(self._buckets, value)] += 1
        self._sums[label_values] = self._sums.get(label_values, 0.0) + value

    def lines(self) -> list[str]:
        """The cumulative buckets, the sum and the count."""
        lines = []
        for values, counts in sorted(self._counts.items()):
            total = 0
            for bound, count in zip((*self._buckets, float("inf")), counts, strict=True):
                total += count
                label = _labels((*self._labels, "le"), (*values, _number(bound)))
                lines.append(f"{self.name}_bucket{label} {total}")
            own = _labels(self._labels, values)
            lines.append(f"{self.name}_sum{own} {_number(self._sums[values])}")
            lines.append(f"{self.name}_count{own} {total}")
        return lines


Metric = Counter | Gauge | Histogram
M = TypeVar("M", bound=Metric)


class Metrics:
    """Every metric of this process."""

    def __init__(self) -> None:
        self._metrics: list[Metric] = []
        self._in_flight = 0
        self.requests = self._add(
            Counter(
                "kernelpool_http_requests_total",
                "HTTP requests answered.",
                ("method", "route", "status"),
            )
        )
        self.latency = self._add(
            Histogram(
                "kernelpool_http_request_seconds",
                "Seconds from the request's head to the end of its answer.",
                ("route",),
            )
        )
        self.executions = self._add(
            Counter(
                "kernelpool_executions_total",
                "Executions whose end was answered to a caller.",
                ("status", "failure"),
            )
        )
        self.uploaded = self._add(
            Counter("kernelpool_uploaded_bytes_total", "Bytes of files taken from callers.")
        )
        self._add(
            Gauge(
                "kernelpool_http_requests_in_flight",
                "HTTP requests being answered.",
                lambda: self._in_flight,
            )
        )

    def render(self) -> str:
        """The text that Prometheus reads, version 0.0.4."""
        lines: list[str] = []
        for metric in self._metrics:
            lines.append(f"# HELP {metric.name} {metric.meaning}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            lines.extend(metric.lines())
        return "\n".join(lines) + "\n"

    def begun(self) -> None:
        """A request came in."""
        self._in_flight += 1

    def ended(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self._in_flight -= 1
        self.requests.add(method, route, str(status))
        self.latency.observe(seconds, route)

    def _add(self, metric: M) -> M:
        self._metrics.append(metric)
        return metric


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    pairs = ",".join(
        f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)
    )
    return f"{{{pairs}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return repr(int(value)) if value == int(value) else repr(value)


class RequestLog:
    """The outermost layer: gives every request an id, counts it, and logs how it went."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._log = structlog.get_logger("http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(16)}"
        header = (b"x-request-id", request_id.encode())
        status = CLIENT_CLOSED

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], header]
            await send(message)

        structlog.contextvars.bind_contextvars(request_id=request_id)
        self._metrics.begun()
        begun = time.perf_counter()
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - begun
            route = scope.get("route")
            path: str = getattr(route, "path_format", None) or "unmatched"
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.ended(method, path, status, seconds)
            log = self._log.info if status >= 400 else self._log.debug
            log(
                "request answered",
                method=scope["method"],
                route=path,
                status=status,
                seconds=round(seconds, 6),
            )
            structlog.contextvars.unbind_contextvars("request_id")


_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
