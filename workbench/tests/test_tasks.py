"""Reading data from files that the tests write byte by byte."""

import gzip
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from bighorn_workbench.builtin_tasks import TASKS
from bighorn_workbench.builtin_tasks.digits import Digits
from bighorn_workbench.builtin_tasks.mnist import FILES, read_idx
from bighorn_workbench.builtin_tasks.text import CONTEXT, Text, standard_library
from bighorn_workbench.errors import InputError
from bighorn_workbench.tasks import Classification, batch_indices, epoch_seed
from tests.support.tables import for_every

IMAGES = struct.pack(">2xBB3I", 8, 3, 2, 2, 3) + bytes(range(12))
ZIPPED = gzip.compress(IMAGES, mtime=0)  # part of test ids, on which all workers must agree


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_values_stand_where_the_format_says(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"images{suffix}"
    path.write_bytes(ZIPPED if suffix else IMAGES)
    assert torch.equal(read_idx(path, 3), torch.arange(12, dtype=torch.uint8).view(2, 2, 3))


@for_every(
    ("name", "content", "message"),
    [
        (
            "magic",
            b"\0\0\x0d\x03" + IMAGES[4:],
            "starts with 00 00 0d 03: an idx file of this kind starts with 00 00 08 03",
        ),
        ("labels", b"\0\0\x08\x01" + IMAGES[4:], "starts with 00 00 08 01"),
        ("empty", b"", "is empty: an idx file"),
        ("header", IMAGES[:9], "holds 9 bytes"),
        ("truncated", IMAGES[:-1], "holds 27 bytes, but its header promises 2 x 2 x 3 values"),
        ("longer", IMAGES + b"\0", "holds 29 bytes"),
        ("plain.gz", IMAGES, "cannot be read"),
        ("truncated.gz", ZIPPED[:-9], "cannot be read"),
        ("damaged.gz", ZIPPED[:-6] + b"\0" * 6, "cannot be read"),
    ],
)
def test_corrupt_idx_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_idx(path, 3)


def test_idx_files_that_are_missing_or_disagree_are_named(idx_folder: Path) -> None:
    labels, test_images = idx_folder / FILES[1], idx_folder / f"{FILES[2]}.gz"
    kept = labels.read_bytes()
    labels.write_bytes(struct.pack(">2xBBI", 8, 1, 3) + b"\1\2\3")
    with pytest.raises(InputError, match="64 train images, but 3 labels"):
        TASKS["mnist"](str(idx_folder))
    labels.write_bytes(kept)
    test_images.write_bytes(gzip.compress(struct.pack(">2xBB3I", 8, 3, 16, 2, 2) + bytes(64)))
    with pytest.raises(InputError, match=r"t10k images of \(2, 2\) pixels, not \(28, 28\)"):
        TASKS["mnist"](str(idx_folder))
    for path in idx_folder.glob("t10k-*"):
        path.unlink()
    with pytest.raises(InputError, match=f"lacks {FILES[2]}, {FILES[3]} "):
        TASKS["mnist"](str(idx_folder))


def test_text_targets_are_the_next_characters(text_file: Path) -> None:
    data = Text(str(text_file))
    inputs, targets = data.data["train"]
    assert torch.equal(inputs[0, 1:], targets[0, :-1])
    assert targets[0, -1] == inputs[1, 0]
    letters = sorted(set(text_file.read_text()))
    start = "".join(letters[code - 1] for code in inputs[0].tolist())
    assert start == text_file.read_text()[:CONTEXT]
    assert data.classes == len(letters) + 1


def test_any_script_is_text(tmp_path: Path) -> None:
    path = tmp_path / "greek.txt"
    path.write_text("Μῆνιν ἄειδε, θεά, Πηληϊάδεω Ἀχιλῆος\n" * 100, "utf-8")
    assert Text(str(path)).data["train"][0].min() >= 1


def test_the_standard_library_is_text_enough() -> None:
    assert len(standard_library()) > 1_000_000


def test_held_out_data_are_neither_training_nor_test_data() -> None:
    task = Digits()
    held = task.held_out()

    def rows(of: Classification, split: str) -> set[bytes]:
        return {row.numpy().tobytes() for row in of.data[split][0]}

    assert task.samples + len(task.data["test"][0]) == 1797
    assert held.samples == len(held.data["train"][0])
    assert held.samples + len(held.data["validation"][0]) == task.samples
    assert rows(held, "train") | rows(held, "validation") == rows(task, "train")
    assert not rows(task, "train") & rows(task, "test")
    assert not rows(held, "train") & rows(held, "validation")


def test_the_order_of_the_data_depends_on_seed_and_step_alone() -> None:
    def stream(seed: int, batch_size: int, steps: int) -> list[int]:
        batches = [batch_indices(epoch_seed(seed, 0), step, batch_size, samples=10) for step in range(steps)]
        assert all(len(batch) == batch_size for batch in batches)
        return torch.cat(batches).tolist()

    whole = stream(seed=3, batch_size=1, steps=60)
    assert stream(seed=3, batch_size=4, steps=15) == whole
    assert stream(seed=3, batch_size=10, steps=6) == whole
    assert stream(seed=4, batch_size=10, steps=6) != whole
    epochs = [whole[start : start + 10] for start in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_digits_are_those_of_scikit_learn() -> None:
    """They are read from its file, since the import of the package takes longer than the run."""
    found = load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    inputs, targets = (torch.from_numpy(each).to(torch.uint8)[order] for each in (found.data, found.target))
    data = Digits().data
    for name, part in (("test", slice(359)), ("train", slice(359, None))):
        assert torch.equal(data[name][0], inputs[part])
        assert torch.equal(data[name][1], targets[part])


@pytest.mark.process
def test_a_run_imports_no_package_that_it_does_not_need() -> None:
    script = (
        "import sys\n"
        "import bighorn_workbench.train\n"
        "from bighorn_workbench.builtin_tasks.digits import Digits\n"
        "Digits()\n"
        "print(*{'sklearn', 'optuna', 'sqlalchemy', 'scipy', 'matplotlib'} & set(sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "\n"
