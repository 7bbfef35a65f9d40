"""The endpoints under `/v1/responses`: input, output, and stored responses."""
