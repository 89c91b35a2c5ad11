"""What a client asked for, as attributes of the request's span."""

from __future__ import annotations

from remora.platform.base import telemetry_names as names
from remora.platform.base.telemetry import AttributeValue
from remora.platform.http.generation_fields import GenerationFields


def request_attributes(operation: str, fields: GenerationFields) -> dict[str, AttributeValue]:
    """By OpenTelemetry's GenAI conventions; nothing that the client wrote as text, and no defaults."""
    given: dict[str, AttributeValue | None] = {
        names.GEN_AI_REQUEST_TEMPERATURE: fields.temperature,
        names.GEN_AI_REQUEST_TOP_P: fields.top_p,
        names.GEN_AI_REQUEST_TOP_K: fields.top_k,
        names.GEN_AI_REQUEST_SEED: fields.seed,
    }
    return {
        names.GEN_AI_OPERATION_NAME: operation,
        names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
        names.GEN_AI_REQUEST_STREAM: bool(fields.stream),
        names.GEN_AI_REQUEST_CHOICE_COUNT: fields.n or 1,
        **{name: value for name, value in given.items() if value is not None},
    }
