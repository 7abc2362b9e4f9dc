"""Methods as written on the command line."""

import pytest

from holdfast.core.errors import HoldfastError
from holdfast.methods import METHODS, FedKA, parse_method
from holdfast.methods.registry import method_from


def test_a_list_may_stand_among_options():
    assert parse_method("fedka:beta=0.1,shared=[3,1,2],mu=4") == FedKA(beta=0.1, shared=(3, 1, 2), mu=4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fedka:shared=3", "fedka: shared is 3; it must be a list of whole numbers"),
        ("fedka:shared=[0.5]", "must be a list of whole numbers"),
        ("fedka:shared=[3,1", r"'\[3,1' in method 'fedka:shared=\[3,1' is not a number, a list or a word"),
        ("fedka:beta", "not of the form option=value"),
        ("fedka:strength=1", "unknown option of fedka 'strength'"),
        ("fedavg:beta=1", "fedavg has no options"),
        ("fedntd+fedntd", "names a method twice"),
        ("fedntd:beta=-0.1", "fedntd: beta is -0.1; it must be at least 0"),
        ("fedntd:tau=0", "fedntd: tau is 0.0; it must be above 0"),
        ("fedprox:mu=-0.1", "fedprox: mu is -0.1; it must be at least 0"),
        ("fedavgm:beta=1", "fedavgm: beta is 1.0; it must be from 0 up to, but not, 1"),
        ("fedavgm:beta=-0.1", "fedavgm: beta is -0.1"),
        ("scaffold:variant=fa", "scaffold: variant is 'fa'; it must be original, ntd or weighted"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(HoldfastError, match=said):
        parse_method(text)


PUBLISHED = {
    "fedavg": {},
    "steady": {},
    "fedprox": {"mu": 0.1},
    "fedavgm": {"beta": 0.7, "damped": False},
    "scaffold": {"variant": "original"},
    "fedntd": {"beta": 1.0, "tau": 1.0},
    "fedka": {"beta": 0.001, "gamma": 0.05, "mu": 10, "sampling": "random", "anchors": "both", "shared": (),
              "logits": "raw", "distance": "squared", "discard": "own", "anchor_ce": 0.0},
    "flashback": {"gamma": 0.1, "server_epochs": 1, "half": "both"},
    "fedfa": {"mu": 0.1, "lam": 0.5, "anchor_loss": "code", "calibration": "adam", "calibrate_each": "step",
              "update_anchors": True, "anchor_init": "orthogonal", "class_means": "faithful", "warmup": False},
    "fedmlp": {"alpha": 1.0, "smooth_l1": "mean", "clustering": "finch", "inter_task_kl": "feature-memory",
               "memory": "overwrite", "use_prototype": True, "use_inter_task": True, "use_semantic": True,
               "head": "personal", "strength": 1.0, "minority": "mean", "head_epochs": 0, "weights": "samples"},
    "target": {"lam": 25.0, "tau": 2.0, "replay": 128, "samples": 8000, "batch_size": 256, "generator_steps": 10,
               "generator_lr": 0.002, "noise_lr": 0.01, "ce": 0.5, "bn": 10.0, "bn_momentum": 0.9, "adversarial": 1.0,
               "warmup": 20, "student_steps": 400, "student_tau": 20.0},
    "fednova": {"mu": 0.0, "variant": "original"},
    "moon": {"mu": 1.0, "tau": 0.5, "variant": "original"},
    "feddyn": {"alpha": 0.01, "variant": "original"},
    "fedcurv": {"lam": 1.0, "variant": "original"},
    "feddf": {"epochs": 5, "lr": 0.001, "batch_size": 128, "clip": 5.0},
    "fedproc": {"tau": 0.5, "lam": 0.5, "variant": "original"},
    "fedreg": {"gamma": 0.5, "eta_s": 0.1, "steps": 10},
    "fedrep": {"body_epochs": 1},
    "fedproto": {"lam": 1.0},
    "creff": {"features": 100, "images": 32, "repeats": 10, "match_steps": 100, "match_lr": 0.1, "epochs": 300,
              "lr": 0.01, "batch_size": 32},
    "ccvr": {"draws": 200, "epochs": 10, "lr": 0.01},
    "fedala": {"top": 2, "sampled": 0.8, "eta": 1.0},
    "fedfomo": {"models": 5},
    "fedpac": {"lam": 1.0, "head_lr": 0.1},
    "fedrod": {},
    "ema": {"beta": 0.9, "start": False},
    "balanced": {"tau": 1.0, "floor": 1e-8},
    "fedlc": {"tau": 1.0},
    "fedsam": {"rho": 0.1},
    "mofedsam": {"rho": 0.1, "alpha": 0.1},
    "fedspeed": {"rho": 0.1, "lam": 0.1},
    "fedsmoo": {"rho": 0.1, "lam": 0.1},
    "fedlesam": {"rho": 0.1},
    "fedsol": {"rho": 1.0, "tau": 3.0},
    "fedadam": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
    "fedyogi": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
    "fedadagrad": {"lr": 0.01, "beta1": 0.0, "tau": 1e-3},
    "fedexp": {"eps": 1e-3, "average": True},
    "fedacg": {"lam": 0.85, "beta": 1e-3},
    "fedrs": {"alpha": 0.5},
    "fedrcl": {"tau": 0.05, "lam": 0.7, "beta": 1.0},
    "fedmuon": {"alpha": 0.5, "beta": 0.98, "scale": 1.0, "decay": 0.01},
    "feddecorr": {"beta": 0.1},
    "fedvls": {"lam": 0.1, "beta": 0.005},
    "fedlmd": {"beta": 1.0, "tau": 1.0},
    "fedetf": {},
    "fedbabu": {"finetune": 5},
    "ditto": {"lam": 1.0, "personal_epochs": 1},
    "local": {},
}  # fmt: skip


def test_defaults_are_those_that_results_were_measured_with() -> None:
    assert {name: kind().describe() for name, kind in METHODS.items()} == {
        name: {"name": name} | options for name, options in PUBLISHED.items()
    }


def test_an_option_of_a_stack_is_that_of_the_first_part_that_has_it() -> None:
    described = {"name": "fedprox+fedntd+fedavgm", "beta": 3, "fedavgm": {"beta": 0.8}, "fedprox": {"mu": 2}}
    assert method_from(described) == parse_method("fedprox:mu=2+fedntd:beta=3+fedavgm:beta=0.8")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"gamma": 1}, "unknown option of fedntd.fedavgm 'gamma'"),
        ({"fedntd": 1}, "fedntd in fedntd.fedavgm is 1; it must be a mapping"),
        ({"damped": 3}, "fedavgm: damped is 3"),
    ],
)
def test_options_that_no_part_of_a_stack_has(option: dict[str, object], said: str) -> None:
    with pytest.raises(HoldfastError, match=said):
        method_from({"name": "fedntd+fedavgm", **option})
