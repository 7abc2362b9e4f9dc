"""The cryptography of SecAgg+ (Bell et al., 2020), for clients and server, on Flower's primitives.

In each round every client makes two key pairs and a seed. Each pair of neighbours agrees on a mask by their mask keys
(Diffie-Hellman on P-384); one adds it and the other subtracts it. The seed expands to a further mask of the client
alone. Each client deals shares of its seed and its mask key to its neighbours (Shamir). The shares are encrypted with
keys derived from the channel keys, so that the server forwards them without being able to read them. At the end each
client reveals its share of the seed of every client whose upload arrived, or of the mask key of every other client:
never both.

Flower's generator of masks reduces a seed to 32 bits, which allows brute force; masks here are AES-256 in counter mode.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.common.secure_aggregation.secaggplus_utils import (
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from torch import Tensor

from holdfast.core.errors import HoldfastError

CURVE = ec.SECP384R1()
KEY_BYTES, PUBLIC_BYTES, SEED_BYTES, DIGEST_BYTES = 48, 49, 32, 32
MAX_SHARE = 1_000  # bytes of a share or of an encrypted pair of shares


@dataclass(frozen=True)
class PublicKeys:
    """A client's public keys of one round, as compressed points."""

    masks: bytes
    channel: bytes


@dataclass(frozen=True)
class Dealt:
    """The part of a dealing for one neighbour."""

    ciphertext: bytes
    seed_digest: bytes
    key_digest: bytes


@dataclass(frozen=True)
class Dealing:
    """A client's dealing: two encrypted shares for each neighbour, and the digests that identify them.

    ``holders`` are the client itself and its neighbours; the client's own entry of ``ciphertexts`` is empty.
    """

    holders: Sequence[int]
    ciphertexts: Sequence[bytes]
    seed_digests: Sequence[bytes]  # of the shares of its seed, by holder
    key_digests: Sequence[bytes]  # of the shares of its mask key
    seed_digest: bytes

    def to(self, holder: int) -> Dealt:
        """The part of one neighbour."""
        place = self.holders.index(holder)
        return Dealt(self.ciphertexts[place], self.seed_digests[place], self.key_digests[place])


