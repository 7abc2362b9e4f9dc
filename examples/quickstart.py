"""One federation, two methods: which forgets less?"""

import holdfast as hf

federation = hf.federate(hf.load("digits"), hf.Dirichlet(alpha=0.1), clients=10, seed=0)
for method in (hf.FedAvg(), hf.FedNTD(beta=1.0)):
    run = hf.train(
        method, hf.models.mlp(64), federation, rounds=25, clients_per_round=5, local_epochs=2, lr=0.1, seed=0
    )
    print(f"{method.name}: accuracy {run.accuracy:.1%}, forgetting {run.forgetting:.1%}")
