"""Kill `hetrun run -f` at random and go on, again and again; the results must be those of a run left alone.

python -m tests.tools.batch_kills --kills 20              with the default model
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 600.0


@dataclass(frozen=True)
class Case:
    """What is run: a file of requests, and options."""

    source: Path
    options: tuple[str, ...] = ()

    def begin(self, output: Path, resume: bool) -> subprocess.Popen[bytes]:
        """A run of its own; it is the first of its process group, with the engine's process."""
        command = [sys.executable, "-m", "hetrun", "run", "-f", str(self.source), "-o", str(output)]
        return subprocess.Popen(
            [*command, *self.options, "--deterministic", *(["--resume"] if resume else [])],
            env=os.environ,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def whole(self, output: Path, resume: bool = False) -> int:
        """A run to its end; the exit code."""
        process = self.begin(output, resume)
        _, err = process.communicate(timeout=PATIENCE_S)
        if process.returncode not in (0, 3):
            raise RuntimeError(f"exit code {process.returncode}: {err.decode(errors='replace')[-500:]}")
        return process.returncode


def kill(case: Case, output: Path, kills: int, rng: random.Random, spread_s: float = 0.5) -> list[int]:
    """Kill a run so often, at moments from its start to so long behind what it wrote first; how many lines
    there were each time."""
    sizes: list[int] = []
    waiting = output.with_name(output.name + ".waiting")
    for number in range(kills):
        before = _bytes(output) + _bytes(waiting)
        process = case.begin(output, resume=number > 0)
        begin = time.monotonic()
        if number % 4:  # the others are killed while they start
            while _bytes(output) + _bytes(waiting) == before and process.poll() is None:
                time.sleep(0.002)
                if time.monotonic() - begin > PATIENCE_S:
                    raise TimeoutError("nothing was written")
        time.sleep(rng.random() * spread_s)
        # One that has ended by itself is no failure: then the file is complete.
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.communicate()
        sizes.append(output.read_bytes().count(b"\n") if output.exists() else 0)
    return sizes


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def requests(n: int, rng: random.Random) -> str:
    """Short questions, some of which begin alike, and some lines that fail."""
    heads = ("Say in one word", "Name a colour of", "What follows", "Translate into French:")
    lines = [f"{rng.choice(heads)} {rng.randrange(10**6)}" for _ in range(n)]
    for i in range(17, n, 50):
        lines[i] = "word " * 40_000
    return "".join(f"{line}\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--spread", type=float, default=4.0, help="seconds in which each is killed")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hetrun-kills-"))
    rng = random.Random(args.seed)
    try:
        (folder / "in.txt").write_text(requests(args.requests, rng))
        model = ("-m", str(args.model)) if args.model else ()
        case = Case(folder / "in.txt", (*model, "-n", "16"))
        case.whole(folder / "alone.jsonl")
        sizes = kill(case, folder / "killed.jsonl", args.kills, rng, args.spread)
        case.whole(folder / "killed.jsonl", resume=True)
        same = (folder / "alone.jsonl").read_bytes() == (folder / "killed.jsonl").read_bytes()
        print(f"lines when it was killed: {' '.join(map(str, sizes))} of {args.requests}")
        print("identical" if same else "DIFFERENT")
        return 0 if same else 1
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
