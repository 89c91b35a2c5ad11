"""What `remora bench peers` measures: rows of one table, each with the bars that Remora is held against."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from remora.platform.cli.calibration import Calibration

Kind = Literal["decode", "whole", "shared"]
Peer = Literal["vllm", "llama", "faster"]

#: Bytes of a weight, scales and minimums included.
_WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0 + 2 / 32, "int4": 0.5 + 4 / 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerModel:
    """A model in the forms that the engines read, and its size."""

    name: str
    #: Of all linear layers but the head, and of the head.
    layer_weights: int
    head_weights: int


SMOLLM2 = PeerModel(name="smollm2", layer_weights=106_168_320, head_weights=28_311_552)
RANDOM_1B = PeerModel(name="random-1b", layer_weights=973_078_528, head_weights=100_663_296)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What an engine is to do. `decode`: the time from the first token on counts; `whole`: all of it; `shared`: prompts
    have `prompt_tokens` in common and `own_tokens` each; with one token of output the common part is cached before."""

    kind: Kind
    prompt_tokens: int
    output_tokens: int
    num_sequences: int = 1
    own_tokens: int = 0

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    @property
    def is_next_turn(self) -> bool:
        return self.kind == "shared" and self.output_tokens == 1

    def floor_s(self, model: PeerModel, precision: str, rates: Calibration) -> float:
        """Least time for the linear layers: weights read once a step, two operations a weight and token. Attention and
        reading KV come on top."""
        weight_bytes = _WEIGHT_BYTES[precision]
        steps = self.output_tokens - 1
        step_weights = model.layer_weights + model.head_weights
        step_s = rates.floor_s(step_weights * weight_bytes, 2 * step_weights * self.num_sequences)
        if self.kind == "decode":
            return steps * step_s
        own = self.own_tokens if self.kind == "shared" else self.prompt_tokens
        tokens = own * self.num_sequences
        if self.kind == "shared" and not self.is_next_turn:
            tokens += self.prompt_tokens
        prompt_flops = 2 * (model.layer_weights * tokens + model.head_weights * self.num_sequences)
        return rates.floor_s(step_weights * weight_bytes, prompt_flops) + steps * step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Remora with weights of this precision is to be so many times as fast as a peer; `best`: its fastest precision."""

    precision: str
    peer: Peer
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. Without a case it is streaming over HTTP with so many clients."""

    name: str
    title: str
    model: PeerModel = SMOLLM2
    case: Case | None = None
    num_clients: int = 0
    #: Tokens whose number a second is shown; 0: seconds are.
    num_tokens: int = 0
    bars: tuple[Bar, ...]


HTTP_PROMPT_TOKENS, HTTP_OUTPUT_TOKENS = 128, 64


def _http(num_clients: int, factor: float) -> Row:
    return Row(
        name=f"http-{num_clients}",
        title=f"HTTP streaming, {HTTP_PROMPT_TOKENS} prompt, {HTTP_OUTPUT_TOKENS} generated, {num_clients} clients",
        num_clients=num_clients,
        num_tokens=1,
        bars=(Bar(precision="best", peer="faster", factor=factor),),
    )


ROWS = (
    Row(
        name="decode",
        title="decode, one stream",
        case=Case(kind="decode", prompt_tokens=16, output_tokens=129),
        num_tokens=128,
        bars=(Bar(precision="best", peer="llama", factor=2.5), Bar(precision="bf16", peer="vllm", factor=2.2)),
    ),
    Row(
        name="prefill",
        title="prefill of 512",
        case=Case(kind="whole", prompt_tokens=512, output_tokens=1),
        bars=(Bar(precision="best", peer="faster", factor=1.6),),
    ),
    Row(
        name="batch-16",
        title="16 sequences, 256 prompt, 128 generated",
        case=Case(kind="whole", prompt_tokens=256, output_tokens=128, num_sequences=16),
        num_tokens=16 * 128,
        bars=(Bar(precision="bf16", peer="faster", factor=2.3), Bar(precision="int8", peer="faster", factor=3.5)),
    ),
    Row(
        name="shared-16",
        title="16 sequences, 1,024 common + 32 own, 64 generated",
        case=Case(kind="shared", prompt_tokens=1024, own_tokens=32, output_tokens=64, num_sequences=16),
        bars=(Bar(precision="bf16", peer="faster", factor=2.5), Bar(precision="int8", peer="faster", factor=3.5)),
    ),
    Row(
        name="next-turn",
        title="next turn of 32 on 2,048 cached, first token",
        case=Case(kind="shared", prompt_tokens=2048, own_tokens=32, output_tokens=1),
        bars=(Bar(precision="bf16", peer="faster", factor=2.5), Bar(precision="int8", peer="faster", factor=4.0)),
    ),
    _http(1, 2.0),
    _http(8, 2.5),
    _http(32, 2.5),
    Row(
        name="1b-decode",
        title="1.17B random weights, one stream",
        model=RANDOM_1B,
        case=Case(kind="decode", prompt_tokens=16, output_tokens=33),
        num_tokens=32,
        bars=(Bar(precision="int4", peer="faster", factor=1.5),),
    ),
    Row(
        name="1b-batch-16",
        title="1.17B, 16 sequences, 256 prompt, 128 generated",
        model=RANDOM_1B,
        case=Case(kind="whole", prompt_tokens=256, output_tokens=128, num_sequences=16),
        num_tokens=16 * 128,
        bars=(Bar(precision="best", peer="vllm", factor=2.5),),
    ),
    Row(
        name="1b-prefill",
        title="1.17B, prefill of 512",
        model=RANDOM_1B,
        case=Case(kind="whole", prompt_tokens=512, output_tokens=1),
        bars=(Bar(precision="best", peer="faster", factor=1.5),),
    ),
)
