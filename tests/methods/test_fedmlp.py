from dataclasses import replace

import numpy as np
import pytest
import torch
from small_world import begun, close, finite, learnt, prepared, rounds, same, world
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.data.federation import Federation
from holdfast.data.schedules import GlobalEpochs
from holdfast.methods import FedAvg, FedMLP
from holdfast.methods.base import Batch, Local
from holdfast.models.network import Output

FEDERATION = world([0] * 5 + [1], [1, 2, 2, 0], [2])  # nobody has class 3
OFF = FedMLP(use_prototype=False, use_inter_task=False, use_semantic=False, head="shared")


def stream() -> Federation:
    """Two clients, two tasks each: classes 0 and 1 then 2 and 3; classes 2 and 3 then 0 and 2."""
    dealt = world([0, 0, 1, 2, 3, 3], [2, 3, 3, 0, 2])
    return replace(dealt, offsets=np.array([0, 3, 6, 9, 11]), stages=2, schedule=GlobalEpochs(2))


def loss_of(method: FedMLP, h: Tensor, labels: list[int], carry: dict[str, Tensor]) -> float:
    batch = Batch(h, torch.tensor(labels), torch.tensor(0))
    nobody = Local({}, {})
    return float(method.loss(Output(h, torch.zeros(len(h), 4, dtype=h.dtype)), batch, carry, nobody))  # type: ignore[arg-type]


def test_with_every_term_off_and_a_shared_head_it_is_fedavg_to_the_bit() -> None:
    assert same(learnt(OFF, FEDERATION), learnt(FedAvg(), FEDERATION))


def test_the_first_round_has_no_prototypes_and_is_fedavg_to_rounding() -> None:
    assert close(learnt(FedMLP(), FEDERATION, 1), learnt(FedAvg(), FEDERATION, 1))
    assert not close(learnt(FedMLP(head="shared"), FEDERATION, 2), learnt(FedAvg(), FEDERATION, 2))


@pytest.mark.parametrize("term", ["use_prototype", "use_inter_task", "use_semantic"])
def test_each_term_alone_changes_the_second_round(term: str) -> None:
    method = replace(OFF, **{term: True})
    assert not close(learnt(method, FEDERATION, 2), learnt(FedAvg(), FEDERATION, 2))


def test_a_class_without_owners_keeps_its_prototype() -> None:
    loop, _ = rounds(prepared(FedMLP(), FEDERATION, clients_per_round=1, rounds=9), 1)
    for number in range(2, 8):
        before = loop.server.state
        record = loop.round(number)
        held = set(FEDERATION.dataset.y_train[FEDERATION.client(record["participants"][0])].tolist())
        after = loop.server.state
        for label in range(4):
            kept = torch.equal(after["prototypes"][label], before["prototypes"][label])
            assert kept == (label not in held)
        assert after["known"].tolist() == [bool(before["known"][c]) or c in held for c in range(4)]
    assert not after["known"][3]


def test_prototypes_are_plain_means_over_owners() -> None:
    method = replace(OFF, use_prototype=True)
    training = prepared(method, FEDERATION)
    loop, _ = rounds(training, 1)
    sums = {"prototypes": torch.zeros(4, 6, dtype=torch.float64), "owners": torch.tensor([2.0, 1, 0, 0])}
    sums["prototypes"][0], sums["prototypes"][1] = 6.0, 5.0
    state = method.update(loop.server, sums, [], training.context)
    assert torch.equal(state["prototypes"][:2, 0], torch.tensor([3.0, 5.0], dtype=torch.float64))
    assert torch.equal(state["prototypes"][2], loop.server.state["prototypes"][2])


def test_prototypes_are_those_of_the_trained_model_in_evaluation_mode() -> None:
    federation = world([0, 0, 1, 1, 1])
    loop, client_states = rounds(prepared(FedMLP(), federation), 1)
    model = prepared(FedMLP(), federation).context.network.module().double()
    model.load_state_dict(loop.server.params)
    x = federation.dataset.preprocess(federation.dataset.x_train[:5], dtype=torch.float64)
    features = model[:3](x).detach()  # type: ignore[index]
    expected = torch.stack([features[:2].mean(0), features[2:].mean(0)])
    assert torch.allclose(loop.server.state["prototypes"][:2], expected)
    remembered = client_states.get(0)["method"]  # type: ignore[index]
    assert torch.allclose(remembered["memory"][:2], expected)
    assert remembered["remembered"].tolist() == [True, True, False, False]


