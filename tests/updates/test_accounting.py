"""The account against closed forms, published figures and the library's other accountant."""

import math

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from holdfast.core.errors import HoldfastError
from holdfast.updates import accounting
from holdfast.updates.accounting import Sampling, epsilon_after, noise_multiplier_for

ALL = Sampling("poisson", 10, 10)


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """ε of the Gaussian mechanism (Balle and Wang, 2018, Theorem 8)."""

    def gap(epsilon: float) -> float:
        first = norm.cdf(1 / (2 * sigma) - epsilon * sigma)
        return float(first - math.exp(epsilon) * norm.cdf(-1 / (2 * sigma) - epsilon * sigma) - delta)

    return float(brentq(gap, 0, 100))


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (5.0, 100), (30.0, 400)])
def test_without_sampling_it_is_the_gaussian_mechanism(noise: float, rounds: int) -> None:
    """T rounds with noise z are one release with z / √T."""
    exact = gaussian_epsilon(noise / math.sqrt(rounds), 1e-5)
    spent = epsilon_after(rounds, 1e-5, noise, ALL)
    assert exact - 1e-6 <= spent <= 1.002 * exact


def test_replacing_a_client_without_amplification_has_twice_the_sensitivity() -> None:
    assert Sampling("fixed", 10, 100).sensitivity == 2
    assert Sampling("fixed", 100, 100).sensitivity == Sampling("poisson", 10, 100).sensitivity == 1


# (samples, batch, noise multiplier, epochs, δ) and ε: Abadi et al., 2016, Section 3.2, whose moments accountant is an
# upper bound, and the tutorial of TensorFlow Privacy on MNIST, by Rényi differential privacy.
PUBLISHED = [
    ((10_000, 100, 4.0, 100, 1e-5), 1.26),
    ((60_000, 256, 1.3, 15, 1e-5), 1.19),
    ((60_000, 256, 1.1, 60, 1e-5), 3.01),
    ((60_000, 256, 0.7, 45, 1e-5), 7.10),
]


@pytest.mark.parametrize(("setting", "published"), PUBLISHED)
def test_published_figures_are_upper_bounds_that_are_nearly_reached(
    setting: tuple[int, int, float, int, float], published: float
) -> None:
    samples, batch, noise, epochs, delta = setting
    sampling, rounds = Sampling("poisson", batch, samples), epochs * samples // batch
    renyi = accounting._renyi(rounds, delta, noise, sampling)
    assert 0.8 * published <= renyi <= 1.01 * published
    assert 0.7 * published <= epsilon_after(rounds, delta, noise, sampling) <= renyi


# (z, clients a round of 10, rounds, δ), and ε: the examples in dp-accounting's own tests. The first two are exact
# values of the distribution of the privacy loss, the third is Rényi's.
EXAMPLES = [
    ("_loss_distribution", (math.sqrt(3), 10, 3, 0.126936), 1.0),
    ("_loss_distribution", (0.5, 2, 3, 0.15594), 1.0),
    ("_renyi", (4.530877117, 10, 1, 1e-6), 1.0),
]


@pytest.mark.parametrize(("account", "setting", "epsilon"), EXAMPLES)
def test_epsilon_is_that_of_the_accountants_own_examples(
    account: str, setting: tuple[float, int, int, float], epsilon: float
) -> None:
    noise, per_round, rounds, delta = setting
    found = getattr(accounting, account)(rounds, delta, noise, Sampling("poisson", per_round, 10))
    assert found == pytest.approx(epsilon, abs=4e-3)


def renyi_of_fixed_samples(noise: float, rate: float, order: int) -> float:
    """Rényi's divergence of a sample of a fixed size (Wang et al., 2019, Theorem 9, for the Gaussian mechanism)."""
    second = math.exp(2 / (2 * noise**2))
    terms = [1.0, rate**2 * math.comb(order, 2) * min(4 * (second - 1), 2 * second)]
    terms += [
        2 * rate**j * math.comb(order, j) * math.exp((j - 1) * j / (2 * noise**2))
        for j in range(3, order + 1)
    ]
    return math.log(sum(terms)) / (order - 1)


