"""Every family that runs, on plans of eight devices: all is predicted, the answer is one device's."""

import pytest
from make_hf_fixtures import MODELS
from parity import BATCH, SEQ, check
from plans import build
from shared import CASES

from llmpar.plan import checks


@pytest.mark.nightly
@pytest.mark.parametrize("line", CASES["family_plans"])
@pytest.mark.parametrize("name", MODELS)
def test_a_family_sends_what_is_predicted_and_loses_what_one_device_does(name, line):
    config, plan = build(f"{name} {line}")
    try:
        why = checks.why_not_run(plan.resolve(config, None, BATCH, SEQ))
    except ValueError as refusal:
        why = str(refusal)
    if why:
        pytest.skip(why)
    check(config, plan, 2.5, loss=1e-6)
