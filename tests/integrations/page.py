"""The tables of `docs/trainers.md` and of its results: `python -m tests.integrations.page` writes them.

`make integrations` does so after the tests have passed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "trainers.md", ROOT / "benchmarks" / "results" / "trainers.md"
BEGIN, END = "<!-- tables of the tests: written by `make integrations` -->\n", "<!-- end of tables -->\n"
TABLE = re.compile(
    r"(?<=<!-- table of the trainers: written by `make integrations` -->\n).*?(?=<!-- end of the table -->)", re.DOTALL
)


@dataclass(frozen=True)
class Trainer:
    """A row of the table.

    Attributes:
        name: The trainer, with its page.
        packages: The packages whose versions are noted; empty if none can be installed here.
        runs: The parts of the trainer that the tests run, or the files that the page was checked against.
        glue: The lines that a user writes.
    """

    name: str
    packages: tuple[str, ...]
    runs: str
    glue: str


TRAINERS = (
    Trainer(
        "[Hugging Face Trainer, TRL](with-transformers.md), [peft](with-peft.md)",
        ("transformers", "peft", "accelerate"),
        "`Trainer.train()`, resumed; under LoRA; with DeepSpeed's ZeRO 1",
        "`optimizers=(Lamb(...), None)`",
    ),
    Trainer(
        "[Accelerate](#accelerate)",
        ("accelerate",),
        "`prepare`, `save_state`, `load_state`",
        "`prepare(model, Lamb(...))`",
    ),
    Trainer(
        "[Lightning](#lightning)",
        ("lightning", "jsonargparse"),
        "`Trainer.fit`, resumed; `LightningCLI`",
        "`--optimizer=bighorn.Lamb`",
    ),
    Trainer(
        "[DeepSpeed](with-deepspeed.md)",
        ("deepspeed",),
        "its engine, with ZeRO 1 and 2 and without",
        "`deepspeed.initialize(model=model, optimizer=Lamb(...), config=config)`",
    ),
    Trainer(
        "[Megatron-LM](with-megatron.md)",
        ("megatron-core",),
        "`get_megatron_optimizer`, with 2 and 4 ranks on a CPU in place of CUDA, saved and loaded; no training script",
        "`distributed.optimizer = Lamb(megatron_groups(distributed))`",
    ),
    Trainer(
        "[timm](from-timm.md#with-timms-script)",
        ("timm",),
        "`optimizer_kwargs`, the registry and `create_optimizer_v2`; not `train.py`, which needs torchvision",
        "`python -m bighorn.integrations.timm train.py --opt bighornlamb`",
    ),
    Trainer(
        "[open_clip](from-timm.md#with-timms-script)",
        (),
        "not installed: it needs torchvision; `open_clip_train/main.py` was read, and its call of timm's factory runs",
        "`--opt timm/bighornlamb`",
    ),
    Trainer(
        "[MMEngine](#mmengine)",
        ("mmengine",),
        "`Runner.train`, resumed; `paramwise_cfg`; schedulers of the learning rate",
        "`optimizer=dict(type='bighorn.Lamb', lr=0.01)`",
    ),
    Trainer(
        "[Stable-Baselines3](#stable-baselines3)",
        ("stable-baselines3",),
        "`PPO.learn`, saved and loaded",
        "`policy_kwargs=dict(optimizer_class=Lamb)`",
    ),
    Trainer(
        "[Composer](#composer)",
        (),
        "not in the tests: it needs torchvision; `Trainer.fit` of 0.32.1, resumed, ran once with empty modules for it",
        "`Trainer(optimizers=Lamb(...), ...)`",
    ),
    Trainer(
        "[Ultralytics](#ultralytics)",
        (),
        "not installed: it needs torchvision; `engine/trainer.py` `build_optimizer` was read",
        "`build_optimizer` of a trainer",
    ),
    Trainer(
        "[torchtitan](#torchtitan)",
        ("torchtitan",),
        "`config.build(model_parts=...)`, resumed from its state_dict",
        "`bighorn.integrations.torchtitan.OptimizersContainer.Config`",
    ),
    Trainer(
        "[torchtune](#configuration-files)",
        ("torchtune",),
        "`config.instantiate`, `register_optim_in_bwd_hooks`; no recipe, which needs a torchao for this torch",
        "`_component_: bighorn.Lamb`",
    ),
    Trainer("[Hydra](#configuration-files)", ("hydra-core",), "`instantiate`", "`_target_: bighorn.Lamb`"),
    Trainer(
        "[NeMo AutoModel](#configuration-files)",
        ("nemo-automodel",),
        "`build_optimizer`, with `param_group_overrides`",
        "`_target_: bighorn.Lamb`",
    ),
    Trainer(
        "[verl](#configuration-files)",
        ("verl",),
        "`FSDPOptimizerConfig` and `build_optimizer`; no worker, which needs ray",
        "`optimizer_impl: bighorn`, `optimizer: Lamb`",
    ),
    Trainer(
        "[axolotl](#configuration-files)",
        ("axolotl",),
        "its `PluginManager`; no training, which needs its pinned dependencies",
        "`plugins: [bighorn.integrations.axolotl.CamePlugin]`",
    ),
    Trainer(
        "[sd-scripts, musubi-tuner](#sd-scripts-musubi-tuner-onetrainer-and-diffusion-pipe)",
        (),
        "not installed: `library/train_util.py` `get_optimizer` and `sdxl_train.py` `__grad_hook` were read, and "
        "`hv_train_network.py`",
        "`--optimizer_type bighorn.Came`",
    ),
    Trainer(
        "[OneTrainer](#sd-scripts-musubi-tuner-onetrainer-and-diffusion-pipe)",
        (),
        "not installed: `modules/trainer/GenericTrainer.py` `__grad_hook` and `modules/util/optimizer` were read",
        "one line in a copy",
    ),
    Trainer(
        "[diffusion-pipe](#sd-scripts-musubi-tuner-onetrainer-and-diffusion-pipe)",
        (),
        "not installed: `train.py` `get_optimizer` was read",
        "a file of three lines",
    ),
    Trainer(
        "[diffusers, SANA, PixArt](#diffusers-sana-and-pixart)", ("diffusers",), "the loop of its scripts", "one import"
    ),
    Trainer(
        "[sentence-transformers](with-transformers.md)",
        ("sentence-transformers",),
        "uses the trainer of transformers",
        "`optimizers=(Lamb(...), None)`",
    ),
    Trainer("[fastai](#fastai)", ("fastai",), "`OptimWrapper`, `Learner.fit`", "`OptimWrapper(opt=Lamb)`"),
)

TESTED = """
| trainer | version |
|---|---|
"""


def versions(trainer: Trainer) -> str:
    """Return the installed versions of a trainer's packages."""
    found = []
    for package in trainer.packages:
        try:
            found.append(version(package) if len(trainer.packages) == 1 else f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed here" if len(trainer.packages) > 1 else "not installed here")
    return ", ".join(found) or "none"


LOSSES = """
## The same 36 steps

`tests/integrations/test_same_training.py` trains a small network for 3 epochs of 12 steps with each client. timm,
torchtitan, torchtune, Hydra, NeMo AutoModel and verl build the optimizer for a loop by hand; a run that resumes from
its `state_dict()` after 18 steps continues with the same bits. The others have a loop of their own, and resume with the
same bits from their own checkpoints. The table has the mean loss of the last epoch, at a learning rate of 0.01 for all.

| loop | AdamW | Lamb | Came |
|---|---|---|---|
"""


def page() -> str:
    """Return the text of the guide with its table: the user's line for each trainer, and the parts that tests run."""
    rows = "".join(f"| {each.name} | {each.glue} | {each.runs} |\n" for each in TRAINERS)
    head = "| trainer | your line | what the tests run |\n|---|---|---|\n"
    return TABLE.sub(lambda _: f"\n{head}{rows}\n", PAGE.read_text())


def table() -> str:
    """Return the table of installed versions."""
    rows = (f"| {plain(each.name)} | {versions(each)} |\n" for each in TRAINERS)
    return TESTED + "".join(rows)


def plain(name: str) -> str:
    """Return a name without its links."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", name)


def losses() -> str:
    """Return the table of losses; every row except the loop by hand needs its client."""
    from tests.integrations.test_same_training import last_epochs

    rows = last_epochs().items()
    return LOSSES + "".join(f"| {name} | {' | '.join(f'{loss:.3f}' for loss in each)} |\n" for name, each in rows)


def results(text: str) -> str:
    """Return the page of results with new tables and today's date."""
    when = datetime.now(timezone.utc).date().isoformat()
    tables = f"{table()}{losses()}\nRun on {when} with torch {version('torch')}.\n\n"
    return f"{text.partition(BEGIN)[0]}{BEGIN}{tables}{END}{text.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
    RESULTS.write_text(results(RESULTS.read_text()))
