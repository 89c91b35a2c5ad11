"""The model replica: a Ray Serve deployment around one engine. It owns the weights and running requests, but no KV.

    router ─ submit, cancel ─► RouterCalls ─► Engine (thread) ─► arena (mapped)      over a link: router_links.py
           ◄──── feed ───────── FeedHub   ◄──── deltas            pool actor (lease)

When the lease is lost, or the arena behind it is another, nothing more is launched and the process exits; Serve starts
a new one, and the routers continue its requests there or elsewhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Never

import msgspec
import ray
from ray import serve

from remora.cache_actors.block_loader import ThreadedLoader
from remora.cache_actors.cluster_names import pool_actor_name
from remora.cache_actors.node_arenas import NodeArenas
from remora.cache_actors.pool_calls import ask_kv_formats, select_gpu_of
from remora.cache_actors.pool_client import PoolClient
from remora.cache_actors.pool_handles import get_or_create_pool
from remora.cache_actors.pool_reader import PoolReaders
from remora.cache_actors.port import KVSource, OpenGate
from remora.cache_actors.process_watch import process_identity
from remora.cache_actors.registry import get_or_create_registry
from remora.cache_actors.registry_client import RegistryMember
from remora.cache_actors.registry_state import ReplicaLoad, ReplicaRecord, ReplicaStatus
from remora.cache_actors.step_lock import StepLock
from remora.deployments.accuracy.gate import check_compatible_gate, check_gate
from remora.deployments.catalog import Catalog
from remora.deployments.engine.base import EngineConfig, EngineNamespace, EngineStats, KVSibling
from remora.deployments.engine.engine import Engine
from remora.deployments.feed import FeedHub
from remora.deployments.idle_watch import IdleWatch
from remora.deployments.model_card import ModelCard
from remora.deployments.models.compatible import compatible_identities
from remora.deployments.models.load import load_model
from remora.deployments.models.load_target import device_target
from remora.deployments.models.loaded_model import LoadedModel
from remora.deployments.models.weight_storage import WeightStorage
from remora.deployments.namespace_formats import NamespaceFormats
from remora.deployments.pipeline.stage_group import StageGroup, thread_counts
from remora.deployments.pipeline.stage_split import stage_split
from remora.deployments.router_calls import RouterCalls
from remora.deployments.router_links import RouterLinks
from remora.deployments.stall import StallWatch
from remora.deployments.start_times import StartTimes
from remora.kernels.base import check_decoder_health
from remora.kernels.stages import StagePart
from remora.namespaces.geometry import Precision
from remora.platform.base.clock import SystemClock
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import ModelId, NamespaceId, ReplicaId, RouterId
from remora.platform.base.paths import default_state_dir
from remora.platform.base.serve_environment import bind_replica_to_loopback
from remora.platform.base.telemetry import flush_telemetry, setup_telemetry
from remora.platform.base.threads import wake_promptly

logger = logging.getLogger(__name__)

#: Longest wait for a pool that says which precisions its namespaces have.
_PRECISIONS_TIMEOUT_S = 5.0
#: Exit status of a replica whose lease is lost.
EXIT_LEASE_LOST = 70

_encoder = msgspec.msgpack.Encoder()


class ModelReplica:
    """Methods are called by routers through ServeLink; `target` names the replica they are meant for."""

    async def __init__(self, config: RemoraConfig, model_name: str) -> None:  # type: ignore[misc]  # Serve awaits it
        """Loads the model and joins the pool of its device on this node. Raises ModelError, ArenaError or PoolError."""
        self._start_times = StartTimes("process")
        logging.basicConfig(level=logging.INFO)
        bind_replica_to_loopback()
        self._config = config
        self._model_config = next(model for model in config.models if model.name == model_name)
        context = serve.get_replica_context()
        self._device = config.device_of(self._model_config, context.rank.local_rank)
        self._catalog = Catalog(config)
        self.replica_id = ReplicaId(context.replica_id.unique_id)
        state_dir = config.cluster.state_dir or default_state_dir()
        setup_telemetry(f"replica-{model_name}", config.telemetry, state_dir)
        self._loop = asyncio.get_running_loop()
        self._node_id = ray.get_runtime_context().get_node_id()
        await select_gpu_of(pool := get_or_create_pool(config, self._device.name, self._node_id))
        part: StagePart | None = None
        self._start_times.end("pool")
        if self._model_config.pipeline_stages > 1:
            threads = thread_counts(config, self._model_config)
            split = await asyncio.to_thread(stage_split, self._model_config, threads, state_dir)
            part = StagePart(split=split, stage=0)
        self._model: LoadedModel = await asyncio.to_thread(
            load_model,
            self._model_config,
            block_tokens=self._device.block_tokens,
            num_threads=self._device.num_threads,
            target=await asyncio.to_thread(device_target, self._device, self._model_config),
            part=part,
            storage=WeightStorage.of_cluster(config.cluster, num_threads=self._device.num_threads),
        )
        self._start_times.end("model")
        check_gate(self._model_config, self._model.geometry, self._model.fingerprint, state_dir)
        own = self._model.kv_identity
        others = await asyncio.to_thread(compatible_identities, config, self._model_config, own)
        check_compatible_gate(self._model_config, own, others, own.geometry.kv_precision, state_dir)
        self._lease = await PoolClient.attach(
            pool,
            replica_id=self.replica_id,
            model_id=ModelId(model_name),
            geometry=self._model.geometry,
            fingerprint=self._model.fingerprint,
            relocates=True,
            reserved_bytes=self._model.reserved_bytes,
            on_lost=self._die,
        )
        self._formats = NamespaceFormats(
            self._model,
            self._model_config,
            self._lease,
            self._catalog.namespaces_of[ModelId(model_name)],
            ask=partial(ask_kv_formats, pool, timeout_s=_PRECISIONS_TIMEOUT_S),
            state_dir=state_dir,
            others=others,
        )
        await self._formats.start()
        self._start_times.end("lease")
        self._gate = StepLock(
            Path(self._lease.binding.step_lock_path),
            weight=config.step_weight_of(self._model_config),
            group=model_name,
        )
        self._hub = FeedHub(
            self.replica_id,
            on_abandoned=lambda request_ids: self._calls.cancel_all(request_ids),
            load=lambda: self._engine.load(),
            card_no=lambda: self._formats.version,
        )
        self._stages = None if part is None else await self._start_stages(part)
        is_split = self._stages is not None
        readers = PoolReaders(config.cluster.name, self._node_id)
        self._engine = Engine(
            self._model,
            self._lease.memory,
            self._lease if self._stages is None else self._stages.pools,
            # A pipeline takes the turns of its stages by itself.
            OpenGate() if is_split else self._gate,
            SystemClock(),
            self._hub.emit,
            find_namespace=self._find_namespace,
            config=EngineConfig(
                max_num_seqs=self._model_config.max_num_seqs,
                max_step_tokens=self._model_config.max_step_tokens,
                prompt_share=self._model_config.prompt_share,
                debug=config.cluster.debug,
            ),
            # One pool has only a part of a pipeline's blocks.
            loader=None if is_split else ThreadedLoader(readers.find),
            own_pool=None
            if is_split
            else KVSource(
                pool_id=self._lease.binding.pool_id, actor_name=pool_actor_name(self._device.name, self._node_id)
            ),
            tails=None if is_split else self._tails(readers),
            on_fenced=self._on_fenced,
            on_stage_lost=None if self._stages is None else self._stages.stage_lost,
        )
        if self._stages is not None:
            self._stages.on_connected = self._engine.use_pipeline
        self._stall = StallWatch()
        self._idle = IdleWatch(self._model_config.idle_timeout_s)
        self._calls = RouterCalls(self._hub, self._engine, self._formats, on_submitted=self._idle.note_busy)
        self._links = RouterLinks(self.replica_id, self._hub, self._calls)
        self._draining = False
        wake_promptly()
        self._engine.start()
        self._start_times.end("engine")
        self._membership = RegistryMember(get_or_create_registry(config.cluster), self._record(), self._report)
        await self._membership.start()
        self._start_times.end("registry")
        logger.info("replica %s of %s is up, %s", self.replica_id, model_name, self._start_times)

    def _tails(self, readers: PoolReaders) -> NodeArenas | None:
        """None on a GPU, whose memory others cannot map by a path."""
        path, is_cpu = self._lease.binding.arena_path, self._lease.binding.kind == "cpu"
        return NodeArenas(self._node_id, path, self._lease.memory.data, readers) if is_cpu else None

    async def _start_stages(self, part: StagePart) -> StageGroup:
        """The workers of the stages behind this one; the model's decoder is then all of them."""
        group = StageGroup(
            self._config,
            self._model_config,
            self._model,
            part.split,
            replica_id=self.replica_id,
            node_id=self._node_id,
            gate=self._gate,
            lease=self._lease,
            on_dead=self._die,
        )
        await group.start()
        # Tokens of several arenas cannot be moved to other positions from here: they are computed anew.
        self._model = dataclasses.replace(self._model, decoder=group.decoder, rope_inv_freq=None)
        return group

    def _find_namespace(self, namespace_id: NamespaceId) -> EngineNamespace:
        own = self._catalog.find_namespace(ModelId(self._model.name), namespace_id)
        found = self._formats.find(own)
        return EngineNamespace(
            root=self._catalog.chain_root(own, found.fingerprint),
            fingerprint=found.fingerprint,
            weight=self._catalog.namespaces[own].weight,
            memory=found.memory,
            siblings=tuple(
                KVSibling(geometry=geometry, fingerprint=other, root=self._catalog.chain_root(own, other))
                for geometry, other in self._formats.siblings(own)
            ),
            takes=found.takes,
        )

    # ---- called by routers -------------------------------------------------------------------------------------------

    async def describe(self, *, target: str) -> bytes:
        """ModelCard."""
        try:
            await self._formats.refresh()
        except Unavailable as error:
            logger.warning("the precisions of namespaces stay as they are known: %s", error)
        return _encoder.encode(
            ModelCard(
                replica_id=self.replica_id,
                model_id=ModelId(self._model.name),
                pool_id=self._lease.binding.pool_id,
                pool_actor_name=pool_actor_name(self._device.name, self._node_id),
                fingerprint=self._model.fingerprint,
                block_tokens=self._model.geometry.block_tokens,
                block_bytes=self._model.geometry.block_bytes,
                max_model_len=self._model.max_model_len,
                vocab_size=self._model.vocab_size,
                max_num_seqs=self._model_config.max_num_seqs,
                decoder=self._model.decoder.name,
                weights=self._model_config.weights,
                weights_bytes=self._model.weights_bytes,
                shares_weights=self._model.shares_weights,
                pid=os.getpid(),
                start_s=self._start_times.seconds,
                namespaces=self._formats.cards(),
                card_no=self._formats.version,
            )
        )

    async def prepare_precision(
        self, namespace_id: str, k_precision: Precision, v_precision: Precision, *, target: str
    ) -> bytes:
        """Makes sure that a namespace could have this precision. Raises ModelError, KernelError, PoolError."""
        own = self._catalog.find_namespace(ModelId(self._model.name), namespace_id)
        await self._formats.prepare(own, (k_precision, v_precision))
        return b""

    async def refresh_namespaces(self, *, target: str) -> bytes:
        """Takes over the precisions that the pool says namespaces have. Raises Unavailable."""
        await self._formats.refresh()
        self._hub.wake_all()
        return b""

    async def quantise_command(self, namespace_id: str, *, target: str) -> bytes:
        """Quantise, for pools: from every precision of the model that this pool knows to that of the namespace."""
        own = self._catalog.find_namespace(ModelId(self._model.name), namespace_id)
        await self._formats.refresh()
        return _encoder.encode(self._formats.quantise_command(own))

    async def submit(self, data: bytes, *, target: str) -> bytes:
        return await self._calls.submit(data)

    async def freeze(self, data: bytes, *, target: str) -> bytes:
        return await self._calls.freeze(data)

    async def resume(self, data: bytes, *, target: str) -> bytes:
        return await self._calls.resume(data)

    async def cancel(self, data: bytes, *, target: str) -> bytes:
        return await self._calls.cancel(data)

    async def keep_alive(self, router_id: str, wanted_traces: str = "", *, target: str) -> bytes:
        return await self._calls.keep_alive(router_id, wanted_traces)

    async def open_links(self, *, target: str) -> bytes:
        """LinkAddress | None: where routers connect before they let the replica `carry_feed`."""
        return _encoder.encode(self._links.open())

    async def carry_feed(self, router_id: str, *, target: str) -> AsyncIterator[bytes]:
        """The router's feed goes over its link for as long as this lasts; see RouterLinks."""
        async with aclosing(self._links.carry(RouterId(router_id))) as carried:
            async for begun in carried:
                yield begun

    async def feed(self, router_id: str, *, target: str) -> AsyncIterator[bytes]:
        """FeedMessages for the router, one a step at most; see FeedHub."""
        async for message in self._hub.messages(RouterId(router_id)):
            yield _encoder.encode(message)

    async def drain(self, draining: bool, *, target: str) -> bytes:
        """From now on takes nothing new, and routers move away what it has; False takes that back."""
        self._draining = draining
        self._membership.report_now()
        return b""

    async def stats(self, *, target: str) -> bytes:
        """EngineStats, and `pipeline`: StageStatus of each stage of a model that is split."""
        stages = () if self._stages is None else self._stages.describe()
        return _encoder.encode({**msgspec.to_builtins(self._engine.stats()), "pipeline": stages})

    # ---- called by Serve ---------------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raises Unavailable when the lease is lost or the engine does not get on, KernelError when the decoder cannot;
        Serve then replaces the replica."""
        stats = self._engine.stats()
        if stats.is_fenced or not self._lease.may_emit():
            raise Unavailable("the lease is lost")
        self._stall.check(stats)
        # What cannot compute any more, a GPU after a fault, serves nobody.
        check_decoder_health(self._model.decoder)

    async def __del__(self) -> None:
        """Serve's orderly end: stops the engine, gives the lease back, leaves the directory."""
        await self._membership.stop()
        await asyncio.to_thread(self._engine.stop)
        self._hub.close_all()
        self._links.close()
        if self._stages is not None:
            await self._stages.stop()
        await self._lease.detach()
        self._gate.close()
        flush_telemetry(1.0)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _on_fenced(self, reason: str) -> None:
        """Called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._die, reason)

    def _die(self, reason: str) -> Never:
        """Nothing may be computed or said any more: the process ends now, not in order."""
        logger.critical("replica %s ends: %s", self.replica_id, reason)
        logging.shutdown()
        os._exit(EXIT_LEASE_LOST)

    def _record(self) -> ReplicaRecord:
        return ReplicaRecord(
            replica_id=self.replica_id,
            model_id=ModelId(self._model.name),
            namespace_ids=self._catalog.namespaces_of[ModelId(self._model.name)],
            node_id=self._node_id,
            pool_id=self._lease.binding.pool_id,
            pool_actor_name=pool_actor_name(self._device.name, self._node_id),
            process=process_identity(),
            endpoint=self.replica_id,
            fingerprint=self._model.fingerprint,
            geometry=self._model.geometry,
            max_model_len=self._model.max_model_len,
            decoder=self._model.decoder.name,
            app_name=serve.get_replica_context().app_name,
        )

    def _report(self) -> tuple[ReplicaStatus, ReplicaLoad]:
        stats: EngineStats = self._engine.stats()
        if stats.num_running or stats.num_waiting:
            self._idle.note_busy()
        load = ReplicaLoad(
            num_running=stats.num_running, num_waiting=stats.num_waiting, wants_sleep=self._idle.is_over()
        )
        return "draining" if self._draining else "ready", load
