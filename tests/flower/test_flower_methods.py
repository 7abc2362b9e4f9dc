"""Every method on Flower gives the model of the sequential engine; and the tensors that leave a site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_world import CLASSES, SCHEDULE, SIZES, World, apart, federation, reference
from flwr.clientapp.mod import LocalDpMod
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from torch import nn

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.flower import FlowerApp, for_server
from holdfast.flower.messages import tree_from_record
from holdfast.flower.wire import spec_of
from holdfast.methods.base import Method
from holdfast.methods.registry import METHODS, parse_method


def assert_same_records(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for key in other.keys() - {"seconds"}:
            assert repr(hf_plain(one[key])) == repr(hf_plain(other[key])), key


def hf_plain(value: Any) -> Any:
    """The value as read from a file, where NaN is None."""
    if isinstance(value, dict):
        return {k: hf_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [hf_plain(v) for v in value]
    return None if isinstance(value, float) and np.isnan(value) else value


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method(name: str, tmp_path: Path) -> None:
    """With sampling, unequal clients, memories, payloads, public data; metrics of local models included."""
    world = World(tmp_path, method=name, clients_per_round=4, evaluate_locals=True).run()
    run = reference(METHODS[name](), clients_per_round=4, evaluate_locals=True)
    assert apart(world.model, run.model.state_dict()) <= 1e-9
    assert_same_records(world.records, run.records)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedka", "fedreg", "fednova"])
def test_without_tests_of_local_models(name: str, tmp_path: Path) -> None:
    world = World(tmp_path, method=name, among=federation(floats=True)).run()
    run = reference(METHODS[name](), among=federation(floats=True))
    assert apart(world.model, run.model.state_dict()) <= 1e-9


def test_a_stack(tmp_path: Path) -> None:
    world = World(tmp_path, method="scaffold+fedntd+fedprox").run()
    run = reference(parse_method("scaffold+fedntd+fedprox"))
    assert apart(world.model, run.model.state_dict()) <= 1e-9


@pytest.mark.parametrize(
    "name", ["fedavg", "fedmlp", "target:samples=12,batch_size=6,generator_steps=2,student_steps=0"]
)
def test_a_stream(name: str, tmp_path: Path) -> None:
    data = federation().dataset
    streaming = hf.stream(data, hf.IID(), clients=3, tasks_per_client=2, seed=1)
    world = World(tmp_path, among=streaming, method=name, rounds=4, evaluate_locals=True).run()
    run = reference(parse_method(name), among=streaming, rounds=4, evaluate_locals=True)
    assert apart(world.model, run.model.state_dict()) <= 1e-9
    assert_same_records(world.records, run.records)


def hospitals(method: Method) -> FlowerApp:
    """Each node has arrays of its own and serves one client; the model has BatchNorm."""
    among = federation()

    def site(node: Any, run: Any) -> hf.Dataset:
        ids = torch.from_numpy(among.client(node["partition-id"]))
        x, y = among.dataset.x_train[ids], among.dataset.y_train[ids]
        return hf.Dataset.from_arrays(x, y, x, y, classes=among.dataset.classes)

    def net() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES)
        )

    return FlowerApp(site, lambda run: for_server(among.dataset, among.public), model=net, method=method)


def test_own_model_and_a_data_set_at_each_site(tmp_path: Path) -> None:
    app = hospitals(hf.FedNTD())
    world = World(tmp_path, nodes=len(SIZES), app=app).run()
    from holdfast.flower.app import AppConfig

    model = AppConfig(app, world.config).model()
    settings = {"rounds": 3, "local_epochs": 2, "batch_size": 3, "lr": 0.05, "momentum": 0.9, "seed": 4}
    run = hf.train(
        hf.FedNTD(),
        model,
        federation(),
        engine="sequential",
        device="cpu",
        precision="float64",
        evaluate_locals=False,
        **settings,
    )
    assert apart(world.model, run.model.state_dict()) <= 1e-9


CODE = """
from dataclasses import dataclass
from typing import ClassVar

import holdfast as hf
from torch import nn


@dataclass(frozen=True)
class Pull(hf.Method):
    name: ClassVar[str] = "pull"
    mu: float = 0.1

    def proximal_mu(self):
        return self.mu


