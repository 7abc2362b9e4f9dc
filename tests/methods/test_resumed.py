"""Every method that dies after some rounds and is taken up from its checkpoint ends with the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_world import net, world

import holdfast as hf
from holdfast.methods import METHODS, parse_method

ROUNDS, DIES_AFTER = 4, 2
QUICK = {"creff": "creff:epochs=3"}
FEDERATION = world([0] * 5 + [1] * 3, [1, 2, 3] * 2, [3, 0], [2] * 4, public=[0, 1, 2, 3] * 2)


class Died(BaseException):
    """Nothing in a run expects this."""


def die(record: dict[str, Any]) -> None:
    if record["round"] == DIES_AFTER:
        raise Died


def trained(method: str, **where: Any) -> hf.Run:
    """Everything made anew, as a new process would."""
    return hf.train(
        parse_method(method),
        net(),
        FEDERATION,
        rounds=ROUNDS,
        clients_per_round=2,
        local_epochs=2,
        batch_size=3,
        lr=0.05,
        momentum=0.5,
        lr_decay=0.9,
        engine="sequential",
        device="cpu",
        checkpoint_seconds=0,
        **where,
    )


@pytest.mark.parametrize("name", [*METHODS, "fedka+flashback", "fedfa+ccvr"])
def test_the_same_bits_after_a_kill(name: str, tmp_path: Path) -> None:
    method = QUICK.get(name, name)
    calm = trained(method)
    with pytest.raises(Died):
        trained(method, out=tmp_path, on_round=die)
    seen: list[int] = []
    resumed = trained(method, out=tmp_path, resume=True, on_round=lambda record: seen.append(record["round"]))
    assert seen
    assert min(seen) > 1  # it went on, and did not begin again
    for one, other in zip(calm.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(calm.records, resumed.records, strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}
