"""The one list of settings, and what derives from it."""

from dataclasses import fields
from inspect import signature

import pytest

import holdfast as hf
from holdfast.core.settings import (
    DEFAULTS,
    FORMER_NAMES,
    MACHINE_SETTINGS,
    RECORDED,
    SCHEDULE_SETTINGS,
    ExperimentSettings,
    HelpGroup,
    Role,
    Settings,
    settings_with,
    with_current_names,
)
from holdfast.training.checkpointing import IDENTITY


def test_every_setting_has_a_group_a_help_text_and_a_role() -> None:
    for field in fields(ExperimentSettings):
        assert isinstance(field.metadata["group"], HelpGroup)
        assert isinstance(field.metadata["role"], Role)
        assert field.metadata["help"].endswith((".", "…"))
    assert {f.name for f in fields(hf.Experiment)} == {f.name for f in fields(ExperimentSettings)}


def test_train_takes_every_setting_of_the_schedule_with_its_default() -> None:
    parameters = signature(hf.train).parameters
    for field in fields(Settings):
        if field.name != "rounds":
            assert parameters[field.name].default == field.default


def test_roles_cover_all_settings_once() -> None:
    assert sorted(name for role in Role for name in settings_with(role)) == sorted(DEFAULTS)
    assert set(MACHINE_SETTINGS) == {
        "engine", "device", "parallel_clients", "ray_address", "checkpoint_seconds",
    }  # fmt: skip


def test_a_resumed_run_may_change_limits_and_the_machine_alone() -> None:
    free = {"deadline", "min_clients", "device", "parallel_clients", "ray_address", "checkpoint_seconds"}
    federation = set(settings_with(Role.SOURCE, Role.FEDERATION))  # these have a hash
    assert set(IDENTITY) == (set(DEFAULTS) - free - federation) | {"hash"}
    assert set(SCHEDULE_SETTINGS) - set(IDENTITY) == {"deadline", "min_clients", "checkpoint_seconds"}


def test_former_names_lead_to_settings_and_hide_none() -> None:
    assert set(FORMER_NAMES.values()) <= set(DEFAULTS)
    assert not set(FORMER_NAMES) & (set(DEFAULTS) | set(RECORDED))


def test_settings_stored_by_former_versions_have_their_current_names() -> None:
    stored = {
        "sample": 3,
        "epochs": 2,
        "norm": "local",
        "engine": "lanes",
        "lr": 0.1,
        "method": {"epochs": 5},
    }
    assert with_current_names(stored) == {
        "clients_per_round": 3, "local_epochs": 2, "batchnorm": "local", "engine": "vectorized", "lr": 0.1,
        "method": {"epochs": 5},
    }  # fmt: skip
    experiment = hf.Experiment.from_mapping({"clients": 5, "sample": 3, "epochs": 2, "engine": "lanes"})
    assert (experiment.clients_per_round, experiment.local_epochs, experiment.engine) == (3, 2, "vectorized")


@pytest.mark.parametrize("former", sorted(FORMER_NAMES))
def test_new_code_refuses_former_names(former: str) -> None:
    with pytest.raises(TypeError, match=former):
        hf.Experiment(**{former: 1})
