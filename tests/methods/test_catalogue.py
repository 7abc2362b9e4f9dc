"""What the catalogue says of a method is what its equations say, and what a round of it does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdfast.core.errors import HoldfastError
from holdfast.core.settings import Settings
from holdfast.core.trees import size_in_bytes
from holdfast.data.dataset import Dataset
from holdfast.data.federation import federate
from holdfast.data.schedules import EveryN
from holdfast.engine.state_cache import StateCache
from holdfast.methods import METHODS, TARGET, CReFF
from holdfast.methods.catalogue import costs_in_words, describe, overview
from holdfast.models import parse_model
from holdfast.training.session import Training

# In bytes: the classifier's input has 512 features, there are ten classes and images of 3 x 32 x 32.
HEAD = 4 * (512 * 10 + 10)
MODEL = 4 * ((3 * 25 + 1) * 32 + (32 * 25 + 1) * 64 + (4096 + 1) * 512) + HEAD
BIASES = 4 * (32 + 64 + 512 + 10)
ROWS, COUNTS, NUMBER = 4 * 10 * 512, 4 * 10, 4  # a vector for each class, a number for each class, a number
UP = {
    "scaffold": 2 * MODEL, "flashback": MODEL + COUNTS, "fedfa": MODEL + ROWS + NUMBER,
    "fedmlp": MODEL - HEAD + ROWS + COUNTS, "fednova": MODEL + 2 * NUMBER, "feddyn": MODEL + NUMBER,
    "fedcurv": 3 * MODEL, "fedproc": MODEL + ROWS + COUNTS, "fedrep": MODEL - HEAD, "fedproto": ROWS + COUNTS,
    "creff": MODEL + 10 * HEAD + COUNTS, "fedfomo": MODEL + 5 * NUMBER,
    "fedpac": MODEL + 2 * ROWS + COUNTS + NUMBER,
    "mofedsam": MODEL + 2 * NUMBER, "fedspeed": MODEL + NUMBER, "fedsmoo": 2 * MODEL + NUMBER,
    "fedexp": MODEL + 2 * NUMBER, "fedetf": MODEL + 2 * NUMBER, "fedbabu": MODEL - HEAD, "local": 0,
    "fedmuon": 3 * MODEL - BIASES + NUMBER, "target": MODEL + COUNTS,
}  # fmt: skip
IMAGE = 3 * 32 * 32 + 4 * 10  # a synthetic image with 8 bits, and the teacher's logits for it
DOWN = {
    "scaffold": 2 * MODEL, "fedka": MODEL + 4 * 10 * 3 * 32 * 32, "flashback": MODEL + COUNTS,
    "fedfa": MODEL + ROWS, "fedcurv": 3 * MODEL, "fedproc": MODEL + ROWS + COUNTS, "fedrep": MODEL - HEAD,
    "fedproto": ROWS + COUNTS, "creff": MODEL + HEAD, "fedfomo": 6 * MODEL,
    "fedpac": MODEL + HEAD + ROWS + COUNTS, "mofedsam": 2 * MODEL, "fedsmoo": 2 * MODEL,
    "fedetf": MODEL + NUMBER, "fedbabu": MODEL - HEAD, "local": 0,
    "fedmuon": 3 * MODEL - BIASES, "target": MODEL + 8000 * IMAGE + 10,
}  # fmt: skip
KEEPS = {
    "scaffold": MODEL, "moon": MODEL, "feddyn": MODEL, "fedcurv": 2 * MODEL, "fedrep": HEAD,
    "fedmlp": HEAD + ROWS + 10, "fedproto": MODEL + ROWS + COUNTS, "fedala": 2 * HEAD + NUMBER,
    "fedfomo": 2 * MODEL, "fedrod": HEAD, "fedspeed": MODEL, "fedsmoo": 2 * MODEL, "fedlesam": MODEL,
    "fedetf": NUMBER, "fedbabu": HEAD, "ditto": MODEL, "local": MODEL,
}  # fmt: skip


def test_every_method_has_an_entry_and_a_section_of_the_page():
    written = (Path(__file__).resolve().parents[2] / "docs" / "methods.md").read_text()
    for name in METHODS:
        page = describe(name)
        assert f"\n## {name}\n" in written
        assert page["when"] in written
        assert " | ".join(list(overview(page).values())[1:]) in written


@pytest.mark.parametrize("name", METHODS)
def test_bytes_follow_from_the_equations(name):
    costs = describe(name)["costs"]
    assert costs["model"] == MODEL
    assert costs["up"] == UP.get(name, MODEL)
    assert costs["state"] == KEEPS.get(name, 0)
    if name == "fedmlp":  # prototypes, which exist and whose cluster is whose; one to ten semantic prototypes
        fixed = MODEL - HEAD + ROWS + 10 + 80
        assert fixed + ROWS // 10 <= costs["down"] <= fixed + ROWS
    else:
        assert costs["down"] == DOWN.get(name, MODEL)
    # for each class, in double precision: a count, a sum and a matrix of second moments
    assert costs["up_at_the_end"] == (8 * 10 * (1 + 512 + 512**2) if name == "ccvr" else 0)


@pytest.mark.parametrize("name", METHODS)
def test_bytes_are_what_a_round_measures(name):
    clients = 6 if name == "fedfomo" else 2
    x = np.random.default_rng(0).integers(0, 256, (10 + 2 * clients, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(len(x)) % 10
    data = Dataset.from_arrays(x, labels, x[:10], labels[:10])
    held = np.split(np.arange(2 * clients), clients)
    held[0] = np.append(held[0], np.arange(2 * clients, len(x) - 2))  # somebody must hold each class
    federation = federate(data, held, public=np.arange(len(x) - 2, len(x)))
    settings = Settings(
        rounds=9, local_epochs=2 if name in ("fedrep", "fedpac", "ditto") else 1, batch_size=16, evaluate_every=9,
        evaluate_locals=False,
    )  # fmt: skip
    quick = {"creff": CReFF(epochs=1), "target": TARGET(samples=20, generator_steps=1, student_steps=0)}
    method = quick.get(name) or METHODS[name]()
    if name == "target":  # in a stream whose second stage begins with round 2
        offsets = np.insert(federation.offsets[:-1] + 1, np.arange(clients), federation.offsets[:-1])
        federation = replace(
            federation, offsets=np.append(offsets, federation.offsets[-1]), stages=2, schedule=EveryN(1, 2)
        )
    training = Training(
        method, parse_model("ntd-cifar"), federation, settings, engine="sequential", device="cpu"
    )
    client_states = StateCache(None, None)
    loop = training.loop(client_states)
    for number in (1, 2):
        record = loop.round(number)
    costs = describe(name)["costs"]
    assert record["bytes_up"] == clients * costs["up"]
    few = 0 if name != "fedmlp" else ROWS  # as many semantic prototypes as there are clusters
    fewer = 0 if name != "target" else (8000 - 20) * IMAGE
    assert record["bytes_down"] == pytest.approx(clients * (costs["down"] - fewer), abs=clients * few, rel=0)
    kept = client_states.get(0) or {}
    if name == "target":
        assert kept.keys() == {"head"}  # which clients keep in every stream
    else:
        assert size_in_bytes(kept) == costs["state"]


def test_privacy_agrees_with_what_is_sent():
    harmless = {
        "fednova": {"distance", "samples"},
        "feddyn": {"clients"},
        "fedspeed": {"clients"},
    }  # numbers that tell no label or feature
    for name in METHODS:
        page = describe(name)
        told = set(page["costs"]["sends"]) | set(page["costs"]["surveyed"])
        if name == "fedka":  # the shared set comes from clients, though not with their uploads
            assert "raw training sample" in page["privacy"]["leaves"]
            assert not told
        elif not page["privacy"]["leaves"]:
            assert told == harmless.get(name, set())
        else:
            assert told
        assert page["privacy"]["seen_alone"] == (name in {"flashback", "feddf", "fedfomo", "fedpac"})
        assert page["needs_public"] == (name in {"flashback", "feddf"})


# Multiplications of one sample through an MLP of 64 inputs and two hidden layers of 200: a step also needs the
# gradients of all weights and of all inputs but the first.
FORWARD = 64 * 200 + 200 * 200 + 200 * 10
STEP = 3 * FORWARD - 64 * 200


@pytest.mark.parametrize(
    ("name", "plain", "augmented"),
    [
        ("fedprox", 0, 0),
        ("fedntd", FORWARD, 5 * FORWARD),
        ("flashback", FORWARD, 5 * FORWARD),
        ("moon", 2 * FORWARD, 10 * FORWARD),
        (
            "fedka",
            STEP + FORWARD / 10,
            STEP + FORWARD / 10,
        ),  # 10 of the anchor with every 50; once the teacher
        ("target", 5 * STEP * 128 / 50, 5 * STEP * 128 / 50),  # 128 synthetic images with every 50
        ("fedcurv", STEP, STEP),
        ("fedreg", 10 * STEP + 41 * FORWARD, 10 * STEP + 41 * FORWARD),  # 20 ascents go forward and back
        ("fedpac", 2 * FORWARD, 2 * FORWARD),
        ("fedsam", 5 * STEP, 5 * STEP),  # a second gradient in each step
        ("fedlesam", 0, 0),
        ("fedsol", 5 * STEP + FORWARD, 5 * (STEP + FORWARD)),
    ],
)
def test_work_is_what_passes_cost(name, plain, augmented):
    costs = describe(name)["costs"]  # of five epochs
    assert costs["work"] == pytest.approx(1 + plain / (5 * STEP), abs=0.006)
    assert costs["work_augmented"] == pytest.approx(1 + augmented / (5 * STEP), abs=0.006)


def test_a_server_that_works_is_told():
    for name, kind in METHODS.items():
        costs, server = describe(name)["costs"], kind.card.server
        assert server or not costs["server_works"]
        if costs["server_state"] >= MODEL:
            assert "size" in server or "model" in server


def test_words_of_one_method():
    told = costs_in_words(describe("fedcurv"))
    assert told["up, each client and round"] == "3.00 × the model (25.9 MB)"
    assert told["client keeps"] == "17.3 MB"
    assert told["server sees"] == "sums over clients only"
    parameters = {p["name"]: p for p in describe("fedka")["parameters"]}
    assert parameters["beta"]["about"].startswith("β: strength")
    assert parameters["sampling"]["about"] == "random, hard or proficient"


def test_a_misspelt_method_is_told():
    with pytest.raises(HoldfastError, match="did you mean fedntd"):
        describe("fedntt")
