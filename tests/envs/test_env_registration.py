from __future__ import annotations

import json
import re
import subprocess
import sys

import gymnasium
import pytest

from sol_gym.envs import SCORING_VERSION, env_id, register_all
from sol_gym.problems import list_ids


def test_every_problem_has_an_id_and_there_is_a_generic_one():
    specs = gymnasium.registry
    assert f"SolGym-v{SCORING_VERSION}" in specs
    for problem in list_ids():
        assert specs[env_id(problem)].kwargs == {"problem": problem}


def test_ids_carry_the_scoring_version_and_are_distinct():
    ids = [env_id(problem) for problem in list_ids()]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(rf"SolGym/[\w.-]+-v{SCORING_VERSION}", name) for name in ids)
    assert env_id("L1/069_rms_norm") == f"SolGym/L1-069_rms_norm-v{SCORING_VERSION}"


def test_registering_again_changes_nothing(recwarn):
    before = dict(gymnasium.registry)
    register_all()
    assert gymnasium.registry == before
    assert not recwarn.list


def test_specs_can_be_stored_as_json():
    spec = gymnasium.spec(env_id("L1/069_rms_norm"))
    again = type(spec).from_json(spec.to_json())
    assert again.id == spec.id
    assert again.kwargs == spec.kwargs


def test_a_mistyped_id_is_answered_with_the_nearest():
    with pytest.raises(gymnasium.error.NameNotFound, match="L1-069_rms_norm"):
        gymnasium.make(f"SolGym/L1-069_rmsnorm-v{SCORING_VERSION}")


def test_importing_the_environments_loads_no_torch():
    code = "import json, sys, sol_gym.envs; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