def net(shape, num_classes, width=6):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, num_classes))
"""


def with_code(folder: Path, **config: Any) -> World:
    """A federation whose server and two sites have a folder with the file code.py each."""
    for place in ("server", "site0", "site1"):
        (folder / place).mkdir(parents=True)
        (folder / place / "code.py").write_text(CODE)
    world = World(
        folder,
        **{
            "method": "scaffold+code.py:Pull:mu=0.3",
            "model": "code.py:net:width=5",
            "code_dir": f"{folder}/server",
        }
        | config,
    )
    for i, node in enumerate(world.grid.nodes.values()):
        node["code-dir"] = f"{folder}/site{i}"
    return world


def test_a_method_and_a_model_in_files_at_every_site(tmp_path: Path) -> None:
    world = with_code(tmp_path).run()
    parts = f"{tmp_path}/server/code.py"
    run = hf.train(
        f"scaffold+{parts}:Pull:mu=0.3",
        f"{parts}:net:width=5",
        federation(),
        engine="sequential",
        device="cpu",
        precision="float64",
        evaluate_locals=False,
        **SCHEDULE,
    )
    assert apart(world.model, run.model.state_dict()) <= 1e-9
    stored = hf.RunDirectory.open(world.out).experiment
    assert stored["method"]["pull"]["file"] == parts
    assert stored["model"] == run.experiment["model"]
    assert hf.Run.open(world.out).accuracy == pytest.approx(run.accuracy)


def without_folder(site: dict[str, Any]) -> None:
    del site["code-dir"]


def without_file(site: dict[str, Any]) -> None:
    Path(site["code-dir"], "code.py").unlink()


def with_another_file(site: dict[str, Any]) -> None:
    Path(site["code-dir"], "code.py").write_text(CODE + "\nimport os\n")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without_folder, r"client 1, 3, 5 of 6 .*node 102 answers: .*'code\.py:Pull' is in a file"),
        (without_file, r"node 102 answers: .*the file '.*site1/code"),
        (
            with_another_file,
            r"node 102 answers: .* at this site differs from the server's file \(.*copy the server's file to this site",
        ),
    ],
)
def test_a_site_refuses_code_that_it_does_not_have(change: Any, sentence: str, tmp_path: Path) -> None:
    world = with_code(tmp_path, rounds=1)
    change(list(world.grid.nodes.values())[1])
    with pytest.raises(HoldfastError, match=sentence):
        world.run()
    assert all(m.metadata.message_type != "train" for m in world.grid.sent)


def test_a_file_that_changes_during_a_run_is_an_incident(tmp_path: Path) -> None:
    world = with_code(tmp_path, min_clients=1, rounds=2)

    def changed(asked: Any, reply: Any) -> list[Any]:
        if not reply.has_error() and "client 1" in reply.content:  # site 1 has trained in the first round
            (tmp_path / "site1" / "code.py").write_text(CODE + "\n# another\n")
        return [reply]

    world.grid.fault = changed
    world.run()
    details = [i["detail"] for r in world.records for i in r["incidents"]]
    assert len(details) == 3
    assert all("code.py" in detail and "differs from the server's file" in detail for detail in details)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"code_dir": ""}, r"the method 'code\.py:Pull' is in a file, .*code-dir=\"/srv/fl/code\""),
        (
            {"method": "json:loads"},
            r"the method 'json:loads' cannot be loaded by its import path here; copy its file",
        ),
        ({"method": "../site0/../x/code.py:Nothing"}, r"unknown name in .*/server/code\.py 'Nothing'"),
        (
            {"method": "code.py:Pull:file=/etc/passwd,mu=0.1"},
            r"the file '.*/server/passwd' for the method does not exist",
        ),
    ],
)
def test_the_server_loads_code_from_its_folder_alone(
    config: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(HoldfastError, match=sentence):
        with_code(tmp_path, **config).run()


def test_several_clients_of_a_node_share_a_message(tmp_path: Path) -> None:
    world = World(tmp_path, nodes=2, method="fedavg", rounds=2).run()
    training = [m for m in world.grid.sent if m.metadata.message_type == "train"]
    assert len(training) == 2 * 2
    assert sorted(k for m in training[:2] for k in m.content["request"]["clients"]) == list(range(len(SIZES)))


def leaving(world: World) -> dict[str, list[str]]:
    """The tensors of the first client's first reply, by the first part of their path."""
    reply = next(m for m in world.grid.received if "client 0" in m.content)
    parts: dict[str, list[str]] = {}
    for path in spec_of(tree_from_record(reply.content, "client 0")):
        head, _, rest = path.partition("/")
        parts.setdefault(head, []).append(rest)
    return parts


def test_private_tensors_stay_at_the_site(tmp_path: Path) -> None:
    world = World(tmp_path, method="fedrep").run()
    *body, weight, bias = world.model
    assert leaving(world) == {"params": body}
    down = next(m for m in world.grid.sent if m.metadata.message_type == "train").content
    assert not {weight, bias} & tree_from_record(down, "broadcast")["params"].keys()
    proto = World(tmp_path / "proto", method="fedproto").run()
    assert set(leaving(proto)) == {"sums"}
    with_norm = World(tmp_path / "norm", nodes=len(SIZES), app=hospitals(hf.FedProto())).run()
    assert set(leaving(with_norm)) == {"sums"}  # the layer's statistics stay with its weights


