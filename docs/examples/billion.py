"""A Llama of 1.1 billion parameters, new weights, trained within 6 GB of memory on a CPU, or on a GPU.

python billion.py                             Came: int8 momentum, bf16 weights, gradients freed as they are used
python billion.py --state-dtype int4          the momentum in 4 bits
python billion.py --optimizer adamw-bf16      the same model with AdamW: the limit ends it
python billion.py --text FILE --steps 300     more of your own text

The limit is on the process's private memory (Linux's RLIMIT_DATA), so it holds for everything but shared libraries.
"""

import argparse
import re
import resource
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bighorn import Came, release_gradients
from bighorn.schedules import Cosine

VOCABULARY = 32_000
DTYPES = {"came": torch.bfloat16, "adamw-bf16": torch.bfloat16, "adamw-fp32": torch.float32}


def tokens_of(text: str) -> Tensor:
    """Words, spaces and signs, the most frequent ones by number; 0 is any other."""
    words = re.findall(r"\w+|\s+|[^\w\s]", text)
    common = [word for word, _ in Counter(words).most_common(VOCABULARY - 1)]
    number = {word: index for index, word in enumerate(common, start=1)}
    return torch.tensor([number.get(word, 0) for word in words])


def standard_library() -> str:
    """The sources of Python's standard library, by name."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n".join(path.read_text(errors="replace") for path in paths)


def peak() -> float:
    """The most resident memory so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def optimizer_of(model: torch.nn.Module, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    """Build the optimizer; Came also takes over the steps inside of backward."""
    if arguments.optimizer != "came":
        return torch.optim.AdamW(model.parameters(), lr=arguments.lr, fused=True)
    optimizer = Came(
        model.named_parameters(),
        lr=Cosine(arguments.lr, decay_steps=arguments.steps).after_warmup(10),
        bias_correction=True,
        state_dtype=arguments.state_dtype,
        weight_rounding="stochastic",
        exclude_from_weight_decay="ndim<2",
    )
    release_gradients(model, optimizer)
    return optimizer


def main() -> None:
    """Build the model under the limit, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=DTYPES, default="came")
    parser.add_argument("--state-dtype", choices=("int8", "int4"), default="int8", help="of Came's momentum")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="the limit, 10^9 bytes; 0: none")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=128, help="of a step")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--text", type=Path, help="a text file; the sources of Python's standard library if not given")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    if arguments.gigabytes and arguments.device == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (int(arguments.gigabytes * 1e9),) * 2)

    tokens = tokens_of(arguments.text.read_text() if arguments.text else standard_library())
    starts = torch.randperm(len(tokens) - arguments.tokens, generator=torch.Generator().manual_seed(0))
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=2048, intermediate_size=5632, num_hidden_layers=arguments.layers,
        num_attention_heads=32, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    try:
        with torch.device(arguments.device):
            model = LlamaForCausalLM._from_config(config, dtype=DTYPES[arguments.optimizer])
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{count / 1e9:.2f} billion parameters, {len(tokens):,} tokens of text; built: {peak():.2f} GB")
        optimizer = optimizer_of(model, arguments)
        losses = []
        for step, start in enumerate(starts[: arguments.steps].tolist(), start=1):
            begun = time.perf_counter()
            batch = tokens[None, start : start + arguments.tokens].to(arguments.device)
            loss = model(input_ids=batch, labels=batch).loss
            if step == 1:
                print(f"first forward: peak {peak():.2f} GB", flush=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - begun
            losses.append(loss.item())
            print(f"step {step}: loss {losses[-1]:.3f}, {seconds:.1f} s, peak {peak():.2f} GB", flush=True)
        few = max(1, len(losses) // 5)
        first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
        print(f"mean loss of the first {few} steps {first:.3f}, of the last {few} {last:.3f}; peak {peak():.2f} GB")
    except RuntimeError as error:
        if "allocate" not in str(error) and "out of memory" not in str(error):
            raise
        sys.exit(f"{arguments.optimizer} needs more than {arguments.gigabytes} GB: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
