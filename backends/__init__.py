"""One package per backend; `hetrun.registry` finds them by name and imports them on use."""
