"""Weights for samplers: bfloat16, by Hugging Face names and in their shapes, as an Orbax checkpoint with a manifest.

The cast and the change of layout are made on the devices that hold the parameters, so that a publication neither
gathers a tensor nor keeps the trainer waiting for a disk: what is written is a copy, and training goes on meanwhile. A
directory gets its name when all of it is there. `serving/published.py` says what is in it and reads it.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reterm_jax.losses.token_logprobs import token_logprobs
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.forward import head, hidden_states
from reterm_jax.policy.hf_files import copy_companions, write_json
from reterm_jax.policy.hf_layout import Group, groups
from reterm_jax.policy.sharding import BATCH_AXES, batch_sharding, make_mesh
from reterm_jax.policy.spec import Params, abstract_params, param_name
from reterm_jax.serving.published import MANIFEST_NAME, WEIGHTS_NAME, Manifest, Probe

_DTYPE = jnp.bfloat16

# Bytes that are on their way from the devices to the disk at one time, in each process.
_IN_FLIGHT_GB = 1


class PublishError(RuntimeError):
    """Weights that must not or could not be published. The message names the version and the remedy."""


class Publisher:
    """Publishes versions of one policy under a directory, one at a time, in the background.

    Every process makes one and calls the same methods.

    Args:
      directory: gets one directory per version, named by its number. Made if missing; what a killed process left
        unfinished is removed.
      config: the architecture.
      source: a Hugging Face directory, for the tokenizer and what else belongs to the model beside its weights.
      probe_ids: what the manifest's probe is made of, 2 ids or more. Best is text that the policy knows, such as a
        task's prompt: where it is lost, rounding moves its logprobs most.
      keep: how many of the latest versions stay.
    """

    def __init__(
        self, directory: str | Path, config: QwenConfig, source: str | Path, probe_ids: Sequence[int], *, keep: int = 3
    ) -> None:
        if keep < 1:
            raise PublishError(f"keep = {keep}: at least the latest version must stay for samplers to read")
        wrong = [token for token in probe_ids if not 0 <= token < config.vocab_size]
        if len(probe_ids) < 2 or wrong:
            raise PublishError(
                f"probe_ids: 2 or more ids below the vocabulary's {config.vocab_size} are needed, got {len(probe_ids)} "
                f"with {len(wrong)} outside it; encode the probe with the model's own tokenizer"
            )
        self.directory = Path(directory).absolute()
        self._config, self._source, self._probe_ids, self._keep = config, Path(source), tuple(probe_ids), keep
        self._groups = list(groups(config))
        self._compiled: tuple[Mesh, Callable] | None = None
        self._writing: threading.Thread | None = None
        self._error: BaseException | None = None
        self._writes = jax.process_index() == 0
        if self._writes:
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob(".*.partial"):
                shutil.rmtree(leftover)
        _sync(f"publisher of {self.directory}")
        handler = ocp.PyTreeCheckpointHandler(
            save_device_host_concurrent_gb=_IN_FLIGHT_GB,
            # bfloat16 weights shrink little, and every sampler would pay for it at every update.
            use_compression=False,
            # Nothing has to leave the devices before `save` returns: what is saved is a copy that nobody changes.
            is_prioritized_key_fn=lambda _: False,
        )
        self._checkpointer = ocp.AsyncCheckpointer(handler)

    @property
    def versions(self) -> list[int]:
        """What is published, oldest first."""
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdecimal())

    def path(self, version: int) -> Path:
        """Where a version is, once it is published."""
        return self.directory / str(version)

    def discard_from(self, version: int) -> None:
        """Removes `version` and later ones, which a run that resumes there publishes again."""
        self.wait()
        if self._writes:
            for later in self.versions:
                if later >= version:
                    shutil.rmtree(self.path(later))
        _sync(f"versions from {version} on are gone")

    def publish(self, version: int, params: Params) -> None:
        """Starts to publish `params` as `version`. Returns when they may be donated; `wait` says when it is done.

        A publication that is still being written is finished first. The devices hold a bfloat16 copy of the parameters
        until this one is written.

        Raises:
          PublishError: the version exists, the parameters are not finite or not those of the config, or the publication
            before this one failed.
        """
        self.wait()
        if self.path(version).exists():
            raise PublishError(f"{self.path(version)} exists; a published version never changes: choose a new number")
        self._check_tree(params)
        mesh = _mesh(params)
        with jax.set_mesh(mesh):
            tensors, finite = self._layout(mesh)(params)
            logprobs_BT = _probe_logprobs(params, self._config, self._probe_ids, mesh)
        if not finite:
            raise PublishError(
                f"version {version}: parameters are not finite in bfloat16; training has diverged: go back to a "
                "checkpoint from before"
            )
        probe = Probe(self._probe_ids, tuple(np.asarray(logprobs_BT.addressable_data(0))[0].tolist()))
        manifest = Manifest(version, {g.tensor: (g.shape, jnp.dtype(_DTYPE).name) for g in self._groups}, probe)

        partial = self.directory / f".{version}.partial"
        if self._writes:
            partial.mkdir()
        _sync(f"publishing {version}")
        self._checkpointer.save(partial / WEIGHTS_NAME, ocp.args.PyTreeSave(tensors))
        self._writing = threading.Thread(target=self._finish, args=(partial, manifest), name=f"publish-{version}")
        self._writing.start()

    def wait(self) -> None:
        """Returns when nothing is being written. Raises PublishError where the last publication failed."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._error is not None:
            error, self._error = self._error, None
            raise PublishError(f"nothing was published: {error}; see to the disk under {self.directory}") from error

    def close(self) -> None:
        """Waits for the last publication."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def _finish(self, partial: Path, manifest: Manifest) -> None:
        try:
            self._checkpointer.wait_until_finished()
            if self._writes:
                copy_companions(self._source, partial)
                write_json(partial / "config.json", {**self._config.to_hf(), "dtype": jnp.dtype(_DTYPE).name})
                (partial / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
                os.replace(partial, self.path(manifest.version))
                for old in self.versions[: -self._keep]:
                    shutil.rmtree(self.path(old))
        except BaseException as error:
            self._error = error
            if self._writes:
                shutil.rmtree(partial, ignore_errors=True)

    def _layout(self, mesh: Mesh) -> Callable[[Params], tuple[dict[str, jax.Array], jax.Array]]:
        """The compiled way from parameters to checkpoint tensors; each device makes, and later writes, a part."""
        if self._compiled is None or self._compiled[0] != mesh:
            shardings = {group.tensor: _spread(mesh, group.shape) for group in self._groups}
            out = (shardings, NamedSharding(mesh, PartitionSpec()))
            self._compiled = mesh, jax.jit(functools.partial(_tensors, self._groups), out_shardings=out)
        return self._compiled[1]

    def _check_tree(self, params: Params) -> None:
        def shapes(tree: Params) -> dict[str, tuple[int, ...]]:
            return {param_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

        wanted, given = shapes(abstract_params(self._config)), shapes(params)
        wrong = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
        if wrong:
            raise PublishError(f"parameters are not those of the config: {', '.join(wrong[:8])}; give the model's own")


def _tensors(plan: Sequence[Group], params: Params) -> tuple[dict[str, jax.Array], jax.Array]:
    """Checkpoint tensors by name, and whether all their values are finite."""
    flat = {param_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    tensors = {}
    for group in plan:
        leaves = (flat[name] for name in group.params)
        parts = tuple((leaf if group.block is None else leaf[group.block]).astype(_DTYPE) for leaf in leaves)
        # A split only moves elements: its transpose is its inverse.
        (tensors[group.tensor],) = jax.linear_transpose(group.split, jax.ShapeDtypeStruct(group.shape, _DTYPE))(parts)
    finite = jnp.stack([jnp.isfinite(tensor).all() for tensor in tensors.values()]).all()
    return tensors, finite


@functools.partial(jax.jit, static_argnames=("config", "ids", "mesh"))
def _probe_logprobs(params: Params, config: QwenConfig, ids: tuple[int, ...], mesh: Mesh) -> jax.Array:
    """Logprobs [B,T-1] of ids[1:] under the rounded parameters. All B rows are the same: one for each batch device."""
    # Not a cast and its reverse, which XLA may leave out.
    rounded = jax.tree.map(lambda leaf: jax.lax.reduce_precision(leaf.astype(jnp.float32), 8, 7), params)
    rows = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    tokens_BT = jax.lax.with_sharding_constraint(
        jnp.broadcast_to(jnp.asarray(ids, jnp.int32), (rows, len(ids))), batch_sharding(mesh)
    )
    positions_BT = jnp.broadcast_to(jnp.arange(len(ids) - 1), (rows, len(ids) - 1))
    hidden_BTD = hidden_states(rounded, config, tokens_BT[:, :-1], jnp.ones_like(positions_BT), positions_BT)
    return token_logprobs(hidden_BTD, head(rounded, config), tokens_BT[:, 1:])[0]


def _spread(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """The first axis over all devices, where it is divisible."""
    whole = shape[0] % mesh.size
    return NamedSharding(mesh, PartitionSpec() if whole else PartitionSpec(mesh.axis_names))


def _mesh(params: Params) -> Mesh:
    sharding = jax.tree.leaves(params)[0].sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) else make_mesh(devices=list(sharding.device_set))


def _sync(what: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