@dataclass
class Seat:
    """A client's place in one secure sum, with its secrets; its fields are plain values, kept between messages."""

    session: str
    client: int
    mask_key: bytes
    channel_key: bytes
    seed: bytes
    threshold: int = 0
    neighbours: list[int] = field(default_factory=list)
    mask_keys: list[bytes] = field(default_factory=list)  # public, of each neighbour
    channel_keys: list[bytes] = field(default_factory=list)
    dealers: list[int] = field(default_factory=list)  # whose shares it holds: itself and neighbours
    seed_shares: list[bytes] = field(default_factory=list)
    key_shares: list[bytes] = field(default_factory=list)
    masked: bool = False

    @classmethod
    def new(cls, session: str, client: int) -> Seat:
        """A seat with new secrets."""
        return cls(session, client, _new_key(), _new_key(), secrets.token_bytes(SEED_BYTES))

    @property
    def public(self) -> PublicKeys:
        """The public keys, for the other clients."""
        return PublicKeys(_public(self.mask_key), _public(self.channel_key))

    def deal(self, keys: Mapping[int, PublicKeys], threshold: int) -> Dealing:
        """Deal shares with this ``threshold`` to the owners of ``keys``: this client and its neighbours."""
        if keys.get(self.client) != self.public:
            raise HoldfastError(
                "secure aggregation: the server's keys for this client differ from the client's own keys"
            )
        everyone = [key for each in keys.values() for key in (each.masks, each.channel)]
        if len(set(everyone)) < len(everyone):
            raise HoldfastError("secure aggregation: the server sends the same key for two clients")
        if self.neighbours or not 1 <= threshold <= len(keys):
            raise HoldfastError(
                f"secure aggregation: a threshold of {threshold} among {len(keys)} shares is not possible, or "
                "shares were already dealt"
            )
        self.threshold, self.neighbours = threshold, [k for k in keys if k != self.client]
        self.mask_keys = [keys[k].masks for k in self.neighbours]
        self.channel_keys = [keys[k].channel for k in self.neighbours]
        seed_shares = create_shares(self.seed, threshold, len(keys))
        key_shares = create_shares(self.mask_key, threshold, len(keys))
        ciphertexts = []
        for holder, one, other in zip(keys, seed_shares, key_shares, strict=True):
            if holder == self.client:
                self.dealers, self.seed_shares, self.key_shares = [holder], [one], [other]
                ciphertexts.append(b"")
            else:
                plain = share_keys_plaintext_concat(self.client, holder, one, other)
                ciphertexts.append(encrypt(_agreed(self.channel_key, keys[holder].channel), plain))
        seed_digests, key_digests = ([_digest(one) for one in each] for each in (seed_shares, key_shares))
        return Dealing(list(keys), ciphertexts, seed_digests, key_digests, _digest(self.seed))

    def receive(self, dealt: Mapping[int, Dealt]) -> None:
        """Store the shares that neighbours dealt to this client."""
        channels = dict(zip(self.neighbours, self.channel_keys, strict=True))
        for dealer, each in dealt.items():
            try:
                plain = decrypt(_agreed(self.channel_key, channels[dealer]), each.ciphertext)
                source, holder, seed_share, key_share = share_keys_plaintext_separate(plain)
            except (KeyError, InvalidToken):
                source, holder, seed_share, key_share = -1, -1, b"", b""
            announced = (_digest(seed_share), _digest(key_share)) == (each.seed_digest, each.key_digest)
            if (source, holder) != (dealer, self.client) or not announced:
                raise HoldfastError(
                    f"secure aggregation: the shares from client {dealer} are not addressed to this client, or "
                    "differ from those that it announced"
                )
            self.dealers.append(dealer)
            self.seed_shares.append(seed_share)
            self.key_shares.append(key_share)
        if len(self.dealers) < self.threshold or len(set(self.dealers)) < len(self.dealers):
            raise HoldfastError(
                f"secure aggregation: shares of {len(set(self.dealers))} clients arrived, {self.threshold} are needed"
            )

    def mask(self, values: Tensor, bits: int) -> Tensor:
        """The integer vector plus this client's masks, modulo 2^``bits``; can be called once."""
        if self.masked or not self.dealers:
            raise HoldfastError(
                "secure aggregation: an upload can be masked only once, and only after the shares have "
                "arrived"
            )
        self.masked = True
        total = values.cpu() + expand(self.seed, len(values), bits)
        keys = dict(zip(self.neighbours, self.mask_keys, strict=True))
        for other in self.dealers:
            if other != self.client:
                total += shared_mask(self.mask_key, keys[other], self.client, other, len(values), bits)
        return total

    def reveal(self, present: Sequence[int], lost: Sequence[int]) -> list[bytes]:
        """Shares of the seeds of clients ``present`` and of the mask keys of those ``lost``."""
        known = dict(zip(self.dealers, zip(self.seed_shares, self.key_shares, strict=True), strict=True))
        asked = [*present, *lost]
        if not self.masked or len(set(asked)) < len(asked) or not known.keys() >= set(asked):
            raise HoldfastError(
                "secure aggregation: the server asks for shares that this client may not reveal"
            )
        if len(present) < self.threshold or self.client not in present:
            raise HoldfastError(
                f"secure aggregation: uploads of {len(present)} neighbours arrived, {self.threshold} are needed"
            )
        return [known[k][0] for k in present] + [known[k][1] for k in lost]


