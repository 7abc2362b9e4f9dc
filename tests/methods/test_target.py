"""TARGET against its equations in plain PyTorch and NumPy, its edge cases, and what it remembers of a stream."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_world import learnt, net, prepared, rounds, same, world
from torch import Tensor, nn
from torch.nn import functional as F

import holdfast as hf
from holdfast.core.random import generator
from holdfast.core.settings import Settings
from holdfast.core.trees import leaves
from holdfast.data.federation import Federation
from holdfast.engine.clients import Job
from holdfast.engine.state_cache import StateCache
from holdfast.methods import parse_method
from holdfast.methods.target import TARGET
from holdfast.training.session import Training

QUICK: dict[str, Any] = {
    "samples": 14, "batch_size": 5, "generator_steps": 3, "warmup": 1, "student_steps": 4, "replay": 4,
}  # fmt: skip
CHANGE = 3  # the round of `streamed` that begins the second stage


def streamed(*clients: Sequence[Sequence[int]], n: int = 2) -> Federation:
    """Clients that hold samples of these labels at each stage, each of which lasts ``n`` rounds."""
    stages = len(clients[0])
    federation = world(*[[label for stage in client for label in stage] for client in clients])
    sizes = [len(stage) for client in clients for stage in client]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return replace(federation, offsets=offsets, stages=stages, schedule=hf.EveryN(n, stages))


TWO = ([[0, 1] * 3, [2, 3] * 3], [[0, 0, 1, 1], [2, 3, 3]])


def normed(classes: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 6), nn.BatchNorm1d(6),
        nn.ReLU(), nn.Linear(6, classes),
    )  # fmt: skip


# The synthesis in plain PyTorch ------------------------------------------------------------------------


class Generator(nn.Module):
    """For images of 3 x 3 pixels, cut out of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 128)
        self.blocks = nn.Sequential(
            nn.BatchNorm2d(128), nn.Upsample(scale_factor=2), nn.Conv2d(128, 128, 3, padding=1, bias=False),
            nn.BatchNorm2d(128), nn.LeakyReLU(0.2), nn.Upsample(scale_factor=2),
            nn.Conv2d(128, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.LeakyReLU(0.2),
            nn.Conv2d(64, 1, 3, padding=1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, noise: Tensor) -> Tensor:
        images: Tensor = self.blocks(self.linear(noise).view(-1, 128, 1, 1))
        return images[:, :, :3, :3]


def drawn_generator(rng: np.random.Generator) -> Generator:
    model = Generator().double()
    first, second, third = model.blocks[2], model.blocks[6], model.blocks[9]
    order = [
        (model.linear.weight, 256), (model.linear.bias, 256), (first.weight, 128 * 9), (second.weight, 128 * 9),
        (third.weight, 64 * 9), (third.bias, 64 * 9),
    ]  # fmt: skip
    for weights, fan in order:
        bound = 1 / np.sqrt(fan)
        weights.data = torch.from_numpy(rng.uniform(-bound, bound, tuple(weights.shape)))
    return model


def drawn_student(teacher: nn.Module, rng: np.random.Generator) -> nn.Module:
    student = copy.deepcopy(teacher)
    for module in student.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            shape = tuple(module.weight.shape)
            field = int(np.prod(shape[2:]))
            std = np.sqrt(2 / (shape[0] * field + shape[1] * field))
            module.weight.data = torch.from_numpy(std * rng.standard_normal(shape))
            assert module.bias is not None
            module.bias.data = torch.from_numpy(rng.standard_normal(shape[0]))
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.weight.data = torch.from_numpy(1 + 0.02 * rng.standard_normal(len(module.weight)))
            module.bias.data.zero_()
    return student


def divergence(teacher: Tensor, student: Tensor, tau: float) -> Tensor:
    p, q = (teacher / tau).softmax(1), (student / tau).softmax(1)
    return (p * (p / q).log()).sum(1)


def synthesised(
    teacher: nn.Module, classes: list[int], options: TARGET, round: int, to_input: Any, seed: int = 0
) -> list[np.ndarray]:
    """The batches of images with values in [0, 1], before they are stored with 8 bits."""
    teacher = copy.deepcopy(teacher).eval()
    statistics: list[tuple[nn.Module, Tensor]] = []
    norms = [m for m in teacher.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        norm.register_forward_hook(lambda module, inputs, _: statistics.append((module, inputs[0])))
    student = drawn_student(teacher, generator(seed, "student weights", round))
    for module in student.modules():
        module._forward_hooks.clear()
    meta = drawn_generator(generator(seed, "generator weights", round))
    meta_adam = torch.optim.Adam(meta.parameters(), 0.002 * options.generator_steps, betas=(0.5, 0.999))
    student_sgd = torch.optim.SGD(student.parameters(), 0.2, momentum=0.9, weight_decay=1e-4)
    count = int(np.ceil(options.samples / options.batch_size))
    sizes = [options.samples // count + (i < options.samples % count) for i in range(count)]
    batches: list[np.ndarray] = []
    means: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    trained = 0
    for number, size in enumerate(sizes, 1):
        rng = generator(seed, "synthetic images", round, number)
        z = torch.from_numpy(rng.standard_normal((size, 256))).requires_grad_()
        labels = torch.from_numpy(rng.integers(len(classes), size=size))
        fast = copy.deepcopy(meta)
        adam = torch.optim.Adam(
            [{"params": fast.parameters()}, {"params": [z], "lr": 0.01}], 0.002, betas=(0.5, 0.999)
        )
        meta_adam.zero_grad()
        sums = [torch.zeros_like(p) for p in fast.parameters()]
        tried: list[tuple[float, np.ndarray]] = []
        for _ in range(options.generator_steps):
            images = fast(z)
            statistics.clear()
            t = teacher(to_input(images))[:, classes]
            student.eval()
            s = student(to_input(images))[:, classes]
            loss = options.ce * F.cross_entropy(t, labels)
            now = {}
            for norm, x in statistics:
                channels = x.transpose(0, 1).flatten(1)
                mean, var = channels.mean(1), channels.var(1, unbiased=False)
                if norm in means:
                    mean, var = 0.9 * means[norm][0] + 0.1 * mean, 0.9 * means[norm][1] + 0.1 * var
                loss = loss + options.bn * (
                    (norm.running_mean - mean).norm() + (norm.running_var - var).norm()
                )
                now[norm] = (mean.detach(), var.detach())
            if number >= options.warmup:
                agree = t.max(1).indices == s.max(1).indices
                loss = loss - options.adversarial * torch.where(agree, divergence(t, s, 1.0), 0.0).mean()
            tried.append((loss.item(), images.detach().numpy()))
            adam.zero_grad()
            student.zero_grad()
            teacher.zero_grad()
            loss.backward()
            sums = [total + p.grad for total, p in zip(sums, fast.parameters(), strict=True)]
            adam.step()
        means = now
        batches.append(min(tried, key=lambda pair: pair[0])[1])
        for p, total in zip(meta.parameters(), sums, strict=True):
            p.grad = total
        meta_adam.step()
        if options.warmup < number < count:
            for group in student_sgd.param_groups:
                group["lr"] = 2e-4 + (0.2 - 2e-4) * (1 + np.cos(np.pi * trained / 200)) / 2
            trained += 1
            stored = torch.from_numpy(np.floor(np.concatenate(batches) * 255) / 255)
            rng = generator(seed, "synthetic batches", round, number)
            order: list[int] = []
            for _ in range(options.student_steps):
                if not order:
                    order = rng.permutation(len(stored)).tolist()
                chosen, order = order[: options.batch_size], order[options.batch_size :]
                rng.integers(2**32)  # of dropout
                x = to_input(stored[chosen])
                student.train()
                apart = divergence(teacher(x)[:, classes].detach(), student(x)[:, classes], 20.0)
                student_sgd.zero_grad()
                (400 * apart.mean()).backward()
                student_sgd.step()
    return batches


@pytest.mark.parametrize("model", [net, normed])
def test_images_are_those_of_the_equations(model: Any) -> None:
    method = TARGET(**QUICK | {"samples": 29, "batch_size": 6})
    training = prepared(method, streamed(*TWO), model(), rounds=4)
    loop, _ = rounds(training, CHANGE - 1)
    teacher = model().double()
    teacher.load_state_dict({**loop.server.params, **loop.server.buffers})
    lowest, highest = training.context.lowest, training.context.highest
    loop.round(CHANGE)
    found = loop.server.state["replay"]
    expected = np.concatenate(
        synthesised(teacher, [0, 1], method, CHANGE, lambda images: lowest + (highest - lowest) * images)
    )
    assert found["images"].dtype == torch.uint8
    assert found["old"].tolist() == [True, True, False, False]
    assert expected.std() > 0.05  # no constant images
    apart = found["images"].double().numpy() - 255 * expected
    assert apart.max() < 1e-6  # truncated, not rounded
    assert apart.min() > -1 - 1e-6
    with torch.no_grad():
        x = lowest + (highest - lowest) * found["images"].double() / 255
        torch.testing.assert_close(found["logits"], teacher.eval()(x), rtol=1e-9, atol=1e-9)


# The local step in NumPy -------------------------------------------------------------------------------


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def test_a_round_of_one_client_in_numpy() -> None:
    """A linear model, whose only client has two batches of the classes 2 and 1; 0 and 1 are old, 3 is yet to come."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 4))
    federation = streamed([[0, 1] * 3, [2, 2, 1, 2, 1]])
    method = TARGET(**QUICK, lam=3.0, tau=2.0)
    training = prepared(method, federation, model, local_epochs=2, batch_size=3, lr=0.1)
    loop, _ = rounds(training, CHANGE - 1)
    weight, bias = (loop.server.params[k].numpy().copy() for k in ("1.weight", "1.bias"))
    loop.round(CHANGE)
    replay = {k: v.numpy() for k, v in loop.server.state["replay"].items()}
    low, high = (t.numpy() for t in (training.context.lowest, training.context.highest))
    synthetic = (low + (high - low) * replay["images"] / 255).reshape(14, 9)
    order = generator(0, "synthetic order", CHANGE, 0).permutation(14)
    ids = federation.client(0, 1)
    rows = loop.runner.plan(Job(0, ids, 1), CHANGE).plan.rows
    x_all, y_all = training.data.read_labelled(ids)
    x_all, y_all = x_all.numpy().reshape(5, 9), y_all.numpy()
    assert [len(r) for r in rows] == [3, 2, 3, 2]
    for step, batch in enumerate(rows):
        x, y = x_all[batch], y_all[batch]
        z = x @ weight.T + bias
        error = np.zeros_like(z)
        error[:, [1, 2, 3]] = softmax(z[:, [1, 2, 3]])  # not 0, which is old and not the client's
        error[np.arange(len(y)), y] -= 1
        used = [order[(4 * step + i) % 14] for i in range(4)]
        s, t = (synthetic[used] @ weight.T + bias)[:, :2], replay["logits"][used][:, :2]
        kept = 3.0 * (softmax(s / 2) - softmax(t / 2)) / 2 / 4
        gradient, shift = error.T @ x / len(y), error.sum(0) / len(y)
        gradient[:2] += kept.T @ synthetic[used]
        shift[:2] += kept.sum(0)
        weight, bias = weight - 0.1 * gradient, bias - 0.1 * shift
    np.testing.assert_allclose(loop.server.params["1.weight"].numpy(), weight, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(loop.server.params["1.bias"].numpy(), bias, rtol=1e-9, atol=1e-12)


# Streams and their edges ------------------------------------------------------------------------------


def test_without_a_stream_it_is_fedavg() -> None:
    federation = world([0] * 5 + [1] * 3, [1, 2, 3] * 2, [3, 0])
    assert same(learnt(TARGET(), federation), learnt(hf.FedAvg(), federation))
    training = prepared(TARGET(), federation, dp="epsilon=8,delta=0.01,clip=1", batch_size=8)
    loop, _ = rounds(training, 1)
    assert loop.server.state == {}


def test_the_first_stage_is_fedavg() -> None:
    one, other = (rounds(prepared(m, streamed(*TWO)), CHANGE - 1)[0] for m in (TARGET(**QUICK), hf.FedAvg()))
    assert same(one.server.params, other.server.params)
    one.round(CHANGE)
    other.round(CHANGE)
    assert not same(one.server.params, other.server.params)


def test_images_are_made_once_for_a_stage() -> None:
    loop, _ = rounds(prepared(TARGET(**QUICK), streamed(*TWO), rounds=5), CHANGE)
    images = loop.server.state["replay"]["images"]
    loop.round(CHANGE + 1)
    assert loop.server.state["replay"]["images"] is images
    assert loop.server.state["seen"].all()  # the old classes are those at the change of the stage
    assert loop.server.state["replay"]["old"].tolist() == [True, True, False, False]


def test_a_client_without_data_at_a_stage_is_passed_over() -> None:
    federation = streamed([[0, 1] * 3, []], [[], [2, 3] * 3])
    loop, _ = rounds(prepared(TARGET(**QUICK), federation, rounds=4), CHANGE + 1)
    assert loop.server.state["seen"].all()
    assert all(bool(p.isfinite().all()) for p in loop.server.params.values())


@pytest.mark.parametrize(
    "stages",
    [
        [[0, 1] * 3, [0, 1] * 3],  # no new classes
        [[0, 1] * 3, [1, 1, 1]],  # one class, which is old: only the distillation remains
        [[0, 0, 0], [1, 2], [0, 0, 3]],  # a class returns
        [[0, 0, 0], [1, 1, 1], [2, 2, 2]],  # one class for each stage
    ],
)
def test_classes_that_stay_or_return(stages: list[list[int]]) -> None:
    last = 2 * len(stages)
    loop, _ = rounds(prepared(TARGET(**QUICK), streamed(stages), rounds=last), last)
    old = {label for stage in stages[:-1] for label in stage}
    assert loop.server.state["replay"]["old"].nonzero().flatten().tolist() == sorted(old)
    assert loop.server.state["seen"].nonzero().flatten().tolist() == sorted({*old, *stages[-1]})
    assert all(bool(p.isfinite().all()) for p in loop.server.params.values())


@pytest.mark.parametrize("method", ["target", "fedprox+target", "fedka+target"])
@pytest.mark.parametrize("model", [net, normed])
def test_engines_agree_on_a_stream(method: str, model: Any) -> None:
    options = ",".join(f"{k}={v}" for k, v in QUICK.items())
    built = parse_method(method.replace("target", f"target:{options}"))
    found = []
    for engine in ("sequential", "vectorized"):
        settings = Settings(
            rounds=4, local_epochs=2, batch_size=3, lr=0.05, momentum=0.9, evaluate_locals=False
        )
        training = Training(
            built, model(), streamed(*TWO), settings, engine=engine, device="cpu", precision="float64",
            parallel_clients=2 if engine == "vectorized" else None,
        )  # fmt: skip
        loop = training.loop(StateCache(None, None))
        for number in range(1, 5):
            loop.round(number)
        found.append(dict(leaves({"params": loop.server.params, "state": loop.server.state})))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-7, atol=1e-9, msg=name)


def test_micro_batches_change_nothing_but_rounding() -> None:
    whole, parts = (
        rounds(prepared(TARGET(**QUICK), streamed(*TWO), micro_batch_size=size), CHANGE)[0].server.params
        for size in (None, 2)
    )
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-9, atol=1e-11)


class Died(BaseException):
    """Nothing in a run expects this."""


@pytest.mark.parametrize("after", [1, 2, 3])
def test_the_same_bits_after_a_kill(after: int, tmp_path: Path) -> None:
    """In the middle of a stage, before a change of the stage and after the first round of a stage."""

    def trained(**where: Any) -> hf.Run:
        schedule = {"rounds": 4, "local_epochs": 2, "batch_size": 3, "lr": 0.05, "momentum": 0.5}
        return hf.train(
            TARGET(**QUICK), normed(), streamed(*TWO), **schedule, device="cpu", checkpoint_seconds=0, **where
        )

    def die(record: dict[str, Any]) -> None:
        if record["round"] == after:
            raise Died

    calm = trained()
    with pytest.raises(Died):
        trained(out=tmp_path, on_round=die)
    resumed = trained(out=tmp_path, resume=True)
    assert same(calm.model.state_dict(), resumed.model.state_dict())


def test_with_secure_aggregation_the_server_learns_the_classes_from_sums() -> None:
    loop, _ = rounds(prepared(TARGET(**QUICK), streamed(*TWO, *TWO), secure="secagg+", rounds=4), CHANGE)
    assert loop.server.state["replay"]["old"].tolist() == [True, True, False, False]


def test_samples_that_are_not_images_are_refused() -> None:
    x, y = np.zeros((8, 5), np.float32), np.arange(8) % 2
    data = hf.Dataset.from_arrays(x, y, x, y)
    federation = hf.stream(data, hf.IID(), clients=2, tasks_per_client=2)
    with pytest.raises(hf.HoldfastError, match=r"have the shape \(5,\), not \(channels, height, width\)"):
        hf.train(TARGET(), "mlp", federation, rounds=2, device="cpu")
    together = hf.federate(data, hf.IID(), clients=2)
    assert len(hf.train(TARGET(), "mlp", together, rounds=1, device="cpu").records) == 1


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 5, 7), (2, 1, 2)])
def test_images_have_the_shape_of_the_data(shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(24) % 4
    data = hf.Dataset.from_arrays(
        rng.integers(0, 256, (24, *shape), dtype=np.uint8), y, np.zeros((4, *shape), np.uint8), np.arange(4)
    )
    federation = hf.stream(
        data,
        hf.IID(),
        clients=2,
        tasks_per_client=2,
        stage_classes=[[0, 1], [2, 3]],
        schedule=hf.EveryN(1, 2),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 4))
    loop, _ = rounds(prepared(TARGET(**QUICK), federation, model), 2)
    assert loop.server.state["replay"]["images"].shape == (14, *shape)


def test_it_remembers_a_stream_of_digits_better_than_fedavg() -> None:
    """The setting was chosen with seed 0."""
    digits, accuracy = hf.load("digits"), {}
    methods = (hf.FedAvg(), TARGET(lam=5.0, samples=512, batch_size=64, student_steps=20, warmup=2))
    for method in methods:
        found = []
        for seed in (1, 2, 3):
            federation = hf.stream(
                digits, hf.Dirichlet(0.5), clients=5, tasks_per_client=2, stage_classes=[range(5), range(5, 10)],
                schedule=hf.EveryN(10, 2), seed=seed,
            )  # fmt: skip
            run = hf.train(
                method, "cnn", federation, rounds=20, local_epochs=3, batch_size=32, lr=0.05, momentum=0.9,
                evaluate_locals=False, seed=seed, device="cpu",
            )  # fmt: skip
            found.append(
                [
                    run.class_accuracy[9][:5].mean(),
                    run.class_accuracy[-1][:5].mean(),
                    run.class_accuracy[-1].mean(),
                ]
            )
        accuracy[method.name] = np.array(found)
    before, old, everything = (accuracy["target"] - accuracy["fedavg"]).T
    assert (before == 0).all()  # of the classes of the first stage, at its end
    assert (old > 0.3).all()  # of these classes at the end
    assert everything.mean() > 0


def test_batch_norm_without_running_statistics_and_batches_of_one_tiny_image() -> None:
    x = np.random.default_rng(0).integers(0, 255, (40, 1, 4, 4)).astype(np.uint8)
    data = hf.Dataset.from_arrays(x, np.arange(40) % 4, x[:8], np.arange(8) % 4)
    federation = hf.stream(data, hf.IID(), clients=2, tasks_per_client=2, schedule=hf.EveryN(1, 2))
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.BatchNorm2d(2, track_running_stats=False),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    small = {"samples": 4, "batch_size": 2, "generator_steps": 1, "warmup": 0, "student_steps": 1}
    run = hf.train(hf.TARGET(**small), net, federation, rounds=2, lr=0.1, progress=False)
    assert len(run.records) == 2
    with pytest.raises(
        hf.HoldfastError, match="makes a batch of one image, which its generator cannot normalise"
    ):
        hf.train(hf.TARGET(**small | {"batch_size": 1}), net, federation, rounds=2, lr=0.1, progress=False)
