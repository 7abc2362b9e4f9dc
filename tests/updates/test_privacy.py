"""Clipping and noise: their arithmetic, their distribution, the sensitivity of the sum, and an attack on it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.engine.aggregation import PrivateSums
from holdfast.engine.clients import ClientResult
from holdfast.methods.base import Server
from holdfast.updates.noise import gaussian, uniform
from holdfast.updates.privacy import DP, ClientPrivacy, parse_dp

BUDGET = "epsilon=8,delta=1e-4,noise_multiplier=2"


def privacy(options: str = "", *, clients: int = 40, per_round: int = 4, **more: Any) -> ClientPrivacy:
    given = {"clients": clients, "per_round": per_round, "rounds": 5, "seed": 0} | more
    return ClientPrivacy(parse_dp(f"{BUDGET},{options}"), **given)


def server(values: list[float], round: int = 1) -> Server:
    return Server({"w": torch.tensor(values, dtype=torch.float64)}, {}, {}, round)


def result(
    change: list[float], at: Server, sums: list[float] | None = None, samples: int = 10
) -> ClientResult:
    w = {"w": at.params["w"] + torch.tensor(change, dtype=torch.float64)}
    side = {} if sums is None else {"s": torch.tensor(sums, dtype=torch.float64)}
    return ClientResult(0, samples, np.array([samples]), 99.0, w, {}, w, side, {}, 0.0, True)


def totals(account: ClientPrivacy, at: Server, results: list[ClientResult]) -> PrivateSums:
    sums = PrivateSums(account, at, ())
    for one in results:
        sums.add(one)
    return sums


# Arithmetic ---------------------------------------------------------------------------------------------


def test_the_model_moves_by_the_noisy_mean_of_clipped_updates() -> None:
    account, at = privacy("clip=2", sums={"s": torch.zeros(2, dtype=torch.float64)}), server([1.0, -1.0, 0.5])
    account = privacy("clip=2,clip_sums=3", sums={"s": torch.zeros(2, dtype=torch.float64)})
    changes, side = np.array([[3.0, 4.0, 0], [0, 0.5, 0]]), np.array([[30.0, 40.0], [1.0, -1.0]])
    sums = totals(
        account, at, [result(c.tolist(), at, s.tolist()) for c, s in zip(changes, side, strict=True)]
    )
    params, _ = sums.mean()
    noise = 2 * math.sqrt(2)  # two parts, each with 1/z² = 1/(2 · 2²)
    drawn = gaussian(at.params["w"], 0, "dp noise of weights", 1, 0).numpy()
    clipped = changes[0] * 2 / 5 + changes[1]
    np.testing.assert_allclose(
        params["w"].numpy(), [1, -1, 0.5] + (clipped + noise * 2 * drawn) / 4, rtol=1e-12
    )
    drawn = gaussian(torch.zeros(2, dtype=torch.float64), 0, "dp noise of sums", 1, 0).numpy()
    expected = side[0] * 3 / 50 + side[1] + noise * 3 * drawn
    np.testing.assert_allclose(sums.sums["s"].numpy(), expected, rtol=1e-12)


def test_weights_are_one_or_bounded() -> None:
    at = server([0.0])
    plain, bounded = privacy("clip=1"), privacy("clip=1,max_samples=20")
    for account, weight in ((plain, 1.0), (bounded, 0.5)):
        sums = totals(account, at, [result([0.25], at, samples=10)])
        assert float(sums.params["w"]) == 0.25 * weight
    assert float(totals(bounded, at, [result([0.25], at, samples=90)]).params["w"]) == 0.25


def test_what_stays_with_clients_stays_as_it_is() -> None:
    at = server([1.0])
    sums = PrivateSums(privacy(), at, ("w",))
    sums.add(result([5.0], at))
    assert float(sums.mean()[0]["w"]) == 1.0


def test_the_clip_moves_to_the_quantile_of_the_norms() -> None:
    """C ← C exp(-η (b̃ - γ)), with b̃ from the noisy count (Andrew et al., 2021)."""
    account, at = privacy("clip=1,adaptive=true,quantile=0.7,clip_lr=0.3,count_noise=6"), server([0.0])
    totals(account, at, [result([x], at) for x in (0.5, 0.9, 1.5)]).mean()
    drawn = float(gaussian(torch.zeros((), dtype=torch.float64), 0, "dp count", 1))
    share = (0.5 + 0.5 - 0.5 + 6 * drawn) / 4 + 0.5
    assert account.clip == pytest.approx(math.exp(-0.3 * (share - 0.7)), rel=1e-12)
    part = account.part_multiplier()  # z_Δ = (z^-2 - (2 σ_b)^-2)^(-1/2)
    assert part == pytest.approx((2**-2 - 12**-2) ** -0.5, rel=1e-12)


def test_an_adaptive_clip_finds_the_quantile() -> None:
    account = privacy("clip=0.01,adaptive=true,quantile=0.5,clip_lr=0.5", clients=500, per_round=500)
    rng = np.random.default_rng(0)
    for round in range(1, 31):
        at = server([0.0], round)
        totals(account, at, [result([x], at) for x in np.abs(rng.normal(size=100))] * 5).mean()
    assert 0.5 < account.clip < 0.9  # the median of |N(0, 1)| is 0.674


# Distribution -------------------------------------------------------------------------------------------


def test_the_noise_is_gaussian_with_the_deviation_of_the_account() -> None:
    at = Server({"w": torch.zeros(20_000), "v": torch.zeros(20_000)}, {}, {}, 3)
    account = privacy("clip=0.5")
    params, _ = PrivateSums(account, at, ()).mean()  # a round without clients
    for name in ("w", "v"):
        values = params[name].double().numpy() * 4 / (2 * 0.5)
        assert stats.kstest(values, "norm").pvalue > 0.001
    assert abs(np.corrcoef(params["w"], params["v"])[0, 1]) < 0.03


def test_noise_differs_by_seed_purpose_and_round_and_repeats() -> None:
    like = torch.zeros(1000)
    draws = [gaussian(like, *key) for key in ((0, "a", 1), (0, "a", 2), (0, "b", 1), (1, "a", 1))]
    for i, one in enumerate(draws):
        for other in draws[:i]:
            assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.15
    assert torch.equal(draws[0], gaussian(like, 0, "a", 1))
    assert stats.kstest(uniform(torch.zeros(20_000), 0, "u"), "uniform").pvalue > 0.001


def test_noise_of_the_system_is_new_every_time() -> None:
    known, one, other = privacy(), privacy("noise_seed=system"), privacy("noise_seed=system")
    assert known.secret == 0
    assert len({known.secret, one.secret, other.secret}) == 3


# Sensitivity --------------------------------------------------------------------------------------------

vectors = st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(vectors, vectors, st.integers(1, 100)), min_size=1, max_size=5), vectors, vectors)
def test_one_client_moves_the_sums_by_its_bounds_at_most(
    others: list[Any], change: list[float], side: list[float]
) -> None:
    options = "clip=0.7,clip_sums=3,max_samples=30"
    account = privacy(options, sums={"s": torch.zeros(3, dtype=torch.float64)})
    at = server([0.0, 0.0, 0.0])
    rest = [result(c, at, s, n) for c, s, n in others]
    without, with_one = totals(account, at, rest), totals(account, at, [*rest, result(change, at, side)])
    replaced = totals(account, at, [*rest[1:], result(change, at, side)])
    whole = totals(account, at, rest)
    for get, bound in ((_weights, 0.7), (_side, 3.0)):
        assert float((get(with_one) - get(without)).norm()) <= bound * (1 + 1e-9)
        assert float((get(replaced) - get(whole)).norm()) <= 2 * bound * (1 + 1e-9)
    assert abs(float(with_one.below - without.below)) == 0.5


def _weights(sums: PrivateSums) -> Tensor:
    return sums.params["w"]


def _side(sums: PrivateSums) -> Tensor:
    return sums.side["s"]


# An attack ----------------------------------------------------------------------------------------------


def test_a_membership_attack_does_not_exceed_the_claimed_epsilon() -> None:
    """A lower bound of ε (Jagielski et al., 2020): how well a client's presence can be told."""
    tries, delta, noise = 1500, 1e-2, 1.0
    at = server([0.0, 0.0])
    statistic: dict[bool, list[float]] = {False: [], True: []}
    for world, values in statistic.items():
        for seed in range(tries):
            account = ClientPrivacy(
                DP(epsilon=50, delta=delta, noise_multiplier=noise), 2, 2, 1, seed + 10**6 * world
            )
            sums = totals(account, at, [result([0.3, -0.2], at)] + [result([9.0, 0.0], at)] * world)
            values.append(float(sums.mean()[0]["w"][0]))
    claimed = ClientPrivacy(DP(epsilon=50, delta=delta, noise_multiplier=noise), 2, 2, 1, 0).epsilon(1)
    lower = max(
        _lower_bound(np.array(statistic[True]) > t, np.array(statistic[False]) > t, delta)
        for t in np.linspace(-1, 2, 13)
    )
    assert 0.25 * claimed < lower < claimed  # the attack is a real one, and stays below


