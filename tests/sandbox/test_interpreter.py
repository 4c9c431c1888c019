"""Triton's interpreter after its corrections: `interpreted.py`, in a process that interprets."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("triton")

INTERPRETED = Path(__file__).with_name("interpreted.py")
NAMES = re.findall(r"^def (test_\w+)", INTERPRETED.read_text(), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What went wrong in each test function there, one text a function; empty where nothing did."""
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    process = subprocess.run(
        [*command, f"--junit-xml={report}", str(INTERPRETED)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert report.exists(), process.stdout + process.stderr
    wrong: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        texts = [child.text or "" for child in case if child.tag in ("failure", "error")]
        name = case.attrib["name"].partition("[")[0]
        wrong.setdefault(name, "")
        wrong[name] += "".join(f"{case.attrib['name']}\n{text}\n" for text in texts)
    assert wrong, process.stdout + process.stderr
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_interpreted(name, outcomes):
    if outcomes[name]:
        pytest.fail(outcomes[name], pytrace=False)
