"""The export of GDN prefill."""

from __future__ import annotations

from typing import Any

from factory.export.delta_rule import SHARED, DeltaRuleExporter, with_offsets
from operations import Workload
from operations.gdn_prefill import GdnWorkload

__all__ = ["EXPORTER", "GdnExporter"]

_PACKAGE = "candidates.gdn_prefill.kernel"


class GdnExporter(DeltaRuleExporter):
    """A gate for each token and value head; value heads may share a head of q and k."""

    operation = "gdn_prefill"
    package = _PACKAGE
    packages = {_PACKAGE: "kernel", SHARED: "delta_rule"}  # noqa: RUF012
    templates = (
        ("factory.export", "templates/gdn_prefill"),
        ("factory.export", "templates/delta_rule"),
    )
    words = {  # noqa: RUF012
        "any_prefill": operation,
        "any_title": "GDN prefill",
        "any_method": "Gated DeltaNet",
        # Kernels, of which the scan's are called as in KDA, and how their entry point is called.
        "any_kernel_sections": '(".text.gdn_", ".text.kda_")',
        "any_fused_field": "waves",
        "any_kernels_launched": '"gdn_"',
        "any_shape_arguments": "q, v, cu_seqlens",
        "any_of_dataclasses": "dataclass, replace",
        "any_forms": "gate, A_log, dt_bias, beta_logits, l2norm",
        "any_documented_forms": "gate, A_log, dt_bias, \\\nbeta_logits, l2norm",
        "any_listed_forms": "gate, A_log, dt_bias, beta_logits,\n    l2norm",
        "any_default_forms": '"log", None, None, False, False',
        "any_bounded": "gate",
        # Tests: heads and the shape of the gate.
        "any_key_heads": "keys(heads)",
        "any_values": "HV",
        "any_gate_shape": "T, heads",
        "any_gate_axes": "T, H",
        "any_gate_of_q": "q[..., 0].float()",
        "any_decay_axes": ":, None, None",
        "any_bias_shape": "2",
        "any_activated_gate": "-A_log.double().exp() * torch.nn.functional.softplus(shifted)",
        # flash-linear-attention, whose other functions of this operation have no verifier here.
        "any_chunk": "chunk_gated_delta_rule",
        "any_fla_entry": '"gated_delta_rule"',
        "any_fla_rival": "FlashQLA",
        "any_fla_bias": "HEADS",
        "AnyPrefillBackend": "GdnPrefillBackend",
    }
    phrases = (
        (
            r"if ``schedule`` has one segment, or is fused with 64 rows",
            "where the shape is served\n    by a schedule with one segment, or by a fused one of"
            " 64 rows",
        ),
    )
    shape_words = "Tokens, heads of q and k, value heads and sequences"
    shape_head = "tokens/heads/value heads/sequences"
    sizes = {  # noqa: RUF012
        "T": "tokens of all sequences",
        "H": "heads of q and k",
        "HV": "value heads, a multiple of H",
        "N": "sequences, empty ones included",
    }

    def shape(self, workload: Workload) -> tuple[int, ...]:
        assert isinstance(workload, GdnWorkload)
        return workload.tokens, workload.heads, workload.value_heads, workload.sequences

    def gates(self, bound: float | None) -> str:
        if bound is None:
            return super().gates(bound)
        return (
            f"Right for gates from {bound:g} (included) to 0 a token.  Stronger ones are outside"
            " of this export's contract: ``gate='softplus'`` is refused; with ``gate='log'`` they"
            " cannot be seen from shapes, and ``validate=True`` reads the gates and refuses them."
        )

    def options_of(self, config: Any, options: Any) -> tuple[Any, ...]:
        """The plain form, what fla's callers pass (activated gates in fp32, write strengths in
        bf16, q and k to be normalised) and raw inputs.  A batch of equal sequences is packed by
        the entry point."""
        model = options.Options(beta_dtype="bfloat16", l2norm=True)
        raw = options.Options(
            gate="softplus", gate_dtype="bfloat16", bias=True, beta_dtype="bfloat16",
            beta_logits=True, l2norm=True,
        )  # fmt: skip
        return with_offsets((options.PLAIN, model, raw), ("int32", "int64"))


EXPORTER = GdnExporter()
