"""The options that belong to an optimizer as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bighorn.groups import Exclusion, Names


@dataclass(frozen=True)
class Settings:
    """The options that belong to the optimizer as a whole, and so to no group and no checkpoint."""

    backend: str
    max_grad_norm: float | None
    skip_nonfinite: bool
    exclude_from_weight_decay: Exclusion | None
    exclude_from_layer_adaptation: Exclusion | None
    process_group: Any
    names: Names | None

    def without_own(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group without these very options, which ZeroRedundancyOptimizer writes into every one."""
        return {name: value for name, value in group.items() if name not in vars(self) or value != vars(self)[name]}

    def refuse_nameless(self) -> None:
        """Raise where an exclusion by name needs names that parameters do not have."""
        for name in ("exclude_from_layer_adaptation", "exclude_from_weight_decay"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} needs names: pass model.named_parameters() as params, or names=model")

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return self

    def __reduce__(self) -> Any:
        if self.process_group is not None:
            raise TypeError("an optimizer with a process_group cannot be pickled: save state_dict() instead")
        return Settings, tuple(vars(self).values())