def _lower_bound(positives: np.ndarray, false_positives: np.ndarray, delta: float) -> float:
    """ε ≥ ln((TPR - δ) / FPR), with one-sided 99.9 % bounds of Clopper and Pearson."""
    n, hits, alarms = len(positives), int(positives.sum()), int(false_positives.sum())
    tpr = stats.beta.ppf(0.001, hits, n - hits + 1) if hits else 0.0
    fpr = stats.beta.ppf(0.999, alarms + 1, n - alarms) if alarms < n else 1.0
    return math.log((tpr - delta) / fpr) if tpr > delta else 0.0


# Options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("epsilon=0,delta=1e-5", "dp: epsilon is 0.0; it must be above 0"),
        ("epsilon=-1,delta=1e-5", "dp: epsilon is -1.0; it must be above 0"),
        ("epsilon=1,delta=1", "dp: delta is 1.0; it must be above 0 and below 1"),
        ("epsilon=1,delta=1e-5,clip=0", "dp: clip is 0.0; it must be above 0"),
        ("epsilon=1", "dp needs delta"),
        ("delta=1e-5", "dp needs epsilon"),
        ("epsilon=1,delta=1e-5,clipp=3", "unknown option of dp 'clipp'"),
        ("epsilon=1,delta=1e-5,sampling=all", "dp: sampling is 'all'; it must be poisson or fixed"),
        ("epsilon=1,delta=1e-5,count_noise=3", "no effect without adaptive=true"),
    ],
)
def test_options_that_make_no_sense_are_sentences(written: str, sentence: str) -> None:
    with pytest.raises(HoldfastError, match=sentence):
        parse_dp(written)


def test_a_run_that_exceeds_its_budget_does_not_begin() -> None:
    with pytest.raises(HoldfastError, match=r"5 rounds with noise_multiplier=0.5 spend .* \d rounds fit"):
        ClientPrivacy(DP(epsilon=8, delta=1e-4, noise_multiplier=0.5), 40, 20, 5, 0)


def test_a_run_that_was_extended_stops_at_its_budget() -> None:
    first = ClientPrivacy(DP(epsilon=2, delta=1e-4), 40, 4, 5, 0)
    longer = ClientPrivacy(DP(epsilon=2, delta=1e-4), 40, 4, 10, 0)
    longer.restore(first.state())
    longer.check_budget(5)
    with pytest.raises(
        HoldfastError, match=r"round 6 would spend a total epsilon .* the run ends with round 5"
    ):
        longer.check_budget(6)


def test_a_count_that_takes_the_whole_budget_is_refused() -> None:
    with pytest.raises(
        HoldfastError, match=r"count_noise is 0\.5, which takes the whole budget; it must be above 1"
    ):
        privacy("adaptive=true,count_noise=0.5")
