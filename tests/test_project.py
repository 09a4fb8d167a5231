"""The repository itself: what its files promise about one another."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lib.runs import ROOT

PITFALLS = [*range(1, 12), *range(13, 26), *range(27, 31), 33, 35]
PACKAGES_OF_LIB = ("lib", "lib.rao", "lib.sampling", "lib.sandbox", "lib.training")


@cache
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def git(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True)


def tracked() -> list[Path]:
    done = git("ls-files", "-z")
    if done.returncode != 0:
        pytest.skip("not a git checkout: tracked files are unknown")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).exists()]


def test_make_knows_every_target_and_lists_it():
    shown = subprocess.run(["make", "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True)
    listed = {line.split()[0] for line in shown.stdout.splitlines()}
    wanted = {"help", "setup", "test", "test-unpinned", "reproduce", "lab", "notebooks", "site"}
    assert listed == wanted
    for target in wanted:
        assert subprocess.run(["make", "-C", str(ROOT), "-n", target], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ([], "all --scale laptop --seeds 1"),
        (["PAPER=rao", "SCALE=smoke"], "rao --scale smoke --seeds 1"),
        (["SEEDS=3", "ABLATIONS=1", "FRESH=1"], "all --scale laptop --seeds 3 --ablations --fresh"),
    ],
)
def test_make_reproduce_hands_its_variables_on(given, arguments):
    command = ["make", "-C", str(ROOT), "--no-print-directory", "-n", "reproduce", *given]
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    text = " ".join(shown.replace("\\\n", " ").split())
    assert text.partition("-m lib.reproduce ")[2] == arguments


def test_old_python_is_refused_in_one_sentence(tmp_path):
    """A stand-in for an old interpreter: the real one, told that its version is 3.9."""
    fake = tmp_path / "python3.9"
    pretend = "import sys; sys.version_info = (3, 9); sys.version = '3.9.1 x'"
    fake.write_text(f'#!/bin/sh\nexec python3 -c "{pretend}\n$2"\n')
    fake.chmod(0o755)
    command = ["make", "-C", str(ROOT), "setup", f"PYTHON={fake}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "Python 3.11 or newer is needed" in done.stderr and "is 3.9.1" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "venv").exists()


def test_ci_entry_is_executable_and_calls_exactly_make_test():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    lines = script.read_text().splitlines()
    assert lines[0].endswith("bash") and "set -euo pipefail" in lines
    assert [line for line in lines if line.startswith("make")] == ["make test"]


def test_ignore_file_does_not_swallow_the_library_or_the_data():
    for name in ("lib/new.py", "lib/rao/runs.py", "data/micro/x/model.safetensors", "data/results/rao/x/metrics.jsonl"):
        assert git("check-ignore", "-q", name).returncode == 1, name
    for name in (".venv/x", "runs/x", "site/x", "build/x"):
        assert git("check-ignore", "-q", name).returncode == 0, name


@pytest.mark.parametrize("package", PACKAGES_OF_LIB)
def test_every_package_of_lib_has_an_init_file(package):
    assert (ROOT / package.replace(".", "/") / "__init__.py").is_file()


def test_conda_environment_installs_the_project_with_its_gpu_extra():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    [pip] = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert environment["dependencies"][:2] == ["python=3.11", "pip"]
    assert pip[0] == "-c constraints/gpu.txt" and len(pip) == 2
    extras = re.fullmatch(r"-e \.\[([a-z,]+)\]", pip[1])[1].split(",")
    assert "gpu" in extras and set(extras) <= set(project()["optional-dependencies"])
    assert "vllm" in {Requirement(text).name for text in project()["optional-dependencies"]["gpu"]}


def pins(machine: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / f"{machine}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize(("machine", "extra"), [("cpu", "dev"), ("gpu", "gpu")])
def test_pins_satisfy_the_ranges_and_leave_out_no_direct_dependency(machine, extra):
    pinned = pins(machine)
    for text in project()["dependencies"] + project()["optional-dependencies"][extra]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), text


def test_pitfall_35_the_tests_run_with_the_pinned_versions():
    """Tutorials rot when libraries move: what runs here is what the constraint file names."""
    from importlib.metadata import version

    if Path(sys.prefix) == ROOT / "build" / "unpinned":
        pytest.skip("running with the newest dependencies on purpose")
    pinned = pins("cpu")
    for text in project()["dependencies"]:
        name = Requirement(text).name
        assert version(name).split("+")[0] == pinned[canonicalize_name(name)], name


def test_no_tracked_file_names_a_place_on_one_machine_or_a_registry():
    """Patterns are put together here so that this file does not match itself."""
    places = "|".join("/" + name + "/" for name in ("work", "root", "home/[a-z]+", "Users", "tmp/[a-z]*venv"))
    registries = "|".join(name + r"\." + end for name, end in (("pypi", "org"), ("pythonhosted", "org")))
    wrong = re.compile(f"(?<![\\w.])({places})|{registries}")
    found = []
    for path in tracked():
        if path.suffix in {".png", ".safetensors", ".gz", ".svg"}:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := wrong.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert not found, "\n".join(found[:20])


def test_no_tracked_file_is_large():
    large = [str(path) for path in tracked() if path.stat().st_size > 6_000_000]
    assert not large


def test_modules_of_lib_can_be_read_in_one_sitting():
    long = {str(path): n for path in (ROOT / "lib").rglob("*.py") if (n := len(path.read_text().splitlines())) > 450}
    assert not long


def test_every_pitfall_of_the_list_has_a_test_named_after_it():
    named = {
        int(number)
        for path in (ROOT / "tests").rglob("*.py")
        for number in re.findall(r"^(?:async )?def test_pitfall_(\d+)_", path.read_text(), re.M)
    }
    assert not sorted(set(PITFALLS) - named)
