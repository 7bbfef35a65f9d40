"""Each architecture, from a tiny random file that the test writes."""
