"""The export of KDA prefill."""

from __future__ import annotations

from factory.export.delta_rule import DeltaRuleExporter
from operations import Workload
from operations.kda_prefill import KdaWorkload

__all__ = ["EXPORTER", "KdaExporter"]

_PACKAGE = "candidates.kda_prefill.kernel"


class KdaExporter(DeltaRuleExporter):
    """A gate for each key channel; as many value heads as key heads are tuned."""

    operation = "kda_prefill"
    package = _PACKAGE
    packages = {_PACKAGE: "kernel"}  # noqa: RUF012
    kernel_prefix = "kda_"
    templates = (
        ("factory.export", "templates/kda_prefill"),
        ("factory.export", "templates/delta_rule"),
    )
    words = {  # noqa: RUF012
        "any_prefill": operation,
        "any_kernel_": kernel_prefix,
        "any_title": "KDA prefill",
        "any_method": "Kimi Delta Attention",
        "any_chunk": "chunk_kda",
        "any_shape_arguments": "q, cu_seqlens",
        "any_gate_axes": "T, H, 128",
        "any_gate_of_q": "q.float()",
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
    activated = (
        ("gate", "safe"),
        ("gate_dtype", "bfloat16"),
        ("bias", True),
        ("beta_dtype", "bfloat16"),
        ("beta_logits", True),
        ("l2norm", True),
    )

    def shape(self, workload: Workload) -> tuple[int, ...]:
        assert isinstance(workload, KdaWorkload)
        return workload.tokens, workload.heads, workload.sequences


EXPORTER = KdaExporter()
