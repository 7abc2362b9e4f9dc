"""One federation, from start to report: some clients attack it, a robust mean defends it, and the model is private.

The same federation is trained four times:

    plain      nobody attacks
    attacked   every fifth client sends its update with the opposite sign, three times as long
    defended   the same attack; multi-Krum leaves out the updates that are far from the others
    private    the same attack, under differential privacy: each update is clipped, and noise is added to their sum

A robust mean needs single updates, which differential privacy hides in a noisy sum, so the two are not combined.
Clipping bounds what an attacker can do as well: it cannot send a longer update than anybody else.
"""

import sys
from pathlib import Path

import holdfast as hf
from holdfast.report import write_report
from holdfast.runs import read_audit, verify_audit

CLIENTS, SHARE = 50, 0.2
ATTACK = f"sign-flip:{SHARE},scale=3"
RUNS = {
    "plain": {},
    "attacked": {"attack": ATTACK},
    "defended": {"attack": ATTACK, "robust": f"multi-krum:attackers={round(SHARE * CLIENTS)}"},
    "private": {"attack": ATTACK, "dp": hf.DP(epsilon=8, delta=1e-3, clip=0.5)},
}


def main(folder: Path, rounds: int = 20) -> dict[str, hf.Run]:
    """Train, check the audit logs, and write ``report.html``."""
    federation = hf.federate(hf.load("digits"), hf.Dirichlet(alpha=1.0), clients=CLIENTS, seed=0)
    runs = {}
    for name, settings in RUNS.items():
        runs[name] = run = hf.train(
            "fedavg", "mlp:32", federation, rounds=rounds, local_epochs=2, lr=0.1, seed=0,
            evaluate_locals=False, out=folder / name, progress=False, **settings,
        )  # fmt: skip
        last = run.records[-1]
        spent = f", epsilon {last['epsilon']:.2f}" if "epsilon" in last else ""
        print(f"{name:10} accuracy {run.accuracy:.1%}, {left_out(run)} hostile updates left out{spent}")

        found = verify_audit(folder / name)
        assert found.problem is None, found.problem
        received = sum(len(line.get("received", {})) for line in read_audit(folder / name))
        print(
            f"{'':10} audit log intact: {found.entries} lines, {received} updates received, head {found.head[:16]}"
        )
    write_report([folder / name for name in RUNS], folder / "report.html")
    print(f"report: {folder / 'report.html'}")
    return runs


def left_out(run: hf.Run) -> int:
    """How many updates of attackers the robust mean has left out."""
    return sum(len({*r.get("attackers", ())} & {*r.get("rejected", ())}) for r in run.records)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/private-federation"))
