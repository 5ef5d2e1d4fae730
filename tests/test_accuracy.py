"""How well the seed's recipe does: too good would be as suspicious as too bad."""

from pathlib import Path

import pytest

from tests.conftest import CONFIGS, Command
from tests.test_cli import rows


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_ten_epochs_of_the_seeds_recipe(seed: int, command: Command) -> None:
    """ToyModel without augmentation cannot reach 98.9 % of the test images."""
    command("fit", "--config", str(CONFIGS / "mnist.yaml"), "--seed_everything", str(seed))
    (tested,) = [row for row in rows(Path("runs/version_0")) if row["test_acc"]]
    assert float(tested["test_samples"]) == 10_000
    assert 0.975 <= float(tested["test_acc"]) < 0.989
