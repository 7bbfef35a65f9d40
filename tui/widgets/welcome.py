"""What stands where the conversation will be: loading progress, then the model."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import ProgressBar, Static

from hetrun.events import ModelInfo


class Welcome(Vertical):
    """Progress while the model loads, then its name and size."""

    def compose(self) -> ComposeResult:
        yield Static("Loading the model", classes="title", markup=False)
        yield ProgressBar(total=1.0, show_eta=False)
        yield Static("You can write your first message already.", classes="detail", markup=False)

    def progressed(self, fraction: float) -> None:
        self.query_one(ProgressBar).update(progress=fraction)

    async def loaded(self, info: ModelInfo) -> None:
        await self.query(ProgressBar).remove()
        self.query_one(".title", Static).update(info.id)
        size = f"{_count(info.parameters)} parameters in {_bytes(info.file_bytes)}"
        self.query_one(".detail", Static).update(
            f"{info.architecture} · {size} · {info.context} tokens of context"
        )


def _count(n: int) -> str:
    return f"{n / 1e9:.1f} B" if n >= 1e9 else f"{n / 1e6:.0f} M"


def _bytes(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"
