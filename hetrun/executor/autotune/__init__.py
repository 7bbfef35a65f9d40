"""The autotuner keeps the plan of a model good while it runs."""
