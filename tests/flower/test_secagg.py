"""The cryptography of SecAgg+: masks that cancel, shares that are needed, and what clients and server refuse."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode
from dataclasses import replace

import numpy as np
import pytest
import torch
from Crypto.Cipher import AES
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from scipy.stats import kstest

from holdfast.core.errors import HoldfastError
from holdfast.flower.secagg import Dealing, Dealt, PublicKeys, Seat, Unmasking, expand
from holdfast.updates.secure import SecAggPlus

CLIENTS, LENGTH = (3, 7, 8, 11, 20, 21), 500


class Sum:
    """All clients' seats after their shares have been exchanged; ``silent`` clients have made keys alone."""

    def __init__(self, secure: SecAggPlus, silent: tuple[int, ...] = ()) -> None:
        self.secure, self.grid = secure, secure.grid(len(CLIENTS))
        self.threshold = secure.threshold_of(len(CLIENTS))
        self.seats = {k: Seat.new("a sum", k) for k in CLIENTS}
        self.keys = {k: seat.public for k, seat in self.seats.items()}
        self.dealings = {}
        for place, k in enumerate(CLIENTS):
            near = [CLIENTS[seat] for seat in secure.neighbourhood(place, len(CLIENTS))]
            if k not in silent:
                self.dealings[k] = self.seats[k].deal({n: self.keys[n] for n in near}, self.threshold)

    def dealt_to(self, client: int) -> dict[int, Dealt]:
        return {
            k: dealing.to(client)
            for k, dealing in self.dealings.items()
            if client in dealing.holders and k != client
        }

    def mask(self, client: int, vector: torch.Tensor) -> torch.Tensor:
        self.seats[client].receive(self.dealt_to(client))
        return self.grid.reduce(self.seats[client].mask(vector, self.grid.bits))

    def unmasking(self, present: list[int]) -> Unmasking:
        return Unmasking(self.threshold, self.grid.bits, self.keys, self.dealings, present)


def vectors() -> dict[int, torch.Tensor]:
    rng = np.random.default_rng(1)
    return {k: torch.from_numpy(rng.integers(-(2**20), 2**20, LENGTH)) for k in CLIENTS}


@pytest.mark.parametrize("secure", [SecAggPlus(), SecAggPlus(bits=32), SecAggPlus(neighbours=4)])
@pytest.mark.parametrize(
    ("silent", "lost", "helpless"),
    [((), (), ()), ((), (8,), ()), ((20,), (), ()), ((20,), (3,), ()), ((), (3,), (21,)), ((), (), (7, 11))],
)
def test_the_sum_of_those_who_are_there(
    secure: SecAggPlus, silent: tuple[int, ...], lost: tuple[int, ...], helpless: tuple[int, ...]
) -> None:
    """Clients are lost before they deal shares, before their upload arrives, or before they reveal shares."""
    world, given = Sum(secure, silent), vectors()
    present = [k for k in CLIENTS if k not in silent + lost]
    total = torch.zeros(LENGTH, dtype=torch.int64)
    for k in present:
        total = world.grid.reduce(total + world.mask(k, given[k]))
    unmasking = world.unmasking(present)
    for k in present:
        if k not in helpless:
            assert unmasking.add(k, world.seats[k].reveal(*unmasking.asked_of(k))) is None
    assert unmasking.suffices
    expected = np.sum([given[k].numpy() for k in present], 0)
    assert np.array_equal(world.grid.reduce(unmasking.unmasked(total)).numpy(), expected)


