"""Recovery of clusters of up to 10,000 nodes, on the real topology and the real recovery plan.

    python benchmarks/simulation.py [--nodes 10000] [--ranks-per-node 8] [--trials 30] [--json FILE]

For several kinds of failure: the share of trials that recovered against the exact formula, in standard errors; the
processor time of a plan and its time on the clock; and the memory of a plan at growing sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import sys
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mlflashpoint.planning.simulation import Cluster
from mlflashpoint.planning.survival import Survival

#: standard errors between the share and the formula, seconds of a plan, bytes per copy at one size over another
MOST_APART, MOST_S, MOST_GROWTH = 4.0, 2.0, 1.25
#: replicas, nodes of a failure domain, nodes that fail alone, failure domains that fail whole
SCENARIOS = ((1, 1, 100, 0), (1, 1, 50, 0), (2, 1, 500, 0), (1, 20, 0, 20), (1, 20, 30, 2))


def scenario(shape: tuple[int, int], kind: tuple[int, int, int, int], trials: int, quick: int) -> dict:
    replicas, per_domain, alone, whole = kind
    scale = shape[0] / 10_000
    alone, whole = round(alone * scale), round(whole * scale)
    cluster = Cluster(*shape, replicas=replicas, nodes_per_domain=per_domain)
    survival = Survival(cluster.holders, cluster.node_of)
    rng = random.Random(1)
    planned = cluster.trials(trials, rng, nodes=alone, domains=whole)
    wrong = sum(trial.recovered == survival.lost(trial.failed) for trial in planned)
    # The plan was compared with the fatal sets above, trial by trial; many more trials then need the sets only.
    choices = (cluster.choose(rng, nodes=alone, domains=whole) for _ in range(quick))
    recovered = 1 - sum(survival.lost(choice) for choice in choices) / quick
    expected = None
    if whole == 0:
        expected = 1 - survival.loss(alone).probability
    elif alone == 0:
        domain_of = {rank: f"domain-{int(node[5:]) // per_domain:06d}" for rank, node in cluster.node_of.items()}
        expected = 1 - Survival(cluster.holders, domain_of).loss(whole).probability
    error = math.sqrt(max(recovered * (1 - recovered), 1 / quick) / quick)
    seconds = [trial.plan_s for trial in planned]
    clock = [trial.plan_clock_s for trial in planned]
    return {
        "replicas": replicas,
        "nodes_per_domain": per_domain,
        "failed_nodes": alone,
        "failed_domains": whole,
        "plans": trials,
        "plans_recovered": sum(trial.recovered for trial in planned),
        "plans_against_fatal_sets": wrong,
        "trials": quick,
        "recovered": recovered,
        "expected": expected,
        "standard_errors_apart": None if expected is None else abs(recovered - expected) / error,
        "plan_s_median": statistics.median(seconds),
        "plan_s_max": max(seconds),
        "plan_clock_s_median": statistics.median(clock),
        "plan_clock_s_max": max(clock),
    }


def memory(ranks_per_node: int, sizes: list[int]) -> list[dict]:
    rows = []
    for nodes in sizes:
        cluster = Cluster(nodes, ranks_per_node, replicas=1)
        gc.collect()
        tracemalloc.start()
        cluster.recover([0])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        copies = sum(map(len, cluster.copies))
        rows.append({"nodes": nodes, "copies": copies, "peak_bytes": peak, "bytes_per_copy": peak / copies})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--trials", type=int, default=30, help="failures planned in full, for each kind")
    parser.add_argument("--quick", type=int, default=4000, help="failures looked up in the fatal sets, for each kind")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = (options.nodes, options.ranks_per_node)
    print(f"{shape[0]} nodes x {shape[1]} ranks, 2 versions")
    print("K  nodes/domain  failed      recovered  formula    apart  plans (ok)  wrong  plan median/max (CPU, clock)")
    rows = []
    for kind in SCENARIOS:
        row = scenario(shape, kind, options.trials, options.quick)
        rows.append(row)
        failed = f"{row['failed_nodes']}n+{row['failed_domains']}d"
        formula = "-" if row["expected"] is None else f"{row['expected']:.4f}"
        apart = "-" if row["expected"] is None else f"{row['standard_errors_apart']:.1f} se"
        print(
            f"{row['replicas']}  {row['nodes_per_domain']:12}  {failed:10}  {row['recovered']:.4f}     {formula:9}"
            f"  {apart:5}"
            f"  {row['plans']:3} ({row['plans_recovered']:3})  {row['plans_against_fatal_sets']:5}"
            f"  {row['plan_s_median']:.2f} / {row['plan_s_max']:.2f} s"
            f"  {row['plan_clock_s_median']:.2f} / {row['plan_clock_s_max']:.2f} s",
            flush=True,
        )
    grown = memory(options.ranks_per_node, [options.nodes // part for part in (8, 4, 2, 1)])
    for row in grown:
        print(
            f"memory of a plan: {row['nodes']:6} nodes, {row['copies']:7} copies: {row['peak_bytes'] / 2**20:7.1f} MiB,"
            f" {row['bytes_per_copy']:.0f} bytes per copy"
        )
    if options.json:
        options.json.write_text(json.dumps({"scenarios": rows, "memory": grown}, indent=2))
    missed = [
        text
        for row in rows
        for text, bad in (
            ("the recovered share is not the formula's", (row["standard_errors_apart"] or 0) > MOST_APART),
            ("a plan recovered what the fatal sets call lost, or the reverse", row["plans_against_fatal_sets"] > 0),
            (f"a plan took {row['plan_s_median']:.2f} s", row["plan_s_median"] > MOST_S),
        )
        if bad
    ]
    per_copy = [row["bytes_per_copy"] for row in grown]
    if max(per_copy) > MOST_GROWTH * min(per_copy):
        missed.append("the memory of a plan does not grow linearly")
    for text in missed:
        print(f"missed: {text}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