def test_the_memory_collects_the_classes_of_all_tasks() -> None:
    _, client_states = rounds(prepared(FedMLP(), stream(), rounds=4), 1)
    first = client_states.get(0)["method"]["remembered"].tolist()  # type: ignore[index]
    loop, client_states = rounds(prepared(FedMLP(), stream(), rounds=4), 4)
    assert first == [True, True, False, False]
    assert client_states.get(0)["method"]["remembered"].all()  # type: ignore[index]
    assert client_states.get(1)["method"]["remembered"].tolist() == [True, False, True, True]  # type: ignore[index]
    assert finite(loop.server.params)


@pytest.mark.parametrize(("memory", "kept"), [("overwrite", 0.0), ("ema", 0.5)])
def test_memory_overwrites_or_mixes_but_a_new_class_enters_whole(memory: str, kept: float) -> None:
    method = FedMLP(memory=memory)  # type: ignore[arg-type]
    training = prepared(method, FEDERATION)
    known = torch.tensor([True, False, True, False])
    old = torch.full((4, 6), 9.0, dtype=torch.float64) * known.unsqueeze(1)
    client, carry = begun(training, 0, {"memory": old, "remembered": known})
    sums, state = method.client_final(client.global_params, carry, client)
    fresh = sums["prototypes"]
    assert torch.allclose(state["memory"][0], kept * old[0] + (1 - kept) * fresh[0])
    assert torch.allclose(state["memory"][1], fresh[1])
    assert torch.equal(state["memory"][2:], old[2:])
    assert state["remembered"].tolist() == [True, True, True, False]


@pytest.mark.parametrize("direction", ["feature-memory", "memory-feature"])
def test_a_new_class_is_held_to_the_nearest_of_what_is_remembered(direction: str) -> None:
    method = replace(OFF, use_inter_task=True, inter_task_kl=direction)
    rng = np.random.default_rng(0)
    memory = np.zeros((4, 6))
    memory[0], memory[2] = rng.normal(size=6), rng.normal(size=6) + 3
    known = torch.tensor([True, False, True, False])
    _, carry = begun(
        prepared(method, FEDERATION), 0, {"memory": torch.from_numpy(memory), "remembered": known}
    )
    semantic = (memory[0] + memory[2]) / 2  # two prototypes are each other's neighbours: one cluster
    h = rng.normal(size=(2, 6))

    def softmax(v: np.ndarray) -> np.ndarray:
        return np.exp(v) / np.exp(v).sum()

    expected = 0.0
    for feature, goal in ((h[0], memory[2]), (h[1], semantic)):  # class 2 is remembered, class 1 is new
        p, q = softmax(feature), softmax(goal)
        p, q = (p, q) if direction == "feature-memory" else (q, p)
        expected += float(np.sum(p * np.log(p / q))) / 2
    assert loss_of(method, torch.from_numpy(h), [2, 1], carry) == pytest.approx(expected)


def test_the_nearest_of_several_is_by_distance() -> None:
    method = replace(OFF, use_inter_task=True)
    _, carry = begun(prepared(method, FEDERATION))
    far, near = torch.tensor([5.0, 0, 0, 0, 0, 0]).double(), torch.tensor([0, 0, 0, 0, 0, 1.0]).double()
    for i, neighbour in enumerate((far, near)):
        carry["neighbours"][i], carry["lengths"][i] = neighbour, neighbour.square().sum()
        carry["goals"][4 + i] = neighbour.log_softmax(0)
    carry["anything"] = torch.tensor(True)
    h = torch.tensor([[0.5, 0, 0, 0, 0, 1.0]], dtype=torch.float64)
    p, q = torch.softmax(h[0], 0), torch.softmax(near, 0)
    assert loss_of(method, h, [3], carry) == pytest.approx(float((p * (p / q).log()).sum()))


