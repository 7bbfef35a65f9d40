"""The `hetrun` command, its options, and what it says of models."""
