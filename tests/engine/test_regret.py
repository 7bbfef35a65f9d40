"""What the planner's decisions cost on machines that are made up, against the best plan in hindsight.

`machines.py` has the machines: a backend is wrongly measured at first, other programs come and go, bursts
hold everything up, what computes becomes warm. Each runs a hundred requests, minutes of its time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean

import pytest

from hetrun.tools.simulate.machine_files import known, open_machine
from tests.engine import machines
from tests.engine.machines import MODEL, Machine, made_up, of_file
from tests.models import tiny
from tests.support.tiers import exhaustive

pytestmark = pytest.mark.usefixtures("all_threads")

FEW, ALL = range(10), range(300)
# Times of the best plan in hindsight, which no planner knows: on average, and on nine of ten machines.
AVERAGE, NINE_OF_TEN = 1.06, 1.16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(MODEL, tmp_path_factory.mktemp("models") / "made_up.gguf")


def regrets(made: Iterable[Machine], model: Path, folder: Path) -> Iterator[float]:
    """How many times as long as by the best plan in hindsight all requests took, by machine."""
    for at, one in enumerate(made):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(folder / str(at)))
            with machines.machine(one, patch) as world:
                flight, graph = machines.fly(model, world)
        yield flight.seconds / machines.hindsight(world.machine, graph)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [FEW, pytest.param(ALL, marks=exhaustive)], ids=["few", "all"])
def test_plans_cost_little_against_the_best_in_hindsight(
    seeds: Sequence[int], model: Path, tmp_path: Path
) -> None:
    found = sorted(regrets(map(made_up, seeds), model, tmp_path))
    words = f"average {mean(found):.3f}, worst {found[-1]:.2f}"
    assert mean(found) <= AVERAGE, words
    assert found[9 * len(found) // 10 - 1] <= NINE_OF_TEN, words


GPUS = [name for name in known() if open_machine(name).gpu]


@pytest.mark.slow
@pytest.mark.parametrize("named", [GPUS[0], *(pytest.param(name, marks=exhaustive) for name in GPUS[1:])])
def test_processor_and_gpu_of_a_machine_from_a_file(named: str, model: Path, tmp_path: Path) -> None:
    """What `plan --machine` describes, with the same weather."""
    (found,) = regrets([of_file(named, 7)], model, tmp_path)
    assert found <= AVERAGE


def test_the_same_machine_is_the_same_again(model: Path, tmp_path: Path) -> None:
    first, second = (regrets([made_up(4)], model, tmp_path / name) for name in "ab")
    assert list(first) == list(second)
