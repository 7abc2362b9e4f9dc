"""Two methods on the same federations, three seeds: which forgets less?"""

import holdfast as hf


def split(seed: int) -> hf.Federation:
    """Ten clients with very different digits; another split for each seed."""
    return hf.federate(hf.load("digits"), hf.Dirichlet(alpha=0.1), clients=10, seed=seed)


if __name__ == "__main__":
    print(
        hf.compare(
            [hf.FedAvg(), hf.FedNTD(beta=1.0)],
            hf.models.cnn(),
            split,
            seeds=3,
            rounds=40,
            clients_per_round=5,
        )
    )
