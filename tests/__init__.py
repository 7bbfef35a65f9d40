"""The test suite; what each folder needs stands in CONTRIBUTING.md."""
