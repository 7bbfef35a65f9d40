"""From messages to the text the model was trained on, by the model's own chat template.

A template is a program that came with a file from a stranger. `ChatTemplate` is its text and where it comes
from; `renderer.TemplateWorker` runs it, in a process that can be killed (ADR 0014).

The child imports this package too, and its start is on the way to the first word: nothing heavy in here.
"""

from __future__ import annotations

from hetrun.text.chat.messages import checked_messages
from hetrun.text.chat.template import ChatTemplate

__all__ = ["ChatTemplate", "checked_messages"]