@dataclass
class Unmasking:
    """The server's state of one secure sum: public keys, digests, and revealed shares."""

    threshold: int
    bits: int
    keys: Mapping[int, PublicKeys]
    dealings: Mapping[int, Dealing]
    present: Sequence[int]  # clients whose masked uploads are in the sum
    shares: dict[int, list[bytes]] = field(default_factory=dict)  # revealed, by dealer

    def __post_init__(self) -> None:
        self._there = frozenset(self.present)

    def asked_of(self, client: int) -> tuple[list[int], list[int]]:
        """The dealers whose seed shares, and those whose mask-key shares, a client must reveal."""
        dealers = [k for k in self.dealings[client].holders if k in self.dealings]
        return [k for k in dealers if k in self._there], [k for k in dealers if k not in self._there]

    def add(self, client: int, revealed: Sequence[bytes]) -> int | None:
        """Add a client's shares in the order of `asked_of`; returns the first dealer whose share is falsified, if any.

        In that case none of the client's shares is used.
        """
        present, lost = self.asked_of(client)
        pairs = list(zip([*present, *lost], revealed, strict=True))
        for dealer, share in pairs:
            dealt = self.dealings[dealer].to(client)
            if _digest(share) != (dealt.seed_digest if dealer in self._there else dealt.key_digest):
                return dealer
        for dealer, share in pairs:
            self.shares.setdefault(dealer, []).append(share)
        return None

    @property
    def needed(self) -> list[int]:
        """The clients whose secrets must be reconstructed: those with uploads, and lost clients with masks in them."""
        lost = [k for k in self.dealings if k not in self._there]
        return [*self.present, *(k for k in lost if self._there.intersection(self.dealings[k].holders))]

    @property
    def suffices(self) -> bool:
        """Whether the revealed shares suffice."""
        return all(len(self.shares.get(dealer, ())) >= self.threshold for dealer in self.needed)

    def unmasked(self, total: Tensor) -> Tensor:
        """The sum of masked uploads without masks."""
        total, count = total.clone(), len(total)
        for dealer in self.needed:
            secret = self._secret(dealer)
            if dealer in self._there:
                total -= expand(secret, count, self.bits)
            else:
                for other in self._there.intersection(self.dealings[dealer].holders):
                    public = self.keys[other].masks
                    total -= shared_mask(secret, public, other, dealer, count, self.bits)
        return total

    def _secret(self, dealer: int) -> bytes:
        """The seed of a client whose upload is in the sum, or the mask key of another one."""
        try:
            secret: bytes = combine_shares(self.shares[dealer][: self.threshold])
            if dealer in self._there:
                fits = _digest(secret) == self.dealings[dealer].seed_digest
            else:
                fits = _public(secret) == self.keys[dealer].masks
            if fits:
                return secret
        except ValueError:  # bytes that are no padded secret, or no private key
            pass
        raise HoldfastError(
            f"secure aggregation: the shares of client {dealer} do not match its secrets, so its masks cannot be "
            "removed; repeat the round without it"
        )


def expand(seed: bytes, count: int, bits: int) -> Tensor:
    """A mask: uniform integers with this number of bits, from a seed of 32 bytes; int64."""
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    values = np.frombuffer(stream.update(bytes(count * bits // 8)), f"<i{bits // 8}")
    return torch.from_numpy(values.astype(np.int64))


def shared_mask(private: bytes, public: bytes, mine: int, other: int, count: int, bits: int) -> Tensor:
    """The term that client ``mine`` adds for the mask that it shares with ``other``; both derive the same key."""
    mask = expand(base64.urlsafe_b64decode(_agreed(private, public)), count, bits)
    return mask if mine > other else -mask


def _new_key() -> bytes:
    number: int = ec.generate_private_key(CURVE).private_numbers().private_value
    return number.to_bytes(KEY_BYTES, "big")


def _private(key: bytes) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(key, "big"), CURVE)


def _public(key: bytes) -> bytes:
    point: bytes = _private(key).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
    return point


def _agreed(private: bytes, public: bytes) -> bytes:
    """The key that two clients agree on, in Fernet's format."""
    try:
        point = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, public)
    except ValueError:
        raise HoldfastError("secure aggregation: a public key is not a point of the curve") from None
    agreed: bytes = generate_shared_key(_private(private), point)
    return agreed


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
