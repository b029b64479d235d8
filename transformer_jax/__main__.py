"""`python -m transformer_jax` is `transformer-jax`."""

from transformer_jax.cli import main

main()
