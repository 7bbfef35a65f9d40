"""Schemathesis against a real `hetrun serve` with a tiny model, by the server's own OpenAPI document.

    make fuzz-api                                  ten minutes
    python -m tests.tools.schemathesis_run --seconds 60

Schemathesis is not among the tests' packages, for it brings a plugin along that every run of pytest would
load: `make fuzz-api` installs it beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support import qwen

ROOT = Path(__file__).parents[2]
# What Schemathesis looks at, without two checks that this server does not mean to pass. What fits the
# document may be refused all the same (positive_data_acceptance): a token that the model lacks, a schema
# or a grammar that cannot be compiled, a field that needs another one, a full context. And unknown
# fields and queries are ignored (negative_data_rejection).
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
# 504 is the answer to a deadline that no server could meet. Whatever 500, 501 or 503 comes is found.
CONFIGURATION = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 504, 529]
"""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server with a tiny model, in its own process: one for which no endpoint is 501."""
    name = "Qwen3-Reranker-tiny"
    model = qwen.written(qwen.Qwen(name), folder / f"{name}.gguf", name=name)
    command = [sys.executable, "-m", "hetrun", "serve", "-m", str(model), "--port", "0", "--ctx", "512"]
    slots = folder / "slots"
    slots.mkdir()
    command += ["--slot-save-path", str(slots)]
    environ = {**os.environ, "HETRUN_PLANNER": "static"}
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                print(line, end="", flush=True)
                if found := next((word for word in line.split() if word.startswith("http://")), None):
                    # The rest is not read, as with many servers: that must not hold it up.
                    yield found.removesuffix("/v1")
                    break
        finally:
            server.terminate()


def run(address: str, folder: Path, *options: str) -> int:
    """The exit status of Schemathesis: 0 if nothing was found."""
    configuration = folder / "schemathesis.toml"
    configuration.write_text(CONFIGURATION)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(configuration)]
    command += ["run", f"{address}/openapi.json", "--checks", ",".join(CHECKS), "--continue-on-failure"]
    # What is not here (501) has one answer to everything, and more paths than all the rest.
    command += ["--exclude-deprecated", *options]
    environ = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.tools.schemathesis_hooks"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # It keeps notes where it runs.
    return subprocess.run(command, check=False, cwd=folder, env=environ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=600)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as name, served(Path(name)) as address:
        return run(address, Path(name), "--max-time", str(seconds))


if __name__ == "__main__":
    sys.exit(main())
