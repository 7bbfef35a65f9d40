"""The parts of a screen, one file each."""
