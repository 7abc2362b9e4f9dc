"""A method's card: when to use it, what it costs, and what leaves a client."""

from dataclasses import dataclass

GLOBAL_TEACHER = (
    "a forward pass of the global model over its samples each round, each step where inputs are augmented"
)
CLASS_MEANS = "the mean feature of each of its classes, and so which classes it holds"


@dataclass(frozen=True)
class Card:
    """Guidance for users of a method, besides its equations; costs are relative to FedAvg."""

    when: str = ""  # to use it
    client: str = "no extra pass"  # what a client computes
    server: str = ""  # what the server computes beyond a mean
    uploads: str = ""  # what leaves a client besides weights, buffers and its number of samples
