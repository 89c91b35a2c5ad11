"""The gate of a precision: what it may cost, what it was measured to cost, and whether a model may be served in it.

A verdict is a file in the state directory, named by the model's fingerprint, which covers the weights' files, their
precision and that of KV; behind it, for KV of another model, stands that one's. `remora accuracy` writes it; replicas
read it when they start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import msgspec

from remora.deployments.accuracy.measure import Accuracy
from remora.deployments.models.kv_identity import KVIdentity
from remora.namespaces.geometry import QUANTISED, KVGeometry, KVPrecision
from remora.platform.base.errors import ModelError
from remora.platform.base.model_config import ModelConfig

_log = logging.getLogger(__name__)

#: Relative change of perplexity that a precision may cost; those of floats are of no consequence.
_KV_BARS = {"fp32": 0.0, "bf16": 0.0, "int8": 0.005, "int5": 0.03, "int4": 0.03}
_WEIGHT_BARS = {"fp32": 0.0, "bf16": 0.0, "int8": 0.01, "int4": 0.03}
_SMALLEST_BAR = 0.001
#: What KV of another model may cost: as much as weights of eight bits.
_ADOPTED_BAR = 0.01
#: Of products with quantised weights or KV; changes when they come to round otherwise.
ARITHMETIC: Final = 5


class Bars(msgspec.Struct, frozen=True, kw_only=True):
    """What a model must keep to against its reference."""

    max_perplexity_change: float
    #: Of next tokens; 0 where only perplexity counts.
    min_top1_agreement: float = 0.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of one model, as it is kept."""

    model: str
    weights: str
    k_precision: str
    v_precision: str
    #: What was compared with, in words.
    reference: str
    #: Which text (measure.text_id).
    text: str
    num_tokens: int
    reference_perplexity: float
    perplexity: float
    kl_divergence: float
    top1_agreement: float
    bars: Bars
    has_passed: bool
    #: Decoder that was measured; results differ in the last bits between processors.
    decoder: str
    #: Verdicts on another ARITHMETIC, or from before it had a number, say nothing of this one: they cannot be read.
    arithmetic: Literal[5]
    #: The model whose KV it went on behind; "": its own.
    kv_of: str = ""


def bars_of(weights: str, k_precision: str, v_precision: str) -> Bars:
    """The bars of weights and KV together; K and V have that of the coarser one."""
    return Bars(
        max_perplexity_change=max(
            _WEIGHT_BARS[weights] + max(_KV_BARS[k_precision], _KV_BARS[v_precision]), _SMALLEST_BAR
        ),
        min_top1_agreement=0.98 if weights == "int8" and {k_precision, v_precision} <= {"fp32", "bf16"} else 0.0,
    )


def adopted_bars() -> Bars:
    """The bars of going on behind KV of another model, against its own KV."""
    return Bars(max_perplexity_change=_ADOPTED_BAR)


def has_passed(accuracy: Accuracy, bars: Bars) -> bool:
    """NaN passes no gate."""
    return (
        accuracy.perplexity_change <= bars.max_perplexity_change and accuracy.top1_agreement >= bars.min_top1_agreement
    )


class VerdictStore:
    """Verdicts below a state directory, a file each, replaced whole."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / "accuracy"

    def path(self, fingerprint: bytes) -> Path:
        """Of a model, or of a model behind KV of another: both fingerprints, its own first."""
        return self._folder / f"{fingerprint.hex()}.json"

    def save(self, fingerprint: bytes, verdict: Verdict) -> Path:
        """Writes the verdict, replacing an earlier one. Raises ModelError when the directory cannot be written."""
        path = self.path(fingerprint)
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(verdict), indent=2))
            partial.replace(path)
        except OSError as error:
            raise ModelError(f"{path}: the verdict cannot be written: {error.strerror}") from None
        return path

    def load(self, fingerprint: bytes) -> Verdict | None:
        """None when nothing was measured, or by a version that wrote something else."""
        try:
            return msgspec.json.decode(self.path(fingerprint).read_bytes(), type=Verdict)
        except (OSError, msgspec.DecodeError):
            return None


def check_gate(
    model: ModelConfig, geometry: KVGeometry, fingerprint: bytes, state_dir: Path, *, namespace: str = ""
) -> None:
    """Raises ModelError for a model, or a namespace of it, whose precision was measured and failed, unless the model's
    `force_precision` is set.

    Integers that were never measured are served, with a line in the log that says how to measure them.
    """
    group = geometry.groups[0]
    words = f"weights {model.weights}, K {group.k_precision}, V {group.v_precision}"
    whose = f"namespaces.{namespace} (model {model.name})" if namespace else f"models.{model.name}"
    verdict = VerdictStore(state_dir).load(fingerprint)
    if verdict is None:
        if {model.weights, group.k_precision, group.v_precision} & QUANTISED:
            _log.warning(
                "model %s: the accuracy of %s was never measured here; run `remora accuracy`", model.name, words
            )
        return
    _judge(
        verdict,
        f"{whose}: {words}",
        is_forced=model.force_precision,
        way_out="Choose another precision, or set force_precision: true for model "
        f"{model.name} to serve it all the same",
    )


def check_compatible_gate(
    model: ModelConfig, own: KVIdentity, others: Iterable[KVIdentity], kv_precision: KVPrecision, state_dir: Path
) -> None:
    """Raises ModelError for a model that goes on badly behind KV of one of the others in this precision, as was
    measured, unless its `force_compatible` is set.

    What was never measured is used, with a line in the log that says how to measure it.
    """
    for other in others:
        verdict = VerdictStore(state_dir).load(own.fingerprint(kv_precision) + other.fingerprint(kv_precision))
        if verdict is None:
            _log.warning(
                "model %s: what KV of %s costs it was never measured here; run `remora accuracy -m %s --kv-of %s`",
                model.name, other.model, model.name, other.model,
            )  # fmt: skip
            continue
        _judge(
            verdict,
            f"models.{model.name}.compatible_with: KV of {other.model!r}",
            is_forced=model.force_compatible,
            way_out=f"Leave it out, or set force_compatible: true for model {model.name} to use it all the same",
        )


def _judge(verdict: Verdict, what: str, *, is_forced: bool, way_out: str) -> None:
    """Raises ModelError for one that has failed."""
    if verdict.has_passed:
        return
    change = verdict.perplexity / verdict.reference_perplexity - 1
    message = (
        f"{what} failed its accuracy gate: perplexity {change:+.2%} (at most "
        f"{verdict.bars.max_perplexity_change:+.2%}), top-1 agreement {verdict.top1_agreement:.1%}, against "
        f"{verdict.reference}"
    )
    if not is_forced:
        raise ModelError(f"{message}. {way_out}.")
    _log.warning("%s; it is used because that is forced", message)
