"""The quality claim: 3 epochs of a small convolutional network at batch 4096 with LAMB, test accuracy of 3 seeds.

    python workbench/benchmarks/mnist_lamb_4096.py DIR

DIR holds MNIST's four idx files. Writes workbench/benchmarks/results/mnist-lamb-4096.json.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bighorn_workbench.environment import commit

OPTIONS = "--task mnist --batch-size 4096 --lr-scaling sqrt --epochs 3"
SEEDS = (0, 1, 2)
RESULT = Path(__file__).parent / "results" / "mnist-lamb-4096.json"


def main() -> None:
    [data] = sys.argv[1:]
    found = commit()  # before the runs, since a later commit is not the one that ran
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            output = Path(folder) / f"{seed}.json"
            places = ["--data", data, "--seed", str(seed), "--json", str(output)]
            subprocess.run([sys.executable, "-m", "bighorn_workbench", "train", *OPTIONS.split(), *places], check=True)
            runs.append(json.loads(output.read_text()))
    result = {
        "command": f"bighorn train {OPTIONS} --data DIR --seed SEED",
        **found,
        "environment": runs[0]["environment"],
        "data": runs[0]["data"],
        "peak_lr": runs[0]["peak_lr"],
        "config": {name: value for name, value in runs[0]["config"].items() if name not in {"data", "seed"}},
        "seeds": {run["config"]["seed"]: run["result"] for run in runs},
        "lowest_test_accuracy": min(run["result"]["test_accuracy"] for run in runs),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{RESULT}: test accuracy at least {result['lowest_test_accuracy']:.2%}")


if __name__ == "__main__":
    main()
