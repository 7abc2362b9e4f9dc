"""What a seed means: a purpose that is renamed, or counted otherwise, changes every run of every seed."""

import ast
from pathlib import Path

import numpy as np

import holdfast
from holdfast.core.random import counter_key, counter_keys, generator

DRAWS = {  # purpose, number of counters given with it
    ("aggregation samples", 0),
    ("anchor", 0),
    ("attack noise", 2),
    ("attackers", 0),
    ("augmentation", 2),
    ("augmentation", 3),
    ("backdoor", 1),
    ("batches", 3),
    ("candidates", 1),
    ("classifier", 1),
    ("classifier batches", 0),
    ("clients", 1),
    ("clusters", 0),
    ("clusters", 1),
    ("cycle", 1),
    ("digits split", 0),
    ("domain samples", 1),
    ("dp count", 1),
    ("dp noise of samples", 3),
    ("dp noise of {name}", 2),
    ("dp noise of {path}", 2),
    ("dropout", 1),
    ("dropout", 3),
    ("feature anchors", 0),
    ("feature skew", 0),
    ("feature skew: domains of {part}", 0),
    ("feature skew: noise of {part}", 1),
    ("federated feature batches", 1),
    ("federated features", 0),
    ("generator weights", 1),
    ("fisher batches", 0),
    ("folder split", 0),
    ("holdout", 2),
    ("local test", 0),
    ("long tail", 0),
    ("one of each class", 1),
    ("pairwise masks", 2),
    ("partition", 0),
    ("poisson", 1),
    ("private batches", 3),
    ("private sizes", 2),
    ("public batches", 2),
    ("public data", 0),
    ("real features", 0),
    ("rounding", 2),
    ("student weights", 1),
    ("synthetic batches", 2),
    ("synthetic images", 2),
    ("synthetic order", 0),
    ("test rows of {site}", 0),
    ("tune", 0),
    ("validation", 1),
    ("virtual feature batches", 0),
    ("virtual features", 1),
    ("weights", 0),
}


def drawn(path):
    """The purposes of all random draws in a file, with their numbers of counters."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        texts = [ast.unparse(argument) for argument in node.args]
        purposes = [at for at, text in enumerate(texts) if text.startswith(("'", "f'"))]
        if name in ("generator", "counter_key", "gaussian", "uniform") and purposes:
            yield texts[purposes[0]].lstrip("f").strip("'"), len(texts) - purposes[0] - 1


def test_every_draw_has_the_purpose_that_results_were_made_with():
    files = [path for path in Path(holdfast.__file__).parent.rglob("*.py") if path.name != "smoke.py"]
    assert {draw for path in files for draw in drawn(path)} == DRAWS


def test_a_key_is_the_same_on_every_machine():
    assert counter_key(0, "clients", 1) == 5809878028783276826
    assert generator(0, "clients", 1).permutation(6).tolist() == [1, 3, 2, 4, 5, 0]


def test_every_argument_makes_another_key():
    given = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), (0, "a", 1), (0, "a", 0, 1), (0, "a", 1, 0)]
    assert len({counter_key(*of) for of in given}) == len(given)


def test_a_generator_is_philox_with_the_key():
    key = counter_key(3, "batches", 1, 2)
    expected = np.random.Generator(np.random.Philox(key=key))
    assert (generator(3, "batches", 1, 2).permutation(100) == expected.permutation(100)).all()


def test_many_keys_at_once_are_the_same_keys():
    keys = [counter_key(7, "validation", client) for client in range(5)]
    found = counter_keys(np.array(keys, np.uint64), np.arange(5) * 1000)
    assert found.tolist() == [counter_key(7, "validation", client, client * 1000) for client in range(5)]
