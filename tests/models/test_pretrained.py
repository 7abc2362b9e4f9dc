"""Fine-tuning: what is frozen is neither sent nor kept, adapters of peft work as they are."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import holdfast as hf

PADDING = 0
SHORT = {"rounds": 2, "batch_size": 8, "precision": "float64", "evaluate_locals": False, "progress": False}


class Encoder(nn.Module):
    """One block of attention over token ids, with positions in a buffer that is no part of the state."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=PADDING)
        self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("positions", torch.arange(6), persistent=False)

    def forward(self, ids):
        x = self.embedding(ids) + self.positions[:, None] / 10
        real = ids != PADDING
        scores = self.query(x) @ x.transpose(-1, -2) + torch.where(real, 0.0, -1e9)[:, None]
        return (scores.softmax(-1) @ self.value(x) * real[..., None]).sum(1)


class Texts(nn.Module):
    def __init__(self, outputs=2):
        super().__init__()
        self.body, self.classifier = Encoder(), nn.Linear(8, outputs)

    def forward(self, ids):
        return self.classifier(self.body(ids))


def frozen_body():
    torch.manual_seed(0)
    net = Texts()
    net.body.requires_grad_(False)
    return net


def with_lora(dropout=0.0):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, target_modules=["query", "value"], modules_to_save=["classifier"], lora_dropout=dropout
    )
    return peft.get_peft_model(Texts(), config)


MAKERS = {"a frozen body": frozen_body, "LoRA": with_lora, "LoRA with dropout": lambda: with_lora(0.5)}


@pytest.fixture(scope="module")
def federation():
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 20, (90, 6))
    ids[np.arange(6) >= rng.integers(2, 7, 90)[:, None]] = PADDING
    y = (ids.max(1) > 14).astype(np.int64)
    return hf.federate(hf.Dataset.from_arrays(ids[:60], y[:60], ids[60:], y[60:]), "iid", clients=3)


def trained(net):
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_only_what_is_trained_travels_and_is_kept(make, federation, tmp_path):
    net = make()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    settings = SHORT | {"out": tmp_path, "local_epochs": 2}
    run = hf.train("ditto", net, federation, stop_after=1, **settings)
    names, size = trained(net).keys(), sum(p.numel() for p in trained(net).values())
    assert run.records[0]["bytes_up"] == run.records[0]["bytes_down"] == 3 * 8 * size
    (state,) = (tmp_path / "checkpoint").glob("state-*.safetensors")
    saved = load_file(state).keys()
    assert {name.removeprefix("params/") for name in saved if name.startswith("params/")} == names
    assert not any(name.startswith("buffers/") for name in saved)
    kept = [load_file(file) for file in (tmp_path / "checkpoint" / "clients").glob("*.safetensors")]
    assert [tensors.keys() for tensors in kept] == [{f"method/personal/{name}" for name in names}] * 3
    hf.train("ditto", make(), federation, resume=True, **settings)
    model = load_file(tmp_path / "model.safetensors")
    assert model.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(model[name].to(value.dtype), value) == (name not in trained(net)), name
    make().double().load_state_dict(model)  # all of it


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedfa"])
def test_engines_agree(make, method, federation):
    runs = [hf.train(method, make(), federation, engine=e, **SHORT) for e in ("sequential", "vectorized")]
    states = [run.model.state_dict() for run in runs]
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-7, atol=1e-9)


def test_the_steps_are_those_of_a_torch_loop(federation):
    net = with_lora().double()
    one = hf.federate(federation.dataset, [range(60)])
    run = hf.train(
        "fedavg", net, one, **SHORT | {"batch_size": 60, "optimizer": "adam", "keep_optimizer": True}
    )
    optimizer = torch.optim.Adam(trained(net).values(), lr=0.001)
    x, y = federation.dataset.x_train, federation.dataset.y_train
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    after = run.model.state_dict()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(after[name].double(), value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_killed_run_of_adapters_goes_on_with_the_same_bits(engine, federation, tmp_path):
    settings = SHORT | {"rounds": 3, "engine": engine, "optimizer": "adamw"}
    whole = hf.train("fedavg", with_lora(0.5), federation, **settings)

    def stop(record):
        raise KeyboardInterrupt

    begun = settings | {"out": tmp_path / "run", "checkpoint_seconds": 0}
    with pytest.raises(KeyboardInterrupt):
        hf.train("fedavg", with_lora(0.5), federation, on_round=stop, **begun)
    again = hf.train("fedavg", with_lora(0.5), federation, resume=True, **begun)
    states = [run.model.state_dict() for run in (whole, again)]
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


def test_a_run_is_not_resumed_on_another_body(federation, tmp_path):
    hf.train("fedavg", frozen_body(), federation, out=tmp_path, **SHORT)
    other = frozen_body()
    other.body.query.bias.data += 1
    with pytest.raises(hf.HoldfastError, match="another frozen part of the model, by its hash"):
        hf.train("fedavg", other, federation, out=tmp_path, resume=True, **SHORT | {"rounds": 3})
    run = hf.train("fedavg", frozen_body(), federation, out=tmp_path, resume=True, **SHORT | {"rounds": 3})
    assert len(run.records) == 3


class Counting(nn.Module):
    """Counts its batches of training in a buffer that is no part of the state."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(6, 2)
        self.register_buffer("batches", torch.zeros(1), persistent=False)
        self.register_buffer("scale", torch.full((1,), 0.1), persistent=False)

    def forward(self, ids):
        if self.training:
            self.batches = self.batches + 1
        return self.classifier(ids.float() * self.scale)


def test_buffers_outside_of_the_state_are_sent_only_if_training_changes_them(federation):
    run = hf.train("fedavg", Counting(), federation, **SHORT)
    assert run.records[-1]["bytes_up"] == 3 * 8 * (6 * 2 + 2 + 1)  # the weights and the counter


@pytest.mark.filterwarnings("ignore:.*requires no gradient")
def test_a_frozen_classifier_is_left_as_it_is(federation):
    torch.manual_seed(0)
    net = Texts()
    net.classifier.requires_grad_(False)
    with pytest.warns(hf.HoldfastWarning, match="'classifier', requires no gradient"):
        run = hf.train("fedavg", net, federation, **SHORT)
    assert torch.equal(run.model.classifier.weight, net.classifier.weight.double())
    assert not torch.equal(run.model.body.query.weight, net.body.query.weight.double())
    with pytest.raises(hf.HoldfastError, match=r"fedfa .*Linear"):
        hf.train("fedfa", net, federation, **SHORT)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_models_of_transformers_return_objects_with_logits(engine, federation):
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=8, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    net = transformers.BertForSequenceClassification(config)
    lora = peft.get_peft_model(
        net, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    )
    before = {name: value.clone() for name, value in trained(lora).items()}
    run = hf.train("fedavg", lora, federation, engine=engine, **SHORT)
    assert run.experiment["engine"] == engine
    assert run.records[-1]["bytes_up"] == 3 * 8 * sum(p.numel() for p in before.values())
    assert all(not torch.equal(dict(run.model.named_parameters())[name], v) for name, v in before.items())
