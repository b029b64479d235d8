"""Trains a Transformer: `python train.py [--config configs/NAME.py] [--section.setting VALUE ...]`.

Without arguments it learns to write dates out, from a corpus made by rule: no download, minutes on a CPU.
"""

import sys
from pathlib import Path

from transformer_jax.cli import run_command
from transformer_jax.memory import restart_with_huge_pages

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "dates.py"


def main(arguments: list[str]) -> int:
    from transformer_jax.run_options import parse_options
    from transformer_jax.sharding import join_processes, use_compilation_cache

    options = parse_options(arguments, DEFAULT_CONFIG)
    use_compilation_cache()
    if options.dry_run:
        from transformer_jax.dry_run import describe

        print("\n".join(describe(options.run, options.accelerator, options.accelerators)))
        return 0
    join_processes(options.processes.coordinator, options.processes.count, options.processes.id)

    from transformer_jax.diversification import train_run

    folder = options.output or Path("runs") / options.run.name
    return train_run(options.run, folder, options.resume).exit_code


if __name__ == "__main__":
    restart_with_huge_pages()
    sys.exit(run_command(lambda: main(sys.argv[1:])))
