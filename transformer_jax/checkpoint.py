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

log = logging.getLogger("transformer_jax")

STATE, PROGRESS, SHAPES = "state", "progress", "shapes"


class Checkpoints:
    """The checkpoints of one run folder: the newest, and of those at multiples of `every` steps the newest `keep`.

    A run also saves where it is stopped. That one is there to go on from, and makes way for the next: were it kept, a
    run that was stopped would not average the same checkpoints as one that was not.
    """

    def __init__(self, folder: Path, keep: int | None = None, every: int = 1) -> None:
        import orbax.checkpoint as ocp

        # Orbax tells of every save and restore on the root logger's INFO level, and of absent files on WARNING.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.folder = folder.absolute()
        self.keep, self.every = keep, every
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
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
        args = {
            STATE: ocp.args.StandardSave(_as_dict(state)),
            PROGRESS: ocp.args.JsonSave({**progress, SHAPES: array_shapes(state)}),
        }
        self._manager.save(step, args=ocp.args.Composite(**args))
        if self.keep is not None:
            regular = [s for s in self.steps if s % self.every == 0]
            kept = {*regular[-self.keep :], self.steps[-1]}
            for old in [s for s in self.steps if s not in kept]:
                self._manager.delete(old)

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint that can be read, placed like `like`, on however many devices it was saved."""
        import orbax.checkpoint as ocp

        for step in reversed(self.steps):
            try:
                read_progress = ocp.args.Composite(**{PROGRESS: ocp.args.JsonRestore()})
                progress = dict(self._manager.restore(step, args=read_progress)[PROGRESS])
                self._check_shapes(progress.pop(SHAPES), array_shapes(like), step)
                place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)  # noqa: E731
                target = jax.tree.map(place, _as_dict(like))
                read_state = ocp.args.Composite(**{STATE: ocp.args.StandardRestore(target)})
                return TrainState(**self._manager.restore(step, args=read_state)[STATE]), progress
            except UserError:
                raise
            except Exception as error:  # whatever a damaged file makes orbax raise
                self._put_aside(step, error)
        raise UserError(
            f"No checkpoint in {self.folder} can be read; restore them from a copy, or train into another folder."
        )

    def _put_aside(self, step: int, error: Exception) -> None:
        """Renames a checkpoint that cannot be read, so that the run can go on from the one before and keep both."""
        aside = self.folder / f"{step}.unreadable"
        reason = str(error).split("\n")[0][:200]
        log.warning("The checkpoint of step %d cannot be read (%s); it is now %s.", step, reason, aside)
        (self.folder / str(step)).rename(aside)
        self._manager.reload()

    def _check_shapes(self, saved: dict[str, list[int]], wanted: dict[str, list[int]], step: int) -> None:
        differences = [
            f"{name} is {saved.get(name, 'absent')} in the checkpoint and {wanted.get(name, 'absent')} here"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name) and name.startswith("params/")
        ]
        averages = [any(name.startswith("average/") for name in shapes) for shapes in (saved, wanted)]
        if not differences and averages[0] != averages[1]:
            had, has = ("an average", "none") if averages[0] else ("no average", "one")
            differences = [f"it holds {had} of the parameters and the run asks for {has} (train.ema_decay)"]
        if not differences and saved != wanted:
            differences = ["the optimizer keeps other arrays (was clip_norm switched on or off?)"]
        if differences:
            shown = ", ".join(differences[:6]) + (f", and {len(differences) - 6} more" if differences[6:] else "")
            raise UserError(
                f"The checkpoint of step {step} in {self.folder} is of another model or optimizer: {shown}; "
                "go on with the model that it was trained with, or train into another folder."
            )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Until a save that is under way is complete."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._manager.close()


def read_params(folder: Path, step: int) -> Any:
    """The parameters of one checkpoint as NumPy arrays, on any number of devices, without the optimizer's state: those
    that are evaluated and saved, the moving average where the run keeps one."""
    import numpy as np
    import orbax.checkpoint as ocp

    path = folder.absolute() / str(step) / STATE
    damaged = UserError(f"The checkpoint of step {step} in {folder} cannot be read: its files are damaged or missing.")
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            described: Any = checkpointer.metadata(path)
            tree = getattr(described.item_metadata, "tree", None)
            if tree is None:
                raise damaged
            name = "average" if tree.get("average") else "params"
            wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree[name])
            as_numpy = jax.tree.map(lambda x: ocp.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype), tree[name])
            args = ocp.args.PyTreeRestore(item={name: wanted}, restore_args={name: as_numpy}, partial_restore=True)
            return checkpointer.restore(path, args=args)[name]
    except UserError:
        raise
    except Exception as error:  # whatever a damaged file makes orbax raise
        raise damaged from error


def _as_dict(state: TrainState) -> dict[str, Any]:
    """What is written: no entry for an average that a run does not keep."""
    parts = {"step": state.step, "params": state.params, "opt_state": state.opt_state, "average": state.average}
    return {name: part for name, part in parts.items() if part is not None}


def array_shapes(tree: Any) -> dict[str, list[int]]:
    """Path of names -> shape of every array of a training state, or of parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): list(leaf.shape) for path, leaf in leaves}