def test_semantic_prototypes_hold_only_minority_classes() -> None:
    method = replace(OFF, use_semantic=True, alpha=0.5)
    training = prepared(method, FEDERATION)  # 6, 2, 3 and 0 samples: classes 1 and 3 are the minority
    loop, _ = rounds(training, 1)
    state = loop.server.state
    client, _ = begun(training)
    carry = method.client_init(method.broadcast(loop.server), {}, client)
    assert carry["counts"].tolist() == [[0, 1, 0, 0]]  # class 3 has no prototype
    h = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert loss_of(method, h, [0, 2, 0], carry) == 0
    goal = state["semantic"][state["cluster"][1]]
    gap = (h[1] - goal).abs()
    smooth = torch.where(gap < 1, gap.square() / 2, gap - 0.5).mean()
    assert loss_of(method, h, [0, 1, 2], carry) == pytest.approx(0.5 * float(smooth))


def test_equally_frequent_classes_have_no_minority() -> None:
    method = replace(OFF, use_semantic=True)
    even = world([0, 0, 1], [1, 2, 2, 3, 3])
    assert not begun(prepared(method, even))[1]["counts"].any()
    assert close(learnt(method, even, 3), learnt(FedAvg(), even, 3))


def test_a_personal_head_stays_and_the_next_round_starts_from_it() -> None:
    method = replace(OFF, head="personal")
    training = prepared(method, FEDERATION)
    loop, client_states = rounds(training, 1)
    own = client_states.get(0)["method"]["head"]  # type: ignore[index]
    assert not torch.equal(own["3.weight"], loop.server.params["3.weight"])
    client, _ = begun(training)
    start = method.initial_params(loop.server.params, {}, {"head": own}, client)
    assert torch.equal(start["3.weight"], own["3.weight"])
    assert torch.equal(start["1.weight"], loop.server.params["1.weight"])
    travelling = [name for name in loop.server.params if method.is_shared(name, training.context)]
    assert travelling == ["1.weight", "1.bias"]
    assert all(OFF.is_shared(name, training.context) for name in loop.server.params)


def test_a_head_of_an_epoch_is_kept_through_the_stages_and_then_begins_as_the_average() -> None:
    method = replace(OFF, head="epoch")
    training = prepared(method, stream(), rounds=4)
    loop, client_states = rounds(training, 2)
    state = client_states.get(0)["method"]  # type: ignore[index]
    client, _ = begun(training)
    average = loop.server.params
    for stage, expected in ((1, state["head"]["3.weight"]), (0, average["3.weight"])):
        start = method.initial_params(average, {}, state, replace(client, stage=stage))
        assert torch.equal(start["3.weight"], expected)
        assert torch.equal(start["1.weight"], average["1.weight"])
    assert not torch.equal(state["head"]["3.weight"], average["3.weight"])
    assert all(method.is_shared(name, training.context) for name in average)


@pytest.mark.parametrize("clustering", ["finch", "kmeans"])
@pytest.mark.parametrize("classes", [2, 4])
def test_one_participant_with_one_sample(clustering: str, classes: int) -> None:
    method = FedMLP(clustering=clustering)  # type: ignore[arg-type]
    assert finite(learnt(method, world([1], [0], classes=classes), 3, clients_per_round=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": -1.0},
        {"clustering": "dbscan"},
        {"inter_task_kl": "both"},
        {"smooth_l1": "max"},
        {"memory": "none"},
        {"head": "none"},
    ],
)
def test_bad_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(HoldfastError, match=f"fedmlp: {next(iter(wrong))} is"):
        FedMLP(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("clustering", "on_server"), [("kmeans", 3), ("fixed", 5)])
def test_the_number_of_clusters(clustering: str, on_server: int) -> None:
    """√C of the seven classes, rounded up, or 5; and at a client the same, or 2."""
    method = FedMLP(clustering=clustering)  # type: ignore[arg-type]
    training = prepared(method, world(list(range(7)) * 2, [6, 5], classes=7))
    loop, states = rounds(training, 1)
    assert len(loop.server.state["semantic"]) == on_server
    carry = begun(training, state=states.get(0)["method"], round=2)[1]
    assert int(carry["lengths"].isfinite().sum()) == (2 if clustering == "fixed" else 3)


def test_epochs_of_the_classifier_leave_some_for_the_body() -> None:
    with pytest.raises(HoldfastError, match="after the 2 epochs of the classifier; local_epochs is 2"):
        prepared(FedMLP(head_epochs=2), world([0, 1], [2, 3]))
