"""What importing costs: the data half of sol_gym works without torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "statement",
    [
        "import sol_gym",
        "import sol_gym; dir(sol_gym); sol_gym.Problem; sol_gym.Solution; sol_gym.sol_score",
        "from sol_gym.problems import load; load('L1/069_rms_norm', profile='smoke')",
        "from sol_gym.baselines import published; published('L1/069_rms_norm')",
    ],
)
def test_no_torch_is_loaded(statement):
    code = f"{statement}\nimport sys\nassert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error():
    import sol_gym

    with pytest.raises(AttributeError, match="no attribute 'Problme'"):
        sol_gym.Problme  # noqa: B018
