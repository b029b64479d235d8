"""Training state on disk, by orbax: parameters, optimizer, step, and where in the data the run is.

A checkpoint appears under its step's number when it is complete, and not before: a run that is killed while saving
goes on from the one before.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax

from transformer_jax.errors import UserError
from transformer_jax.training import TrainState

STATE, PROGRESS = "state", "progress"


class Checkpoints:
    """The checkpoints of one run folder, newest kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        import orbax.checkpoint as ocp

        # Orbax tells of every save and restore on the root logger's INFO level, and of absent files on WARNING.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.folder = folder.absolute()
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                # On a CPU the arrays that a background save reads are the ones that the next step overwrites.
                enable_async_checkpointing=jax.default_backend() != "cpu",
            ),
            item_names=(STATE, PROGRESS),
        )

    @property
    def latest_step(self) -> int | None:
        """The newest complete checkpoint."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, progress: dict[str, Any]) -> None:
        """Saves under the state's step. `progress` is a small record of plain values."""
        import orbax.checkpoint as ocp

        step = int(state.step)
        if step in self._manager.all_steps():
            return
        args = {STATE: ocp.args.StandardSave(state), PROGRESS: ocp.args.JsonSave(progress)}
        self._manager.save(step, args=ocp.args.Composite(**args))

    def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint (or that of `step`), placed like `like`, on however many devices it was saved."""
        import orbax.checkpoint as ocp

        step = self.latest_step if step is None else step
        if step is None:
            raise UserError(f"There is no complete checkpoint in {self.folder}.")
        self._check_shapes(like, step)
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), like
        )
        args = {STATE: ocp.args.StandardRestore(target), PROGRESS: ocp.args.JsonRestore()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**args))
        return restored[STATE], restored[PROGRESS]

    def _check_shapes(self, like: TrainState, step: int) -> None:
        saved = _shapes(self._manager.item_metadata(step)[STATE])
        wanted = _shapes(like)
        differences = [
            f"{name}: {saved.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} here"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name) and name.startswith("params")
        ]
        if not differences and saved.keys() != wanted.keys():
            differences = ["the optimizer's state has other parts (was clip_norm switched on or off?)"]
        if differences:
            shown = "; ".join(differences[:6]) + (f"; and {len(differences) - 6} more" if differences[6:] else "")
            raise UserError(
                f"The checkpoint of step {step} in {self.folder} is of another model ({shown}); "
                "go on with the model that it was trained with, or train into another folder."
            )

    def close(self) -> None:
        """Waits for a save that is under way."""
        self._manager.wait_until_finished()
        self._manager.close()


def _shapes(tree: Any) -> dict[str, list[int]]:
    """Path of names -> shape, for trees of arrays and for orbax's description of a saved one."""
    tree = getattr(tree, "tree", tree)
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {
        "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path): list(leaf.shape)
        for path, leaf in leaves
        if hasattr(leaf, "shape")
    }