@pytest.mark.parametrize("model", ["cnn", "mlp:176,176", "mlp"])
def test_the_payload_is_the_tensors_and_little_else(model: str, tmp_path: Path) -> None:
    """For a model of digits with one client per message; the overhead does not depend on the message's size."""
    among = hf.Experiment(data="digits", clients=4, partition_seed=1).build_federation()
    world = World(
        tmp_path, nodes=4, among=among, method="fedavg", model=model, precision="float32", rounds=1
    ).run()
    raw = sum(v.numel() * v.element_size() for v in world.model.values())
    reply = next(m for m in world.grid.received if "client 0" in m.content)
    sent = next(m for m in world.grid.sent if m.metadata.message_type == "train")
    for message in (reply, sent):
        size = sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
        print(f"{model}: {raw} bytes in {len(world.model)} tensors, {size - raw} more, {size / raw - 1:.2%}")
        assert raw < size <= 1.05 * raw
        assert size - raw <= 1350 + 30 * len(world.model)  # 250 of which bind the reply to its request


def test_flowers_own_mods_can_read_what_is_sent(tmp_path: Path) -> None:
    """Local differential privacy with little noise: it requires the same arrays in request and reply."""
    world = World(tmp_path, nodes=len(SIZES), method="fedavg")
    noisy = LocalDpMod(clipping_norm=1e6, sensitivity=1e-6, epsilon=1.0, delta=1e-5)

    def noisy_training(message: Any, context: Any, call_next: Any) -> Any:
        training = message.metadata.message_type == "train"
        return noisy(message, context, call_next) if training else call_next(message, context)

    world.grid.app = world.app.client_app(mods=[noisy_training])
    world.run()
    assert world.incidents() == []
    difference = apart(world.model, reference(hf.FedAvg()).model.state_dict())
    assert 1e-9 < difference < 1e-3


def test_samples_leave_a_site_only_if_its_config_allows_it(tmp_path: Path) -> None:
    world = World(tmp_path, method="fedka")
    for node in world.grid.nodes.values():
        del node["share-samples"]
    with pytest.raises(HoldfastError, match="share-samples=true"):
        world.run()
    assert not world.out.joinpath("metrics.jsonl").exists()


def test_a_thousand_clients_on_four_nodes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 255, (3000, 1, 4, 4)).astype(np.uint8)
    y = np.arange(3000) % CLASSES
    among = hf.federate(hf.Dataset.from_arrays(x, y, x[:12], y[:12]), hf.IID(), clients=1000, seed=0)
    world = World(tmp_path, nodes=4, among=among, method="fedavg", clients_per_round=20, rounds=3).run()
    run = reference(hf.FedAvg(), among=among, clients_per_round=20, rounds=3)
    assert apart(world.model, run.model.state_dict()) <= 1e-9
    # The server's part of a round is that of the sampled clients.
    assert (
        max(
            len(m.content["request"]["clients"])
            for m in world.grid.sent
            if m.metadata.message_type == "train"
        )
        <= 20
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"learning_rate": 0.1}, "unknown key of .*learning-rate"),
        ({"method": "fedavgg"}, "unknown method 'fedavgg'"),
        ({"rounds": 0}, "rounds is 0"),
        ({"clients": 9}, "client 6, 7, 8 of 9 is not connected"),
        ({"out": ""}, "needs 'out'"),
        ({"lr": "fast"}, "lr is 'fast'"),
    ],
)
def test_invalid_configs_raise_errors_before_training(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    world = World(tmp_path, **({"method": "fedavg"} | changes))
    with pytest.raises(HoldfastError, match=sentence):
        world.run()
    assert all(m.metadata.message_type != "train" for m in world.grid.sent)


def test_two_sites_with_the_same_number(tmp_path: Path) -> None:
    world = World(tmp_path, method="fedavg")
    world.grid.nodes[103] = dict(world.grid.nodes[101])
    with pytest.raises(HoldfastError, match="client 0, 2, 4 is on two nodes"):
        world.run()


def test_a_site_with_other_preprocessing(tmp_path: Path) -> None:
    among = federation()
    from dataclasses import replace

    other = replace(among, dataset=replace(among.dataset, preprocess=hf.Preprocess(flip=True)))
    app = FlowerApp(lambda node, run: other, lambda run: for_server(among.dataset))
    with pytest.raises(HoldfastError, match="preprocesses samples differently"):
        World(tmp_path, app=app, method="fedavg").run()
