"""The choice of a paged attention: stand-ins for the libraries, our own kernels emulated."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

from remora.kernels.attention_backends import AttentionNeed, choose_attention
from remora.kernels.cuda.host.emulator import HostDevice
from remora.kernels.layout import BlockLayout
from remora.namespaces.geometry import KVGeometry, LayerGroup, Precision
from remora.platform.base.errors import KernelError


def need(
    *, precision: Precision = "bf16", block_tokens: int = 16, batch_invariant: bool = False, head_dim: int = 64
) -> AttentionNeed:
    group = LayerGroup(num_layers=2, num_kv_heads=2, head_dim=head_dim, k_precision=precision, v_precision=precision)
    layout = BlockLayout(KVGeometry(groups=(group,), block_tokens=block_tokens))
    return AttentionNeed(layout=layout, num_heads=6, scale=0.125, batch_invariant=batch_invariant)


def attend_pages(
    *, q: Any, k: Any, v: Any, cu_seqlens_q: Any, seqused_k: Any, block_table: Any, softmax_scale: float, **others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over pages [N, B, H, D] as the libraries define it, written independently of the reference."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for s, length in enumerate(seqused_k.tolist()):
        first, end = cu_seqlens_q[s].item(), cu_seqlens_q[s + 1].item()
        keys, values = (
            pages[block_table[s].long()].flatten(0, 1)[:length].float().repeat_interleave(q.shape[1] // k.shape[2], 1)
            for pages in (k, v)
        )
        scores = torch.einsum("tqd,cqd->qtc", q[first:end].float(), keys) * softmax_scale
        rows = torch.arange(end - first)[:, None] + (length - end + first)
        scores = scores.masked_fill(torch.arange(length)[None, :] > rows, float("-inf"))
        out[first:end] = torch.einsum("qtc,cqd->tqd", scores.softmax(-1), values).to(q.dtype)
        lse[:, first:end] = scores.logsumexp(-1)
    return out, lse


def install(monkeypatch: pytest.MonkeyPatch, name: str, function: Any) -> None:
    module = types.ModuleType(name)
    module.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    if "." in name:
        monkeypatch.setitem(sys.modules, name.partition(".")[0], types.ModuleType(name.partition(".")[0]))
    monkeypatch.setitem(sys.modules, name, module)


def flash_attn_varlen_func(
    *,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    seqused_k: Any,
    block_table: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert causal
    assert return_softmax_lse
    assert max_seqlen_q == (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max()
    assert max_seqlen_k == seqused_k.max()
    return attend_pages(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        block_table=block_table,
        softmax_scale=softmax_scale,
    )


@pytest.mark.parametrize("name", ["vllm_flash_attn", "vllm.vllm_flash_attn"])
def test_a_library_that_works_is_taken(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    install(monkeypatch, name, flash_attn_varlen_func)
    with caplog.at_level(logging.INFO):
        backend = choose_attention(need(), device, torch_device="cpu")
    assert backend.name == name
    assert not backend.batch_invariant
    assert f"paged attention runs on {name}" in caplog.text


def test_without_libraries_our_kernels_run_and_the_log_says_why(
    device: HostDevice, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        backend = choose_attention(need(), device, torch_device="cpu")
    assert backend.name == "remora.cuda"
    assert backend.batch_invariant
    [record] = [record for record in caplog.records if record.name == "remora.kernels.attention_backends"]
    assert "No module named 'vllm_flash_attn'" in record.getMessage()
    assert "torch_varlen: " in record.getMessage()


def test_a_library_whose_results_are_wrong_is_passed_over(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return attend_pages(**arguments | {"softmax_scale": 0.5})

    def with_signature(
        *, q: Any, seqused_k: Any, return_softmax_lse: bool, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return wrong(q=q, seqused_k=seqused_k, **others)

    install(monkeypatch, "vllm_flash_attn", with_signature)
    with caplog.at_level(logging.INFO):
        assert choose_attention(need(), device, torch_device="cpu").name == "remora.cuda"
    assert "off the reference" in caplog.text


def test_a_library_that_refuses_is_passed_over_with_its_words(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*, seqused_k: Any, return_softmax_lse: bool, **others: Any) -> None:
        raise RuntimeError("page size must be 256")

    install(monkeypatch, "vllm_flash_attn", refuses)
    with caplog.at_level(logging.INFO):
        assert choose_attention(need(), device, torch_device="cpu").name == "remora.cuda"
    assert "page size must be 256" in caplog.text


@pytest.mark.parametrize(
    "wanted",
    [need(batch_invariant=True), need(precision="fp32"), need(precision="int8"), need(precision="int4", head_dim=80)],
    ids=["batch invariant", "fp32", "int8", "int4"],
)
def test_what_a_library_does_not_promise_is_left_to_our_kernels(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, wanted: AttentionNeed
) -> None:
    install(monkeypatch, "vllm_flash_attn", flash_attn_varlen_func)
    assert choose_attention(wanted, device, torch_device="cpu").name == "remora.cuda"


def test_a_shape_that_nothing_serves_is_refused_with_every_reason(device: HostDevice) -> None:
    with pytest.raises(KernelError, match=r"vllm_flash_attn: .*torch_varlen: .*cuda: head_dim 144"):
        choose_attention(need(head_dim=144), device, torch_device="cpu")
    with pytest.raises(KernelError, match="no attention back-end 'flash'"):
        choose_attention(need(), device, torch_device="cpu", prefer="flash")
    with pytest.raises(KernelError, match="vllm_flash_attn"):
        choose_attention(need(), device, torch_device="cpu", prefer="vllm_flash_attn")


def test_importing_the_registry_imports_no_library() -> None:
    code = (
        "import sys, remora.kernels.attention_backends, remora.kernels.cuda.module\n"
        "taken = {'cupy', 'cupy_backends', 'vllm', 'vllm_flash_attn', 'torch.nn.attention.varlen'} & set(sys.modules)\n"
        "sys.exit(str(taken) if taken else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
