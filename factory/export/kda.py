"""The export of KDA prefill."""

from __future__ import annotations

from typing import Any

from factory.export.delta_rule import SHARED, DeltaRuleExporter, with_offsets
from operations import Workload
from operations.kda_prefill import KdaWorkload

__all__ = ["EXPORTER", "KdaExporter"]

_PACKAGE = "candidates.kda_prefill.kernel"


class KdaExporter(DeltaRuleExporter):
    """A gate for each key channel; as many value heads as key heads are tuned."""

    operation = "kda_prefill"
    package = _PACKAGE
    packages = {_PACKAGE: "kernel", SHARED: "delta_rule"}  # noqa: RUF012
    templates = (
        ("factory.export", "templates/kda_prefill"),
        ("factory.export", "templates/delta_rule"),
    )
    words = {  # noqa: RUF012
        "any_prefill": operation,
        "any_title": "KDA prefill",
        "any_method": "Kimi Delta Attention",
        # Kernels, and how their entry point is called.
        "any_kernel_sections": '".text.kda_"',
        "any_fused_field": "frame",
        "any_kernels_launched": '"kda_"',
        "any_shape_arguments": "q, cu_seqlens",
        "any_of_dataclasses": "dataclass",
        "any_forms": "gate, lower_bound, A_log, dt_bias, beta_logits, l2norm",
        "any_documented_forms": "gate, lower_bound, A_log, dt_bias, \\\nbeta_logits, l2norm",
        "any_listed_forms": "gate, lower_bound, A_log, dt_bias,\n    beta_logits, l2norm",
        "any_default_forms": '"log", None, None, None, False, False',
        "any_bounded": "gate, lower_bound",
        # Tests: heads and the shape of the gate.
        "any_key_heads": "heads",
        "any_values": "H",
        "any_gate_shape": "T, heads, 128",
        "any_gate_axes": "T, H, 128",
        "any_gate_of_q": "q.float()",
        "any_decay_axes": ":, None, :",
        "any_bias_shape": "2, 128",
        "any_activated_gate": "-4.0 * torch.sigmoid(shifted)",
        # flash-linear-attention.
        "any_chunk": "chunk_kda",
        "any_fla_entry": "chunk_kda",
        "any_fla_rival": "FlashKDA",
        "any_fla_bias": "HEADS * 128",
        "AnyPrefillBackend": "KdaPrefillBackend",
    }
    phrases = (
        (
            r"if ``schedule`` is a split one\s+with one segment",
            "where the shape is served\n    by a split schedule with one segment",
        ),
    )
    shape_words = "Tokens in all, heads and sequences"
    shape_head = "tokens/heads/sequences"
    sizes = {  # noqa: RUF012
        "T": "tokens of all sequences",
        "H": "heads, the same for q, k and v",
        "N": "sequences, empty ones included",
    }

    def shape(self, workload: Workload) -> tuple[int, ...]:
        assert isinstance(workload, KdaWorkload)
        return workload.tokens, workload.heads, workload.sequences

    def options_of(self, config: Any, options: Any) -> tuple[Any, ...]:
        """The plain form and what models pass, each packed and as a batch; split schedules serve
        the plain form alone."""
        plain = options.PLAIN
        if not hasattr(config, "waves"):
            return (plain,)
        raw = options.Options(
            gate="safe", gate_dtype="bfloat16", bias=True, beta_dtype="bfloat16",
            beta_logits=True, l2norm=True,
        )  # fmt: skip
        return with_offsets((plain, raw), ("int32", "equal", "int64"))


EXPORTER = KdaExporter()
