"""The settings of an experiment as options of commands, written once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, get_args, get_type_hints

import typer

from holdfast.training.experiment import DEFAULT_PARTITION, FEDERATION, Experiment, read_yaml

if TYPE_CHECKING:
    Command = Callable[..., None]

HELP: dict[str, dict[str, str]] = {
    "Data and clients": {
        "data": "A data set (see `holdfast datasets`), a .npz file or a folder of images.",
        "preprocess": "Preprocessing preset: plain, fedntd, fedka, flashback, fedfa, pfllib, moon, fedmlp.",
        "partition": f"Who holds what: iid, shards:2, dirichlet:0.1, … (default: {DEFAULT_PARTITION})",
        "clients": "Number of clients.",
        "partition_seed": "Seed of the partition (default: that of --seed).",
        "public": "Share of the training data that the server holds.",
        "long_tail": "Rarest class's share of the commonest, such as 0.05.",
        "skew": "Images that differ by client, such as rotation=30,noise=0.1.",
        "stream": "Data in stages: tasks per client, such as 5 or 5,schedule=every-n:10.",
        "federation": "A federation saved by `holdfast partition --save`.",
    },
    "Method and model": {
        "method": "fedavg, fedntd:beta=0.5, fedntd+fedprox, … (see `holdfast methods`).",
        "model": "cnn, linear, mlp:64,64, resnet18:norm=group, ntd-cifar, …",
        "classifier": "Name of the model's last layer, when it is not the last Linear.",
        "batchnorm": "What happens to BatchNorm: average, local or drop.",
    },
    "Schedule": {
        "rounds": "Rounds of communication.",
        "clients_per_round": "Clients per round (default: all).",
        "local_epochs": "Local epochs per round.",
        "batch_size": "Samples per local step.",
        "drop_last": "Leave out an epoch's last batch where it is not full.",
        "lr": "Learning rate of the first round.",
        "lr_decay": "What the learning rate is multiplied with after each round.",
        "momentum": "Momentum of local SGD.",
        "keep_momentum": "Let a client's momentum outlive a round.",
        "weight_decay": "Weight decay of local SGD.",
        "max_grad_norm": "Clip local gradients to this norm.",
        "client_dropout": "Probability that a sampled client is lost in a round.",
        "deadline": "Seconds after which a round closes without those still at work.",
        "min_clients": "Usable updates below which the run stops.",
        "seed": "Seed of everything random.",
    },
    "Testing and saving": {
        "evaluate_every": "Rounds between tests of the global model.",
        "evaluate_locals": "Test every participating local model too.",
        "local_test_samples": "Test samples for each local model (default: all on a GPU, 100 on a CPU).",
        "probe_every": "Rounds between the heavier probes; 0 for none.",
        "checkpoint_seconds": "Seconds between checkpoints.",
    },
    "Machine": {
        "engine": "auto, sequential, vectorized or ray.",
        "device": "auto, cpu or cuda.",
        "precision": "auto, float32, tf32 or float64.",
        "parallel_clients": "Clients that train side by side on the vectorized engine.",
        "ray_address": "Address of the ray engine's cluster (default: one is started here).",
    },
}
"""What each setting means, in the groups in which help shows them."""

FEDERATION_OPTIONS = ("data", "seed", "federation", *FEDERATION)

File = Annotated[
    Path | None, typer.Argument(metavar="EXPERIMENT.YAML", help="An experiment file; options add to it.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, such as partition.alpha=0.5."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def with_settings(
    names: Collection[str] | None = None, hidden: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Give a command the settings ``names`` (all by default) as options; it gets those that were given.

    Its help does not show ``hidden`` ones, which it takes only to refuse them in words of its own.
    """

    def decorate(command: Command) -> Command:
        @wraps(command)
        def called(**values: Any) -> None:
            given = {k: values.pop(k) for k in options if values[k] is not None}
            own = {k: v for k, v in values.items() if k not in options}
            command(**own, settings=given)

        own = [p for p in signature(command, eval_str=True).parameters.values() if p.name != "settings"]
        options = _options(names, hidden)
        called.__signature__ = signature(command).replace(  # type: ignore[attr-defined]
            parameters=[p.replace(kind=Parameter.KEYWORD_ONLY) for p in own] + list(options.values())
        )
        return called

    return decorate


def _options(names: Collection[str] | None, hidden: Collection[str]) -> dict[str, Parameter]:
    hints = get_type_hints(Experiment)
    defaults = {field.name: field.default for field in fields(Experiment)}
    options = {}
    for panel, settings in HELP.items():
        for name, text in settings.items():
            if names is not None and name not in names:
                continue
            kind = next(k for k in (bool, int, float, str) if k in (get_args(hints[name]) or (hints[name],)))
            flag = "--" + name.replace("_", "-")
            default = "" if defaults[name] is None else f" (default: {str(defaults[name]).lower()})"
            option = typer.Option(
                f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
                help=text + default,
                rich_help_panel=panel,
                hidden=name in hidden,
                metavar=None if kind is bool else {int: "N", float: "X", str: "TEXT"}[kind],
            )
            annotation = Annotated[Optional[kind], option]  # type: ignore[valid-type]  # noqa: UP045
            options[name] = Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    return options


def experiment_from(
    file: Path | None, settings: Mapping[str, Any], changes: Sequence[str] | None = None
) -> Experiment:
    """The experiment that a file, the options given and ``--set`` make together."""
    written = {} if file is None else read_yaml(file)
    experiment = Experiment.from_mapping({**written, **settings})
    return experiment.with_settings(changes) if changes else experiment
