"""Where the model of some settings lies."""

from __future__ import annotations

import os
from pathlib import Path

from hetrun.config import Settings, default_model


def model_path(settings: Settings) -> Path:
    """The model's file or folder; one that is only on the hub is brought."""
    if settings.model is None:
        return default_model()
    path = Path(settings.model).expanduser()
    if os.path.exists(path):  # which also refuses what cannot be a path
        return path
    from hetrun.loader.hub.resolve import find  # imported on use: most models are files

    return find(settings.model, not settings.offline, pictures=settings.mmproj is None)
