"""Shared fixtures: one thread, no deadline for property tests, and a loud word when real data are absent."""

from __future__ import annotations

import os

# Must precede the first import of torch: with two busy cores, two OpenMP threads spin at barriers and run ~50x slower.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# Deadlines measure the machine, not the code: a shared core makes them flaky.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("project")

NO_DATA = "AGENTRL_DATA is not set"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of original data sets, so that a test can check against the published files.

    Returns:
        The folder named by the environment variable AGENTRL_DATA; without it the test is skipped and counted aloud.
    """
    folder = os.environ.get("AGENTRL_DATA")
    if not folder:
        pytest.skip(f"{NO_DATA}: this check against the original data did not run")
    if not Path(folder).is_dir():
        pytest.fail(f"AGENTRL_DATA is set to '{folder}', which is not a folder: point it at the data or unset it.")
    return Path(folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests did not run for want of data, so that a green run cannot hide it."""
    skipped = sum(NO_DATA in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.write_line(f"{skipped} tests skipped because AGENTRL_DATA is not set", yellow=True, bold=True)
