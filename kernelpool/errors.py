"""The error tree of this package. Above: everything. Below: nothing.

    KernelPoolError
    ├── ConfigurationError      the host or a setting cannot carry what was asked
    ├── EngineError             the container engine refused or did not answer
    │   ├── EngineUnreachable
    │   ├── ImageMissing
    │   └── ContainerGone
    ├── ImageBuildError         the kernel image or environment could not be made
    ├── SlotError               a slot's file system could not be made, mounted or removed
    ├── KernelStartError        the kernel did not become ready
    ├── PoolExhausted           every slot is taken and no more may be made
    ├── KernelClosed            the kernel was shut down while or before it was asked
    └── WorkspaceError          a file operation in a workspace was refused
        ├── NameRefused
        ├── FileMissing
        └── WorkspaceFull

A user's exception is none of these: it is an `ErrorOutput` event.
"""

from __future__ import annotations


class KernelPoolError(Exception):
    """Something of ours went wrong; the message is written for the person who reads it."""


class ConfigurationError(KernelPoolError):
    """The host or a setting cannot carry what was asked; the message names the cure."""


class EngineError(KernelPoolError):
    """The container engine refused or did not answer."""


class EngineUnreachable(EngineError):
    """No container engine answers at the address."""


class ImageMissing(EngineError):
    """The kernel image is not in the engine; `kernelpool image build` makes it."""


class ContainerGone(EngineError):
    """The container does not exist (any more)."""


class ImageBuildError(KernelPoolError):
    """The kernel image or environment could not be made."""


class SlotError(KernelPoolError):
    """A slot's file system could not be made, mounted or removed."""


class KernelStartError(KernelPoolError):
    """The kernel did not become ready; the message carries the end of what it printed."""


class PoolExhausted(KernelPoolError):
    """Every slot is taken and no more may be made."""


class KernelClosed(KernelPoolError):
    """The kernel was shut down."""


class WorkspaceError(KernelPoolError):
    """A file operation in a workspace was refused."""


class NameRefused(WorkspaceError):
    """The file name is empty, too long or has no usable part."""


class FileMissing(WorkspaceError):
    """There is no regular file at that path."""


class WorkspaceFull(WorkspaceError):
    """The workspace's disk quota is used up."""
