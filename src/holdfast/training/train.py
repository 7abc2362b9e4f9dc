"""``train``: trains a model with a method on a federation, and returns a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from torch import nn

from holdfast.core.device import restore_onednn
from holdfast.core.errors import HoldfastError
from holdfast.core.measures import primary_measure
from holdfast.core.optimizers import Factory
from holdfast.core.settings import Described, Settings
from holdfast.core.spec import PositiveCount, validate
from holdfast.data.federation import Federation
from holdfast.methods.base import Method
from holdfast.methods.registry import parse_method
from holdfast.metrics.by_task import OwnMetric
from holdfast.models.network import BatchNormPolicy
from holdfast.models.own import OwnModel
from holdfast.models.registry import ModelSpec, as_model
from holdfast.report.progress_display import progress_display
from holdfast.report.trackers import Tracker
from holdfast.runs import RunDirectory
from holdfast.tasks.base import Loss, Task
from holdfast.training.checks import check_kinds, check_options, checked_trackers
from holdfast.training.execution import SubmitWrite, execute
from holdfast.training.run import Run
from holdfast.training.session import Training
from holdfast.updates.attacks import Attack, parse_attack
from holdfast.updates.compression import Compression, parse_compression
from holdfast.updates.privacy import DP, parse_dp
from holdfast.updates.robust import RobustMean, parse_robust
from holdfast.updates.sample_privacy import SampleDP, parse_dp_samples
from holdfast.updates.secure import SecAggPlus, parse_secure


def train(
    method: Method | str,
    model: ModelSpec | OwnModel | nn.Module | Callable[..., nn.Module] | str,
    federation: Federation,
    *,
    rounds: int,
    clients_per_round: int | None = None,
    sampling: Literal["random", "cyclic"] = "random",
    local_epochs: float = 1,
    local_steps: int | None = None,
    batch_size: int = 32,
    micro_batch_size: int | None = None,
    drop_last: bool = False,
    lr: float | None = None,
    optimizer: Described | Factory = "sgd",
    momentum: float = 0.0,
    keep_optimizer: bool = False,
    weight_decay: float = 0.0,
    lr_decay: float = 1.0,
    lr_schedule: Described = "constant",
    max_grad_norm: float | None = None,
    client_dropout: float = 0.0,
    deadline: float | None = None,
    min_clients: int = 1,
    seed: int = 0,
    dp: DP | Mapping[str, Any] | str | None = None,
    secure: SecAggPlus | Mapping[str, Any] | str | None = None,
    dp_samples: SampleDP | Mapping[str, Any] | str | None = None,
    robust: RobustMean | Mapping[str, Any] | str | None = None,
    attack: Attack | Mapping[str, Any] | str | None = None,
    compress: Compression | Mapping[str, Any] | str | None = None,
    max_update_norm: float | None = None,
    max_update_ratio: float | None = None,
    engine: str = "auto",
    device: str = "auto",
    precision: str = "auto",
    parallel_clients: int | None = None,
    ray_address: str | None = None,
    task: Task | str | Mapping[str, Any] | None = None,
    loss: str | Loss | None = None,
    metrics: Sequence[str | OwnMetric] | str | None = None,
    batchnorm: BatchNormPolicy = "average",
    classifier: str | None = None,
    validation: float | None = None,
    patience: int | None = None,
    evaluate_every: int = 1,
    evaluate_locals: bool = True,
    local_test_samples: int | None = None,
    probe_every: int = 0,
    checkpoint_seconds: float = 30.0,
    out: str | Path | None = None,
    resume: bool = False,
    experiment: Mapping[str, Any] | None = None,
    trackers: Iterable[Tracker] = (),
    on_round: Callable[[dict[str, Any]], None] | None = None,
    progress: bool = True,
    submit_final_write: SubmitWrite | None = None,
    stop_after: int | None = None,
) -> Run:
    """Train ``model`` with ``method`` across the clients of ``federation``.

    Each of ``rounds`` rounds trains ``clients_per_round`` clients (all by default) for ``local_epochs`` epochs over
    their own data in batches of ``batch_size``, with the ``optimizer``, by default SGD with ``momentum`` and
    ``weight_decay``. The learning rate of round t is ``lr * lr_decay ** (t - 1)``, times the factor of
    ``lr_schedule``. The same ``seed`` on the same engine gives the same bits.

    An interrupt (Ctrl-C) stops after the current round: the run so far is returned, marked as ``interrupted``, with a
    checkpoint in ``out``. A second one stops at once.

    Args:
        method: a method, or text as on the command line, such as ``"fedntd:beta=2"`` or ``"mine.py:Mine"``.
        model: one of ``holdfast.models``, text such as ``"mlp:64,64"`` or ``"net.py:make_net"``, a ``torch.nn.Module``
            that ends in a Linear layer, or a function that makes one, called with those of ``shape``,
            ``num_classes`` and ``seed`` that it names.
        federation: the clients and their data, from `federate` or `stream`.
        sampling: ``"random"``, or ``"cyclic"``: every client takes part once, in random order, before any is sampled
            again. With one client per round this is cyclic weight transfer.
        local_epochs: the epochs of a client in a round; a fraction, such as 0.5, is a share of an epoch's batches.
        local_steps: the steps of every client in a round, for any number of samples, instead of ``local_epochs``.
        micro_batch_size: the samples per forward and backward pass. The gradient of a batch is accumulated over
            micro-batches, which needs less memory.
        lr: by default 0.1 for ``sgd``, 0.01 for ``adagrad`` and 0.001 for other optimisers.
        drop_last: skip the last batch of an epoch if it is not full, unless it is the only one. BatchNorm over two
            or three samples may make a model diverge.
        optimizer: ``"sgd"``, ``"sgd:nesterov=true"``, ``"adam:betas=[0.9,0.99]"``, ``"adamw"``, ``"rmsprop"`` or
            ``"adagrad"``; or a class of ``torch.optim`` or a function that makes such an optimiser from parameters and
            ``lr``, which runs on engine ``sequential``.
        lr_schedule: ``"constant"``, ``"exponential:gamma=0.99"``, ``"step:every=30,gamma=0.1"`` or
            ``"cosine:final=0.01"``, over rounds or with ``over=steps`` over the local steps of each round; ``warmup=5``
            adds a linear warm-up.
        keep_optimizer: keep each client's momentum or moments between its rounds; otherwise they start at 0
            in every round.
        client_dropout: the probability that a sampled client fails in a round.
        deadline: seconds of training after which a round ends; clients that have not finished are left out.
        min_clients: the minimum number of usable updates in a round; the run stops below it.
        dp: client-level differential privacy, such as ``hf.DP(epsilon=8, delta=1e-5)`` or ``"epsilon=8,delta=1e-5"``.
        secure: secure aggregation of the updates, ``"secagg+"`` or ``"secagg+:threshold=0.8"``.
        dp_samples: sample-level differential privacy at each client (DP-SGD), such as
            ``hf.SampleDP(epsilon=8, delta=1e-5)``.
        robust: robust aggregation of the updates, such as ``"median"`` or ``"krum:attackers=2"``.
        attack: a simulated attack by a share of the clients, such as ``"sign-flip:0.2"``.
        compress: compression of the updates: ``"int8"``, ``"int4"``, ``"topk:0.01"`` or both, ``"topk:0.1+int8"``.
        max_update_norm: the norm above which an update is rejected.
        max_update_ratio: the multiple of the round's median update norm above which an update is rejected.
        engine: ``auto``, ``sequential``, ``vectorized`` or ``ray``.
        parallel_clients: the number of clients that the ``vectorized`` engine trains at the same time.
        ray_address: the address of the ``ray`` engine's cluster.
        task: the task, such as ``"binary"`` or ``"regression:loss=huber"`` (`holdfast.tasks`); by default that
            of the data set.
        loss: a loss of the task, by name, or a function of outputs and targets that returns one value per sample, or
            their mean; it runs under ``torch.func.vmap``.
        metrics: the metrics on the test set, such as ``["auroc", "accuracy"]``; the first is the primary one. A
            function of outputs and targets (arrays) that returns a number is a metric, too. By default those of the
            task.
        batchnorm: how BatchNorm is aggregated: ``average``, ``local`` or ``drop``.
        classifier: the name of the classifier layer, if it is not the last Linear.
        validation: the share of each client's training samples that is held out, at least one sample per client. Every
            client tests the global model and its own on them; the best round's model is stored besides the last.
        patience: early stopping: the number of tests without a better primary metric on these samples.
        local_test_samples: test samples for each local model (default: all on a GPU, 100 on a CPU).
        probe_every: rounds between measurements of drift and alignment; 0 for none.
        out: the run's directory. A run with a directory survives being killed: `resume` continues it, or the same call
            with ``resume=True``.
        resume: continue the run in ``out``; ``rounds`` may differ, as for `resume`.
        experiment: further entries of experiment.yaml, such as the data set's path.
        on_round: called with each round's record.
        progress: show a bar in a terminal, a line below the cell in a notebook, a line a minute in a log; on stderr.
        submit_final_write: called with a function that writes the end of the run to the disk, to be called in another
            thread while this one continues.
        stop_after: stop after this round, with a checkpoint in ``out`` from which `resume` continues; schedules are
            still computed for all ``rounds``.
    """
    if validate("stop_after", stop_after, PositiveCount | None) is not None and out is None:
        raise HoldfastError("stop_after needs out, the directory from which the run can be resumed")
    check_kinds(method, federation)
    trackers = checked_trackers(trackers)
    check_options(
        device=device, parallel_clients=parallel_clients, ray_address=ray_address, classifier=classifier, out=out,
        resume=resume, on_round=on_round, progress=progress,
    )  # fmt: skip
    if resume and out is None:
        raise HoldfastError("resume needs out, the directory of the run to resume")
    settings = Settings(
        rounds=rounds,
        clients_per_round=clients_per_round,
        sampling=sampling,
        local_epochs=local_epochs,
        local_steps=local_steps,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        drop_last=drop_last,
        lr=cast("float", lr),  # None becomes the default of the optimiser
        optimizer=optimizer,
        momentum=momentum,
        keep_optimizer=keep_optimizer,
        weight_decay=weight_decay,
        lr_decay=lr_decay,
        lr_schedule=lr_schedule,
        max_grad_norm=max_grad_norm,
        client_dropout=client_dropout,
        deadline=deadline,
        min_clients=min_clients,
        seed=seed,
        dp=None if dp is None else parse_dp(dp).describe(),
        secure=None if secure is None else parse_secure(secure).describe(),
        dp_samples=None if dp_samples is None else parse_dp_samples(dp_samples).describe(),
        robust=None if robust is None else parse_robust(robust).describe(),
        attack=None if attack is None else parse_attack(attack).describe(),
        compress=None if compress is None else parse_compression(compress).describe(),
        max_update_norm=max_update_norm,
        max_update_ratio=max_update_ratio,
        validation=validation,
        patience=patience,
        evaluate_every=evaluate_every,
        evaluate_locals=evaluate_locals if len(federation.dataset.y_test) else False,
        local_test_samples=local_test_samples,
        probe_every=probe_every,
        checkpoint_seconds=checkpoint_seconds,
    )
    method = parse_method(method) if isinstance(method, str) else method
    model = as_model(model)
    begun = RunDirectory.open(out).experiment if resume and out is not None else {}
    if parallel_clients is None and engine != "sequential":
        parallel_clients = begun.get("parallel_clients")
    training = Training(
        method, model, federation, settings, engine=engine, device=device, precision=precision,
        parallel_clients=parallel_clients, ray_address=ray_address, batchnorm=batchnorm, classifier=classifier,
        task=task, loss=loss, metrics=metrics,
        own_kernels=begun.get("own_kernels", True),  # a resumed run rounds as it did before
    )  # fmt: skip
    described = training.describe() | dict(experiment or {})
    with progress_display(progress) as display:
        display.start(f"{method.name} on {federation.dataset.name}", rounds, primary_measure(described))

        def advance(record: dict[str, Any]) -> None:
            display.update(record)
            if on_round is not None:
                on_round(record)

        try:
            return execute(
                training, described, out, resume, trackers, advance, submit_final_write, stop_after
            )
        except KeyboardInterrupt as interrupt:
            raise interrupt.with_traceback(None) from None  # without the stack of the interrupted call
        finally:
            restore_onednn()
