"""The run's metrics.csv: one row a logged step or evaluation, appended as it happens."""

import csv
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class MetricsCSV(Logger):
    """Appends each row to `<folder>/metrics.csv` at once; an existing file is continued, cut back to where the run is.

    Columns are `step` (optimiser steps before the row's own, so the first is 0), `epoch`, then the metrics in the order
    they first came; a new one widens the file.

    Args:
        folder: The run's folder.
        step: Optimiser steps the run has behind it: rows of later ones are cut off, since they will come again.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        super().__init__()
        self.path = folder / "metrics.csv"
        self.columns: list[str] = []
        self._step = step

    @property
    def name(self) -> str:
        """Empty: files go straight into `save_dir`."""
        return ""

    @property
    def version(self) -> str:
        """Empty: files go straight into `save_dir`."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self.path.parent)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml holds them."""

    @rank_zero_only
    def cut(self) -> None:
        """Cut an existing file back to the step the run goes on from; the last row may have been cut by a kill."""
        if self.path.exists():
            self.columns, rows = read_rows(self.path)
            write_rows(self.path, self.columns, [row for row in rows if _step(row) < self._step])

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one row."""
        row = {"step": step, **metrics}
        if not self.columns and self.path.exists():
            self.cut()
        if not set(row) <= set(self.columns):
            rows = read_rows(self.path)[1] if self.path.exists() else []
            self.columns += [name for name in dict.fromkeys(("step", "epoch", *row)) if name not in self.columns]
            write_rows(self.path, self.columns, rows)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)


def _step(row: Mapping[str, str]) -> float:
    """The step of a row; infinite where there is none, so that it is cut off."""
    text = row.get("step") or ""
    return int(text) if text.isdigit() else float("inf")


def read_rows(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and rows of a metrics.csv."""
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):  # a kill came while it was written
        lines.pop()
    reader = csv.DictReader(lines)
    return list(reader.fieldnames or []), list(reader)


def write_rows(path: Path, columns: list[str], rows: list[dict[str, str]]) -> None:
    """Replace a metrics.csv whole."""
    temporary = path.with_suffix(".partial")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)