@pytest.mark.parametrize(("noise", "rounds"), [(2.0, 50), (5.0, 1000)])
def test_samples_of_a_fixed_size_spend_no_more_than_the_bound_of_their_paper(
    noise: float, rounds: int
) -> None:
    """ε of an order follows from the divergence by Canonne et al., 2020, Proposition 12."""
    delta, orders = 1e-5, range(2, 33)
    by_order = [
        rounds * renyi_of_fixed_samples(noise, 0.01, a)
        + math.log((a - 1) / a)
        - (math.log(delta) + math.log(a)) / (a - 1)
        for a in orders
    ]
    spent = epsilon_after(rounds, delta, noise, Sampling("fixed", 10, 1000))
    # Rényi's account of Poisson samples cannot be more than that of samples of a fixed size.
    assert accounting._renyi(rounds, delta, noise, Sampling("poisson", 10, 1000)) <= spent <= min(by_order)


# (q, z, steps, δ), and ε of Opacus 1.6.0: RDPAccountant and PRVAccountant, whose ε is tight up to its discretisation.
OPACUS = [
    ((0.01, 1.0, 1000, 1e-5), (2.101365, 1.838372)),
    ((0.1, 1.5, 500, 1e-4), (8.070120, 7.328704)),
    ((0.05, 0.8, 200, 1e-5), (8.731830, 7.712688)),
    ((0.02, 3.0, 5000, 1e-6), (2.366092, 2.211341)),
]


@pytest.mark.parametrize(("setting", "epsilons"), OPACUS)
def test_epsilon_is_that_of_opacus(
    setting: tuple[float, float, int, float], epsilons: tuple[float, float]
) -> None:
    rate, noise, steps, delta = setting
    sampling = Sampling("poisson", round(1000 * rate), 1000)
    assert accounting._renyi(steps, delta, noise, sampling) == pytest.approx(epsilons[0], rel=0.01)
    assert epsilon_after(steps, delta, noise, sampling) == pytest.approx(epsilons[1], rel=0.01)


@pytest.mark.parametrize(
    ("budget", "multiplier"),
    [((8.0, 1e-5, 0.1, 500), 1.547470), ((2.0, 1e-5, 0.02, 1000), 1.489258)],
)
def test_derived_noise_is_that_of_opacus(budget: tuple[float, float, float, int], multiplier: float) -> None:
    """`get_noise_multiplier` of Opacus 1.6.0 with its accountant prv and a tolerance of 0.001."""
    epsilon, delta, rate, steps = budget
    sampling = Sampling("poisson", round(1000 * rate), 1000)
    assert noise_multiplier_for(epsilon, delta, sampling, steps) == pytest.approx(multiplier, rel=0.01)


def test_samples_of_a_fixed_size_are_amplified_too() -> None:
    few, all_clients = Sampling("fixed", 10, 1000), Sampling("fixed", 1000, 1000)
    assert epsilon_after(50, 1e-5, 2.0, few) < 0.2 * epsilon_after(50, 1e-5, 2.0, all_clients)


@pytest.mark.parametrize(("kind", "epsilon"), [("poisson", 0.5), ("poisson", 8.0), ("fixed", 8.0)])
def test_the_derived_noise_meets_epsilon_and_is_hardly_more_than_needed(kind: str, epsilon: float) -> None:
    sampling = Sampling(kind, 20, 200)  # type: ignore[arg-type]
    noise = noise_multiplier_for(epsilon, 1e-4, sampling, 30)
    assert epsilon_after(30, 1e-4, noise, sampling) <= epsilon
    assert epsilon_after(30, 1e-4, 0.99 * noise, sampling) > epsilon


def test_epsilon_grows_with_every_round_and_begins_at_zero() -> None:
    spent = [epsilon_after(rounds, 1e-4, 1.0, Sampling("poisson", 10, 100)) for rounds in range(4)]
    assert spent[0] == 0
    assert spent == sorted(set(spent))


def test_an_unreachable_epsilon_is_a_sentence() -> None:
    with pytest.raises(HoldfastError, match="no amount of noise gives epsilon 1e-09"):
        noise_multiplier_for(1e-9, 1e-12, ALL, 1000)