@pytest.mark.parametrize("bits", [32, 64])
def test_masks_are_aes_in_counter_mode(bits: int) -> None:
    """Compared with another library's."""
    seed = bytes(range(32))
    stream = AES.new(seed, AES.MODE_CTR, nonce=b"", initial_value=0).encrypt(bytes(100 * bits // 8))
    assert np.array_equal(expand(seed, 100, bits).numpy(), np.frombuffer(stream, f"<i{bits // 8}"))


@pytest.mark.parametrize("bits", [32, 64])
def test_a_masked_upload_is_uniform_and_new_in_every_sum(bits: int) -> None:
    """Kolmogorov-Smirnov against the uniform distribution; no correlation with the upload itself."""
    upload = torch.arange(LENGTH) * 1000
    one, other = (Sum(SecAggPlus(bits=bits)).mask(7, upload) for _ in range(2))
    for masked in (one, other):
        assert kstest(masked.double().numpy() / 2.0**bits + 0.5, "uniform").pvalue > 1e-4
        assert abs(np.corrcoef(masked.double(), upload.double())[0, 1]) < 5 / LENGTH**0.5
    assert not (one == other).any()


def test_fewer_shares_than_the_threshold_tell_nothing() -> None:
    world = Sum(SecAggPlus())
    present = list(CLIENTS)
    for k in present:
        world.mask(k, torch.zeros(3, dtype=torch.int64))
    unmasking = world.unmasking(present)
    for k in present[: world.threshold - 1]:
        unmasking.add(k, world.seats[k].reveal(*unmasking.asked_of(k)))
    assert not unmasking.suffices
    with pytest.raises(ValueError, match="Failed to combine shares"):
        combine_shares(unmasking.shares[7])
    k = present[world.threshold - 1]
    unmasking.add(k, world.seats[k].reveal(*unmasking.asked_of(k)))
    assert combine_shares(unmasking.shares[7]) == world.seats[7].seed


def test_a_changed_share_is_recognised_and_none_of_its_holder_is_used() -> None:
    world, given = Sum(SecAggPlus()), vectors()
    present = [k for k in CLIENTS if k != 8]
    total = torch.zeros(LENGTH, dtype=torch.int64)
    for k in present:
        total = total + world.mask(k, given[k])
    unmasking = world.unmasking(present)
    for k in present:
        revealed = world.seats[k].reveal(*unmasking.asked_of(k))
        if k == 11:
            revealed[2] = revealed[2][:-1] + bytes([revealed[2][-1] ^ 1])
            assert unmasking.add(k, revealed) == unmasking.asked_of(k)[0][2]
        else:
            assert unmasking.add(k, revealed) is None
    assert all(len(shares) == len(present) - 1 for shares in unmasking.shares.values())
    expected = sum(given[k] for k in present)
    assert torch.equal(unmasking.unmasked(total), expected)


def test_a_client_that_deals_shares_of_another_seed_is_named() -> None:
    world = Sum(SecAggPlus())
    for k in CLIENTS:
        world.mask(k, torch.zeros(3, dtype=torch.int64))
    world.dealings[7] = replace(world.dealings[7], seed_digest=bytes(32))
    unmasking = world.unmasking(list(CLIENTS))
    for k in CLIENTS:
        unmasking.add(k, world.seats[k].reveal(*unmasking.asked_of(k)))
    with pytest.raises(HoldfastError, match="the shares of client 7 do not match its secrets"):
        unmasking.unmasked(torch.zeros(3, dtype=torch.int64))


def test_a_client_reveals_no_two_secrets_of_another_and_nothing_early() -> None:
    world = Sum(SecAggPlus())
    seat = world.seats[7]
    everyone = list(CLIENTS)
    with pytest.raises(HoldfastError, match="may not reveal"):
        seat.reveal(everyone, [])
    with pytest.raises(HoldfastError, match="only after the shares have arrived"):
        Seat.new("a sum", 1).mask(torch.zeros(3, dtype=torch.int64), 64)
    world.mask(7, torch.zeros(3, dtype=torch.int64))
    for present, lost, sentence in [
        (everyone, [3], "may not reveal"),  # both secrets of client 3
        (everyone, [4], "may not reveal"),  # of a client that dealt nothing
        (everyone[:3], everyone[3:], "uploads of 3 neighbours arrived, 4 are needed"),
        ([k for k in everyone if k != 7], [7], "uploads of 5 neighbours arrived"),  # its own mask key
    ]:
        with pytest.raises(HoldfastError, match=sentence):
            seat.reveal(present, lost)
    with pytest.raises(HoldfastError, match="masked only once"):
        seat.mask(torch.zeros(3, dtype=torch.int64), 64)


def test_keys_and_shares_that_do_not_fit_are_refused() -> None:
    world = Sum(SecAggPlus())
    fresh = Seat.new("a sum", 7)
    with pytest.raises(HoldfastError, match="keys for this client differ from the client's own keys"):
        fresh.deal(world.keys, 4)
    keys = world.keys | {7: fresh.public}
    with pytest.raises(HoldfastError, match="the same key for two clients"):
        fresh.deal(keys | {8: world.keys[3]}, 4)
    with pytest.raises(HoldfastError, match="a threshold of 7 among 6 shares is not possible"):
        fresh.deal(keys, 7)
    with pytest.raises(HoldfastError, match="not a point of the curve"):
        fresh.deal(keys | {8: PublicKeys(bytes(49), bytes([2] * 49))}, 4)
    dealt = world.dealt_to(3)
    changed = replace(dealt[8], ciphertext=b"x"), replace(dealt[8], key_digest=bytes(32))
    for wrong in ({7: dealt[8]}, {4: dealt[8]}, *({8: each} for each in changed)):
        with pytest.raises(
            HoldfastError, match=r"the shares from client \d are not addressed to this client"
        ):
            replace(world.seats[3], dealers=[3], seed_shares=[b""], key_shares=[b""]).receive(dealt | wrong)
    with pytest.raises(HoldfastError, match="shares of 3 clients arrived, 4 are needed"):
        world.seats[3].receive({k: dealt[k] for k in (7, 8)})


def test_the_server_cannot_read_what_it_passes_on() -> None:
    """The bytes that a neighbour finds in a ciphertext are not in it, nor are the secrets in anything that is dealt."""
    world = Sum(SecAggPlus())
    world.seats[3].receive(world.dealt_to(3))
    dealing: Dealing = world.dealings[7]
    place = world.seats[3].dealers.index(7)
    found = [world.seats[3].seed_shares[place], world.seats[3].key_shares[place]]
    assert [hashlib.sha256(share).digest() for share in found] == [
        dealing.seed_digests[dealing.holders.index(3)],
        dealing.key_digests[dealing.holders.index(3)],
    ]
    passed_on = b"".join(urlsafe_b64decode(ciphertext) for ciphertext in dealing.ciphertexts)
    for secret in (*(share[4:20] for share in found), world.seats[7].seed, world.seats[7].mask_key):
        assert secret not in passed_on
