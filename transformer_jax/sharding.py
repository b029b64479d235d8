"""One mesh axis, `data`: batches are spread over devices, parameters are the same on all of them.

Several processes (hosts) form one mesh: each builds the same batches and puts its own rows on its own devices.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.errors import UserError

DATA = "data"
SECONDS_BETWEEN_LOOKS = 0.2


def join_processes(coordinator: str | None, n_processes: int | None, process_id: int | None) -> None:
    """Connects this process with the others of the run, before JAX is first used.

    With a coordinator ("host:port"), the three are taken as given. Without one, a cluster that JAX recognises
    (SLURM, Open MPI, a TPU pod) is joined where `n_processes` is 0, and nothing happens otherwise.
    """
    if n_processes == 0:
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise UserError(
                "JAX recognises no cluster here; name a coordinator, the number of processes and this one's id."
            ) from error
    elif coordinator is not None and n_processes is not None and process_id is not None:
        jax.distributed.initialize(coordinator, n_processes, process_id)
    elif (coordinator, n_processes, process_id) != (None, None, None):
        raise UserError("Several processes need all three: a coordinator, their number, and this one's id.")


def data_mesh(n_devices: int | None = None) -> Mesh:
    """The mesh over the first `n_devices` devices, or all."""
    devices = jax.devices()
    if n_devices is not None:
        if n_devices < 1:
            raise UserError(f"{n_devices} devices were asked for; it must be at least 1.")
        if n_devices > len(devices):
            raise UserError(f"{n_devices} devices were asked for, but JAX sees {len(devices)}.")
        if jax.process_count() > 1 and n_devices != len(devices):
            raise UserError("With several processes a run takes all devices; leave n_devices out.")
        devices = devices[:n_devices]
    return jax.make_mesh((len(devices),), (DATA,), axis_types=(AxisType.Auto,), devices=devices)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The same values on every device. Each process gives the same values."""
    return _place(tree, NamedSharding(mesh, PartitionSpec()))


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Host arrays to global arrays whose leading axis is spread over the mesh. Each process gives all rows."""
    return _place(tree, NamedSharding(mesh, PartitionSpec(DATA)))


def _place(tree: Any, sharding: NamedSharding) -> Any:
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def place(x: Any) -> jax.Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, tree)


def to_host(tree: Any) -> Any:
    """Global arrays to numpy, whole, in every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


def is_main_process() -> bool:
    """Whether this process writes the files that all share."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns when every process has come here; `what` names the place."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)


def wait_for_main(done: Callable[[], bool], what: str) -> None:
    """Returns in every process when the main one has come here, after work that may take it long.

    The others look whether its result is there, by `done`, before they go to the barrier: that is a collective
    operation of the devices, on which a backend may put a time limit.
    """
    while not is_main_process() and not done():
        time.sleep(SECONDS_BETWEEN_LOOKS)
    wait_for_all(what)


def use_compilation_cache(folder: str | None = None) -> None:
    """Keeps compiled programs on disk, so that the next start of the same run finds them.

    The folder is $JAX_COMPILATION_CACHE_DIR, else `folder`, else transformer_jax in the user's cache folder.
    """
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        jax.config.update("jax_compilation_cache_dir", folder or os.path.join(cache, "transformer_jax", "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
