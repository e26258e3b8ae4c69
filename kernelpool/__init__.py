"""kernelpool: live IPython kernels in sandboxes. Knows no HTTP, no Redis, no agent.

The main path: `Pool.lease` gives a session a slot with a kernel; `Kernel.execute` runs code and
yields events. These are the public names, nothing else is.
"""

from kernelpool.errors import (
    ConfigurationError,
    ContainerGone,
    EngineError,
    EngineUnreachable,
    FileMissing,
    ImageBuildError,
    ImageMissing,
    KernelClosed,
    KernelPoolError,
    KernelStartError,
    NameRefused,
    PoolExhausted,
    SlotError,
    WorkspaceError,
    WorkspaceFull,
)
from kernelpool.events import (
    ClearOutput,
    DisplayData,
    Done,
    ErrorOutput,
    Event,
    ExecuteResult,
    Failure,
    FailureCode,
    InputRequest,
    KernelEnd,
    Notice,
    Output,
    Started,
    Stream,
    UpdateDisplay,
    Usage,
)
from kernelpool.kernel import Kernel
from kernelpool.pool import Lease, Pool
from kernelpool.profile import MEMORY_TIERS, Limits, Profile
from kernelpool.slot import Slot, SlotStore
from kernelpool.tasks import Tasks
from kernelpool.workspace import (
    OpenFile,
    Snapshot,
    Workspace,
    clean_name,
    diff,
    display_paths,
)

__all__ = [
    "MEMORY_TIERS",
    "ClearOutput",
    "ConfigurationError",
    "ContainerGone",
    "DisplayData",
    "Done",
    "EngineError",
    "EngineUnreachable",
    "ErrorOutput",
    "Event",
    "ExecuteResult",
    "Failure",
    "FailureCode",
    "FileMissing",
    "ImageBuildError",
    "ImageMissing",
    "InputRequest",
    "Kernel",
    "KernelClosed",
    "KernelEnd",
    "KernelPoolError",
    "KernelStartError",
    "Lease",
    "Limits",
    "NameRefused",
    "Notice",
    "OpenFile",
    "Output",
    "Pool",
    "PoolExhausted",
    "Profile",
    "Slot",
    "SlotError",
    "SlotStore",
    "Snapshot",
    "Started",
    "Stream",
    "Tasks",
    "UpdateDisplay",
    "Usage",
    "Workspace",
    "WorkspaceError",
    "WorkspaceFull",
    "clean_name",
    "diff",
    "display_paths",
]
