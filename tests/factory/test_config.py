"""Campaign files: what is accepted, and the one line that refuses the rest."""

from __future__ import annotations

import pytest

import operations
from factory.config import (
    CampaignConfig,
    changed_keys,
    load_campaign,
    preset_names,
    to_toml,
    validate_config,
    with_defaults,
)
from factory.errors import UserError

GOOD = 'name = "toy"\noperation = "toy_scale"\n'


def load(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return load_campaign(str(path))


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_and_print_back_equal(name, tmp_path):
    config = load_campaign(name)
    assert load(tmp_path, to_toml(config)) == config


def test_presets_are_the_documented_ones():
    assert preset_names() == (
        "gdn_prefill", "gdn_quickstart", "kda_prefill", "quickstart", "survey",
    )  # fmt: skip


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_that_times_fla_gives_it_time_to_tune_itself(name):
    config = load_campaign(name)
    if config.controls is not None and "fla" not in config.controls:
        return
    shapes = operations.get(config.operation).tuned()
    heads = {(w.heads, getattr(w, "value_heads", w.heads)) for w in shapes}
    assert config.device.control_s >= 120.0 * len(heads), f"{len(heads)} pairs of head counts"


def test_an_operation_is_a_campaign_with_defaults():
    config = load_campaign("toy_scale")
    assert (config.name, config.operation, config.space) == ("toy_scale", "toy_scale", None)


def test_overrides_win_and_none_is_silent():
    config = load_campaign("quickstart", {"budget": 3, "seed": None, "executor.workers": 1})
    assert (config.budget, config.seed, config.executor.workers) == (3, 0, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + "budgte = 3", "unknown key 'budgte'; did you mean 'budget'?"),
        (GOOD + "[limits]\nemulates = 3", "unknown key 'limits.emulates'; did you mean"),
        (GOOD + "zzz = 3", "unknown key 'zzz'; known keys: name, operation"),
        (GOOD + 'budget = "ten"', "budget should be a valid integer, not 'ten' (str)"),
        (GOOD + "budget = 1.5", "budget should be a valid integer, not 1.5 (float)"),
        (GOOD + "budget = -4", "budget should be greater than or equal to 1, not -4 (int)"),
        (GOOD + 'sampler = "best"', "sampler should be 'tpe', 'gp', 'random' or 'grid', not"),
        (GOOD + "[limits]\nemulate_s = 0", "limits.emulate_s should be greater than 0, not 0"),
        (GOOD + "warm_start = 3", "warm_start should be true, false or a list of campaigns"),
        (GOOD + "warm_start = [3]", "warm_start should be true, false or a list of campaigns"),
        (GOOD + "patience = -1", "patience should be greater than or equal to 0, not -1"),
        (GOOD + "limits = 3", "limits should be"),
        ('name = "toy"', "key 'operation' is missing"),
        ('name = "../x"\noperation = "toy_scale"', "name"),
        ("name = ", "not valid TOML"),
    ],
)
def test_wrong_files_are_refused_in_one_line_with_file_and_key(tmp_path, text, said):
    with pytest.raises(UserError) as refused:
        load(tmp_path, text)
    message = str(refused.value)
    assert message.startswith(str(tmp_path / "c.toml"))
    assert said in message
    assert "\n" not in message


def test_an_unknown_campaign_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'quickstart'"):
        load_campaign("quickstrat")
    with pytest.raises(
        UserError, match="presets: gdn_prefill, gdn_quickstart, kda_prefill, quickstart"
    ):
        load_campaign("zzzzzz")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.toml: No such file"):
        load_campaign(str(tmp_path / "nowhere.toml"))


def test_budget_and_executor_may_change_on_resume_and_nothing_else():
    base = CampaignConfig(name="a", operation="toy_scale").model_dump()

    def changed(**values):
        return changed_keys(base, validate_config({**base, **values}, "x").model_dump())

    assert changed(budget=3) == []
    assert changed(gpu_minutes=3.5, patience=9) == []
    assert changed(first=8, warm_start=["a"]) == ["first", "warm_start"]
    assert changed(executor={"kind": "ray", "workers": 7}) == []
    assert changed(seed=4) == ["seed"]
    assert changed(limits={"emulate_s": 5.0, "compile_s": 6.0}) == [
        "limits.compile_s",
        "limits.emulate_s",
    ]


@pytest.mark.parametrize("value", [True, False, ["one", "two"]])
def test_warm_start_prints_back_equal(value, tmp_path):
    config = CampaignConfig(name="a", operation="toy_scale", warm_start=value)
    assert load(tmp_path, to_toml(config)) == config


def test_a_configuration_from_before_a_key_existed_has_its_default():
    whole = CampaignConfig(name="a", operation="toy_scale").model_dump()
    older = {k: v for k, v in whole.items() if k not in ("first", "warm_start", "device")}
    assert with_defaults(older) == whole
