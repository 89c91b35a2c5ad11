"""From a model's configuration to a decoder and a tokenizer that are ready to serve."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from remora.cache_actors.memory_budget import MiB
from remora.deployments.models.folder_tokenizer import folder_chat_tokenizer
from remora.deployments.models.gguf_file import GGUFFile
from remora.deployments.models.gguf_tokenizer import gguf_chat_tokenizer
from remora.deployments.models.kv_identity import KVIdentity
from remora.deployments.models.load_target import LoadTarget, host_target
from remora.deployments.models.loaded_model import LoadedModel
from remora.deployments.models.model_spec import ModelSpec, served_context_len
from remora.deployments.models.source import resolve_source
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.kernels.base import Decoder, DecoderShape, Weights
from remora.kernels.registry import has_native_kernels
from remora.kernels.stages import StagePart, StageWeights
from remora.namespaces.geometry import KVGeometry, LayerGroup, Precision
from remora.namespaces.hashing import kv_fingerprint
from remora.platform.base.errors import ModelError
from remora.platform.base.model_config import ModelConfig

if TYPE_CHECKING:
    from remora.deployments.models.canonical_weights import TensorSource
    from remora.deployments.models.weight_storage import WeightStorage

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]


def load_tokenizer(model: ModelConfig) -> ChatTokenizer:
    """The model's tokenizer and chat template, without its weights and without torch.

    Raises ModelError naming the source or the file.
    """
    files = resolve_source(model, with_weights=False)
    if files.kind == "gguf":
        return gguf_chat_tokenizer(GGUFFile(files.path))
    return folder_chat_tokenizer(files.path, trust_remote_code=model.trust_remote_code)


def read_kv_identity(
    model: ModelConfig, *, block_tokens: int, num_threads: int | None = None, progress: Progress | None = None
) -> KVIdentity:
    """What load_model would say of the model's KV, from its files, whose contents are hashed.

    Raises ModelError as load_model does, and for a model that runs through transformers.
    """
    return _Loader(
        model=model,
        block_tokens=block_tokens,
        num_threads=num_threads or len(os.sched_getaffinity(0)),
        say=progress or (lambda line: logger.info("model %s: %s", model.name, line)),
    ).identity()


def read_shape(model: ModelConfig) -> DecoderShape:
    """The shape of a model that is to be split, without its weights.

    Raises ModelError as load_model does, and for a model that runs through transformers.
    """
    loader = _Loader(model=model, block_tokens=32, num_threads=1, say=logger.debug)
    return loader.splittable().spec.shape


def load_model(
    model: ModelConfig,
    *,
    block_tokens: int,
    num_threads: int | None = None,
    progress: Progress | None = None,
    target: LoadTarget | None = None,
    part: StagePart | None = None,
    storage: WeightStorage | None = None,
) -> LoadedModel:
    """Reads, checks and packs a model; needs little more memory than the packed weights.

    `num_threads`: default: the cores of this process; `progress` is told a line now and then (default: the log);
    `target`: default the memory and the cores of this process; `part`: a stage of the model, with the weights and the
    KV geometry of its layers only (default: the whole model); `storage`: where packed weights of the native decoder are
    shared and kept (default: nowhere). Raises ModelError for what cannot be served right, and for a model larger than
    the memory that is available, before any weight is packed.
    """
    say: Progress = progress or (lambda line: logger.info("model %s: %s", model.name, line))
    loader = _Loader(
        model=model,
        block_tokens=block_tokens,
        num_threads=num_threads or len(os.sched_getaffinity(0)),
        say=say,
        target=target,
        part=part if part is not None and not part.is_whole else None,
        storage=storage,
    )
    return loader.load()


def _weights_id(content: bytes, maths: str) -> str:
    """Contents of the files, and everything beside them that decides what the model computes."""
    return hashlib.blake2b(content + maths.encode(), digest_size=16).hexdigest()


class _Native(NamedTuple):
    """What the own decoder runs, before any weight is read."""

    spec: ModelSpec
    open_source: Callable[[], TensorSource]
    files: list[Path]
    tokenizer: ChatTokenizer


class _Foreign(NamedTuple):
    """What transformers runs."""

    folder: Path
    config: Any
    context_len: int
    tokenizer: ChatTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loader:
    """One call of load_model. torch and transformers are imported where a path needs them: routers load neither."""

    model: ModelConfig
    block_tokens: int
    num_threads: int
    say: Progress
    target: LoadTarget | None = None
    part: StagePart | None = None
    storage: WeightStorage | None = None

    def load(self) -> LoadedModel:
        if self.part is not None:
            return self._own(self.splittable())
        found = self._found()
        return self._own(found) if isinstance(found, _Native) else self._transformers(found)

    def splittable(self) -> _Native:
        return self._native("it cannot be split into stages; leave pipeline_stages out")

    def identity(self) -> KVIdentity:
        native = self._native("no other model can use its KV")
        return KVIdentity(
            model=self.model.name,
            geometry=self._geometry(native.spec),
            weights_id=self._native_weights_id(native),
            tokenizer_id=native.tokenizer.tokenizer_id,
        )

    def _native(self, consequence: str) -> _Native:
        """Raises ModelError, with what follows, for a model that runs through transformers."""
        found = self._found()
        if not isinstance(found, _Native):
            raise ModelError(f"model {self.model.name!r} runs through transformers; {consequence}.")
        return found

    def _found(self) -> _Native | _Foreign:
        files = resolve_source(self.model)
        return self._gguf(files.path) if files.kind == "gguf" else self._folder(files.path)

    def _gguf(self, path: Path) -> _Native:
        from remora.deployments.models.gguf_config import gguf_spec

        model, file = self.model, GGUFFile(path)
        if model.backend == "transformers":
            raise ModelError(
                f"models.{model.name}.backend: transformers serves Hugging Face folders, not GGUF files; use auto."
            )
        self.say(f"reading {path.name} ({file.size_bytes // MiB} MiB, GGUF {file.architecture})")
        spec = gguf_spec(model.name, file, weights=model.weights, max_model_len=model.max_model_len)

        def open_source() -> TensorSource:
            from remora.deployments.models.gguf_weights import GGUFSource

            return GGUFSource(file)

        return _Native(spec, open_source, [path], gguf_chat_tokenizer(file))

    def _folder(self, folder: Path) -> _Native | _Foreign:
        from remora.deployments.models.hf_config import decoder_spec, read_config, runs_natively
        from remora.deployments.models.refusals import check_servable
        from remora.deployments.models.weight_files import weight_files

        model = self.model
        config = read_config(folder, trust_remote_code=model.trust_remote_code)
        model_len = int(getattr(config, "max_position_embeddings", None) or model.max_model_len or 0)
        if model_len < 1:
            raise ModelError(f"model {model.name!r}: its config names no context length; set max_model_len.")
        context_len = served_context_len(model_len, model.max_model_len)
        check_servable(model.name, config, context_len)
        self.say(f"reading {folder} ({config.model_type})")
        tokenizer = folder_chat_tokenizer(folder, trust_remote_code=model.trust_remote_code)
        if model.backend == "transformers" or (model.backend == "auto" and not runs_natively(config)):
            return _Foreign(folder, config, context_len, tokenizer)
        spec = decoder_spec(model.name, config, weights=model.weights, max_model_len=context_len)

        def open_source() -> TensorSource:
            from remora.deployments.models.safetensors_weights import SafetensorsSource

            return SafetensorsSource(folder)

        return _Native(spec, open_source, weight_files(folder), tokenizer)

    def _geometry(self, spec: ModelSpec) -> KVGeometry:
        return spec.geometry(block_tokens=self.block_tokens, kv_precisions=self.model.kv_precisions)

    def _native_weights_id(self, native: _Native) -> str:
        # Rope is in the geometry, as text: its frequencies may differ in the last bit between processors.
        maths = json.dumps(dataclasses.asdict(native.spec.shape), sort_keys=True)
        return _weights_id(self._hash(native.files), maths if self.part is None else maths + str(self.part))

    def _own(self, native: _Native) -> LoadedModel:
        target = self.target or host_target()
        shape, geometry = self._part_shape(native.spec)
        decoder: Decoder
        if self.storage is not None and target.kind == "cpu" and has_native_kernels():
            weights_id = self._native_weights_id(native)
            decoder, origin, is_shared, num_bytes = self.storage.make_decoder(
                weights_id,
                shape,
                geometry,
                self.num_threads,
                read=lambda: self._read(native, shape, target)[0],
                check_room=lambda num_bytes: target.check_memory(self.model.name, num_bytes),
            )
            whose = "that replicas of this node share" if is_shared else "of its own"
            self.say(f"{num_bytes // MiB} MiB of {self.model.weights} weights, {origin}, in memory {whose}")
        else:
            weights, num_bytes = self._read(native, shape, target)
            weights_id, is_shared = self._native_weights_id(native), False
            decoder = target.make_decoder(shape, weights, geometry, num_threads=self.num_threads)
        return self._loaded(
            decoder=decoder,
            shape=shape,
            geometry=geometry,
            weights_id=weights_id,
            tokenizer=native.tokenizer,
            max_model_len=native.spec.max_model_len,
            vocab_size=native.spec.shape.vocab_size,
            weights_bytes=num_bytes,
            workspace_bytes=target.workspace_bytes(shape),
            shares_weights=is_shared,
            rope_inv_freq=np.asarray(native.spec.rope_inv_freq, np.float64).astype(np.float32),
        )

    def _part_shape(self, spec: ModelSpec) -> tuple[DecoderShape, KVGeometry]:
        """Of what is to be loaded."""
        geometry = self._geometry(spec)
        if self.part is None:
            return spec.shape, geometry
        try:
            shape = self.part.shape_of(spec.shape)
        except ValueError as error:
            raise ModelError(f"model {self.model.name!r}: stage_layers: {error}.") from None
        self.say(f"{self.part}, {shape.num_layers} layers")
        return shape, self.part.geometry_of(geometry)

    def _read(self, native: _Native, shape: DecoderShape, target: LoadTarget) -> tuple[Weights, int]:
        """The weights, read from the files when they are asked for, and how many bytes they will take."""
        from remora.deployments.models.canonical_weights import CanonicalWeights

        canonical = CanonicalWeights(native.spec, native.open_source(), self.say)
        weights: Weights = canonical
        num_bytes = canonical.num_bytes()
        if self.part is not None:
            weights = of_stage = StageWeights(canonical, self.part)
            num_bytes = canonical.num_bytes(map(of_stage.source_of, of_stage))
        if target.kind != "cpu":
            # A tied head is the embedding itself.
            num_bytes = min(num_bytes, canonical.num_bytes(canonical))
        target.check_memory(self.model.name, num_bytes, target.workspace_bytes(shape))
        self.say(f"packing {num_bytes // MiB} MiB of {self.model.weights} weights")
        if canonical.num_exact():
            self.say(f"{canonical.num_exact()} matrices are taken over from the file exactly")
        return weights, num_bytes

    def _transformers(self, foreign: _Foreign) -> LoadedModel:
        from remora.deployments.models.hf_config import rope_text
        from remora.deployments.models.transformers_decoder import TransformersDecoder
        from remora.deployments.models.transformers_load import load_transformers, transformers_bytes
        from remora.deployments.models.transformers_probe import check_paged_logits
        from remora.deployments.models.weight_files import weight_files

        model, (folder, config, context_len, tokenizer) = self.model, foreign
        target = self.target or host_target()
        if target.kind != "cpu":
            raise ModelError(
                f"model {model.name!r} runs through transformers, which is served on devices of kind cpu only; choose "
                "one of those, or a model of the Llama family."
            )
        needed_bytes = transformers_bytes(folder, model)
        target.check_memory(model.name, needed_bytes)
        kind = str(config.model_type)
        logger.warning("model %s (%s) runs through transformers: slower than the own decoder", model.name, kind)
        self.say(f"loading {needed_bytes // MiB} MiB of {model.weights} weights through transformers (slower)")
        loaded, call = load_transformers(folder, model, config, context_len)

        def geometry_of(k: Precision, v: Precision) -> KVGeometry:
            group = LayerGroup(
                num_layers=config.num_hidden_layers,
                num_kv_heads=call.num_kv_heads,
                head_dim=call.head_dim,
                k_precision=k,
                v_precision=v,
            )
            return KVGeometry(groups=(group,), block_tokens=self.block_tokens, rope=f"{kind} {rope_text(config)}")

        check_paged_logits(model.name, loaded, geometry_of("fp32", "fp32"), num_threads=self.num_threads)
        geometry = geometry_of(*model.kv_precisions)
        maths = json.dumps(["transformers", model.weights, config.to_dict()], sort_keys=True, default=str)
        return self._loaded(
            decoder=TransformersDecoder(loaded, geometry, self.num_threads),
            shape=None,
            geometry=geometry,
            weights_id=_weights_id(self._hash(weight_files(folder)), maths),
            tokenizer=tokenizer,
            max_model_len=context_len,
            vocab_size=int(loaded.get_output_embeddings().weight.shape[0]),
            weights_bytes=needed_bytes,
        )

    def _hash(self, files: list[Path]) -> bytes:
        from remora.deployments.models.weights_id import files_hash

        self.say(f"checking {sum(path.stat().st_size for path in files) // MiB} MiB of weight files")
        return files_hash(files, num_threads=self.num_threads)

    def _loaded(
        self,
        *,
        decoder: Decoder,
        shape: DecoderShape | None,
        geometry: KVGeometry,
        weights_id: str,
        tokenizer: ChatTokenizer,
        max_model_len: int,
        vocab_size: int,
        weights_bytes: int,
        workspace_bytes: int = 0,
        shares_weights: bool = False,
        rope_inv_freq: NDArray[np.float32] | None = None,
    ) -> LoadedModel:
        self.say(f"ready: {decoder.name}, context {max_model_len}, {geometry.block_bytes} bytes of KV a block")
        return LoadedModel(
            name=self.model.name,
            shape=shape,
            geometry=geometry,
            fingerprint=kv_fingerprint(geometry, weights_id, tokenizer.tokenizer_id),
            weights_id=weights_id,
            decoder=decoder,
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            eos_token_ids=tokenizer.eos_token_ids,
            vocab_size=vocab_size,
            weights_bytes=weights_bytes,
            workspace_bytes=workspace_bytes,
            shares_weights=shares_weights,
            rope_inv_freq=rope_inv_freq,
        )
