"""One package per backend; `hetrun.backend.registry` finds them by name and imports them on use."""
