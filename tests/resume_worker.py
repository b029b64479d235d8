"""A tiny run in a process of its own, that can be told to die by SIGKILL at a step or inside a save.

    python resume_worker.py RUN_FOLDER LOG [--die-after STEP | --die-saving STEP] [--devices N]

Every step appends a line to LOG: its number and a digest of the batch that it used.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--die-saving", type=int)
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()

    import jax

    jax.config.update("jax_num_cpu_devices", options.devices)
    jax.config.update("jax_platforms", "cpu")
    from transformer_jax.config import DataConfig, DecodeConfig, ModelConfig, RunConfig, TrainConfig
    from transformer_jax.trainer import Trainer

    config = RunConfig(
        model=ModelConfig.tiny(d_model=16, n_heads=2, d_ff=32, n_encoder_layers=1, n_decoder_layers=1, max_length=64),
        data=DataConfig(task="numbers", max_tokens=48, batch_tokens=None, batch_size=64, n_buckets=1),
        train=TrainConfig(steps=40, warmup_steps=10, log_every=1, evaluate_every=20, checkpoint_every=4),
        decode=DecodeConfig(metric="exact", extra_length=4, limit=20),
    )
    trainer = Trainer(config, options.folder)
    step_function = trainer.train_step

    def recorded(state: Any, batch: Any) -> Any:
        step = int(state.step) + 1
        digest = hashlib.sha256(b"".join(bytes(memoryview(jax.device_get(x)).cast("B")) for x in batch)).hexdigest()
        with options.log.open("a") as file:
            file.write(f"{step} {digest}\n")
        result = step_function(state, batch)
        if step == options.die_after:
            jax.block_until_ready(result)
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    recorded._cache_size = step_function._cache_size  # type: ignore[attr-defined]
    trainer.train_step = recorded
    if options.die_saving is not None:
        die_inside_the_save_of(options.die_saving)
    trainer.train()


def die_inside_the_save_of(step: int) -> None:
    """Dies when all of the checkpoint is written, but under its temporary name."""
    from orbax.checkpoint._src.path import atomicity

    def die_instead(original: Any) -> Any:
        async def finalize(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.get_final().name == str(step):
                os.kill(os.getpid(), signal.SIGKILL)
            return await original(self, *args, **kwargs)

        return finalize

    for name in ("AtomicRenameTemporaryPath", "CommitFileTemporaryPath"):
        kind = getattr(atomicity, name)
        kind.finalize = die_instead(kind.finalize)


if __name__ == "__main__":
    main()
