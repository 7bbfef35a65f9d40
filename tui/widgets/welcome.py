"""What stands where the conversation will be: loading progress, then the model."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import ProgressBar, Static

from hetrun.client.events import ModelInfo
from hetrun.system.terminal_text import visible
from hetrun.system.units import format_bytes


class Welcome(Vertical):
    """Progress while the model loads, then its name and size."""

    def __init__(self) -> None:
        super().__init__()
        # Kept rather than queried: the first message may remove them at any moment.
        self._title = Static("Loading the model", classes="title", markup=False)
        self._bar = ProgressBar(total=1.0, show_eta=False)
        self._detail = Static("You can write your first message already.", classes="detail", markup=False)

    def compose(self) -> ComposeResult:
        yield self._title
        yield self._bar
        yield self._detail

    def begin(self) -> None:
        """A model loads."""
        self._bar.display = True
        self._title.update("Loading the model")
        self._detail.update("You can write your first message already.")

    def progressed(self, fraction: float) -> None:
        self._bar.update(progress=fraction)

    def loaded(self, info: ModelInfo) -> None:
        self._bar.display = False
        self._title.update(visible(info.id))
        self._detail.update(f"{' · '.join(_known(info))}\nchat template: {visible(info.template_origin)}")


def _known(info: ModelInfo) -> list[str]:
    """What is known of a model; a server says little of one that it has not loaded."""
    size = f"{_count(info.parameters)} parameters" if info.parameters else ""
    if info.file_bytes:
        size += f"{' in ' if size else ''}{format_bytes(info.file_bytes)}"
    context = f"{info.context} tokens of context" if info.context else ""
    return [part for part in (visible(info.architecture), size, context) if part]


def _count(n: int) -> str:
    return f"{n / 1e9:.1f} B" if n >= 1e9 else f"{n / 1e6:.0f} M"
