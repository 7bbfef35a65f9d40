"""Commands that tell of models and of the machine, and change nothing."""
