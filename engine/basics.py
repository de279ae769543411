"""What every part of a scheduler is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.batch import Batch, PageExport, PageImport
from engine.config import EngineConfig
from engine.store import PageStore
from fsm.trace import Sink


class LifecycleBug(AssertionError):  # noqa: N818 - it names what it is
    """An invariant is broken. Never an operating error: the process must not go on."""


class Runner(Protocol):
    """Takes work in order and returns at once; results come back through the loop."""

    def launch(self, work: Batch | PageExport | PageImport) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the scheduler knows of the model."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    weights_digest: str
    kv_layout: str = ""
    """How a page is laid out, in words; equal only where pages can be exchanged."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What every scheduler is put together from, whatever its role.

    ``kv_pages`` is the size of the page pool, ``clock`` counts seconds, ``boot_id`` names the
    process, ``node`` its place in the deployment (``ROLE-0`` where it has no name), and ``trace``
    takes the lines of its trace.
    """

    config: EngineConfig
    model: ModelFacts
    kv_pages: int
    clock: Callable[[], float]
    runner: Runner
    store: PageStore | None = None
    boot_id: str = "boot"
    node: str = ""
    trace: Sink | None = None
