"""`bighorn compare` with one more optimizer, CAME without its confidence: `came-unguided`.

Its eps2 is so large that the instability is the same number everywhere, and a step is the momentum times a hundredth of
the learning rate. The rest is Adafactor's second moment and clip with a momentum, at CAME's bytes. Its ranges of
learning rate and weight decay are to be a hundred times and a hundredth of CAME's.
"""

from bighorn_workbench.compare import compare
from bighorn_workbench.optimizers import CONTESTANTS

CONTESTANTS["came-unguided"] = {
    "optimizer": "came",
    "optimizer_option": ("bias_correction=True", "eps=(1e-30, 1e4)"),
}

if __name__ == "__main__":
    compare.main(prog_name="python workbench/benchmarks/came_confidence.py")
