"""The project's own files agree with each other: pins, make targets, CI."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
SOURCES = (".py", ".md", ".scenario")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def dry_run(target: str, *arguments: str) -> str:
    """What make would do for ``target`` in a fresh checkout."""
    return subprocess.run(
        ["make", "--dry-run", "--always-make", target, *arguments],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_every_requirement_that_tests_rely_on_is_exact() -> None:
    requirements = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    assert [r for r in requirements if not re.fullmatch(r"[\w-]+==[\w.]+", r)] == []


def test_torch_is_installed_first_and_exactly_as_pinned() -> None:
    (pin,) = (r for r in PROJECT["dependencies"] if r.startswith("torch=="))
    for target in ("serve", "test"):
        installs = re.findall(r"pip .*? install (.*)", dry_run(target))
        assert installs[0] == pin, "without its pin, torch may come as a CUDA build"
        assert installs[1].startswith("--editable ")


def test_serving_installs_no_test_tools_and_the_port_can_be_chosen() -> None:
    commands = dry_run("serve", "PORT=8123")
    assert "[dev]" not in commands
    assert re.search(r"interlock serve .*--port 8123", commands)
    assert "--port" not in dry_run("serve", "PORT="), "INTERLOCK_PORT and the default must work"


def test_every_target_is_explained_and_every_explained_target_exists() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.M)
    assert set(phony.split()) - {"help"} == set(re.findall(r"^#   make (\w+)", MAKEFILE, re.M))
    for target in phony.split():
        dry_run(target)


def test_every_module_that_the_makefile_runs_exists() -> None:
    modules = [name for name in re.findall(r"-m ([\w.]+)", MAKEFILE) if "." in name]
    assert modules
    assert [m for m in modules if not (ROOT / f"{m.replace('.', '/')}.py").exists()] == []


def test_ci_runs_the_checks_and_tests_of_the_makefile() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^timeout .* make check test$", script.read_text(encoding="utf-8"), re.M)


def test_the_commands_that_pyproject_promises_exist() -> None:
    for entry in PROJECT["scripts"].values():
        module, function = entry.split(":")
        path = ROOT / f"{module.replace('.', '/')}.py"
        assert path.exists(), f"{path.relative_to(ROOT)} is missing"
        assert f"def {function}(" in path.read_text(encoding="utf-8")


def test_every_invariant_that_is_referred_to_is_explained_and_what_checks_it_is_there() -> None:
    page = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^## (\d+)\. ", page, re.M))
    assert explained == {str(number) for number in range(1, 11)}
    folders = ("fsm", "engine", "transport", "server", "tests", "docs")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in SOURCES]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    referred = re.findall(r"\binvariants? ((?:\d+(?:, | and )?)+)", text, re.I)
    assert len(referred) > 20
    assert {number for group in referred for number in re.findall(r"\d+", group)} <= explained
    for name in re.findall(r"`([\w/]+\.py)`", page):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"Scenarios: (.*)", page):
        for stem in re.findall(r"`(\w+)`", name):
            assert (ROOT / "tests" / "scenarios" / f"{stem}.scenario").exists(), stem
