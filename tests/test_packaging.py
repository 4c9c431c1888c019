"""What an installed sol_gym holds: every folder of code or data is declared as a package."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def source_of(package):
    """The folder of a package, by the longest of the mapped names that it begins with."""
    mapped = max(
        (n for n in SETUPTOOLS["package-dir"] if f"{package}.".startswith(f"{n}.")), key=len
    )
    rest = package[len(mapped) :].replace(".", "/").strip("/")
    return ROOT / SETUPTOOLS["package-dir"][mapped] / rest


def test_every_folder_with_files_is_a_package_or_data_of_one():
    declared = {source_of(package) for package in SETUPTOOLS["packages"]}
    patterns = {source_of(p): globs for p, globs in SETUPTOOLS["package-data"].items()}
    covered = {file for folder, globs in patterns.items() for g in globs for file in folder.glob(g)}
    left_out = []
    for name in SETUPTOOLS["package-dir"].values():
        for file in (ROOT / name).rglob("*"):
            hidden = any(part.startswith((".", "__pycache__")) for part in file.parts)
            is_code = file.suffix == ".py" and file.parent in declared
            if file.is_file() and not hidden and not is_code and file not in covered:
                left_out.append(str(file.relative_to(ROOT)))
    assert not left_out, "not in a wheel: add the folder to packages and package-data"


def test_every_declared_package_exists():
    assert all(source_of(package).is_dir() for package in SETUPTOOLS["packages"])


def test_folders_whose_name_could_be_a_package_are_declared_as_one():
    """setuptools takes such folders for forgotten packages, and will leave them out one day."""
    declared = {source_of(package) for package in SETUPTOOLS["packages"]}
    for package in SETUPTOOLS["packages"]:
        for folder in source_of(package).iterdir():
            if folder.is_dir() and folder.name.isidentifier() and folder.name != "__pycache__":
                assert folder in declared, f"{folder.relative_to(ROOT)} is missing in packages"
