"""Models by name, against a stand-in of the hub that this machine runs, and stores that the tests lay out."""
