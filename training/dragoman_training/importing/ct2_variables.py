"""The variables of CTranslate2's model.bin as a reader of models asks for them, and what they say is not supported."""

from __future__ import annotations

from dragoman_training.errors import ModelImportError
from dragoman_training.importing.ct2_file import Floats, ModelFile

# What a part of a variable's name stands for that this package's model lacks.
UNSUPPORTED = {
    "relative_position_keys": "relative positions",
    "relative_asymmetric_position_keys": "relative positions",
    "relative_attention_bias": "relative attention biases",
    "rotary_dim": "rotary positions",
    "alibi": "attention with linear biases (ALiBi)",
    "linear_0_noact": "a gated feed-forward",
    "layer_norm_use_residual": "norms by the root mean square (RMSNorm)",
    "q_norm": "norms of queries and keys",
    "k_norm": "norms of queries and keys",
    "v_norm": "norms of values",
    "shared_layer_norm": "parallel attention and feed-forward",
    "input_layer_norm": "norms before and behind each sublayer",
    "pre_feedforward_layer_norm": "norms before and behind each sublayer",
    "project_in": "embeddings of another width",
    "project_out": "embeddings of another width",
    "scale_outputs": "scaled outputs",
    "final_logit_softcapping": "capped logits",
    "sliding_window": "attention to a window",
    "weight_zero": "4-bit weights (AWQ)",
    "memory_kv": "one attention over source and target",
    "experts": "a mixture of experts",
    "moe": "a mixture of experts",
    "gate": "a mixture of experts",
    "router": "a mixture of experts",
}
# Settings, not weights, and read as such or without a meaning for a model whose parts are all supported.
SETTINGS = (
    "num_heads",
    "pre_norm",
    "activation",
    "embeddings_merge",
    "scale_embeddings",
    "multiply_by_sqrt_depth",
    "alignment_layer",
    "alignment_heads",
    "start_from_zero_embedding",
    "multi_query_attention",
    "alibi_use_positive_positions",
    "scale_alibi",
    "merged_encoder_attention",
    "relative_attention_max_distance",
    "with_source_bos",
    "with_source_eos",
    "with_target_bos",
    "num_heads_kv",
    "head_dim",
    "queries_scale",
)


class Variables:
    """The variables of a file: what was read is remembered, so that nothing is left out unseen."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._file.variables

    def floats(self, name: str) -> Floats:
        """A variable as float32. Raises ``ModelImportError`` where there is none."""
        if name not in self:
            raise ModelImportError(f"it lacks the variable {name}")
        self._read |= {name, f"{name}_scale"}
        return self._file.floats(name)

    def setting(self, name: str, default: float) -> float:
        """A single number; of older files without the side that it belongs to."""
        for key in (name, name.partition("/")[2]):
            if key in self:
                self._read.add(key)
                values = self._file.variables[key].values
                if values.size != 1:
                    raise ModelImportError(f"{key} has {values.size} values: it must have one")
                return float(values.reshape(()))
        return default

    def is_switch(self, name: str) -> bool:
        """Whether a setting is stored as true or false, not as a number."""
        return self._file.variables[name].kind == "int8"

    def count(self, prefix: str) -> int:
        """How many numbers, from 0, stand behind a prefix of names."""
        number = 0
        while any(name.startswith(f"{prefix}{number}/") for name in self._file.variables):
            number += 1
        return number

    def left(self) -> list[str]:
        """The names of variables that nobody read. A switch that is off says nothing."""
        unread = self._file.variables.keys() - self._read
        return sorted(name for name in unread if name.rpartition("/")[2] not in SETTINGS and not self._is_off(name))

    def unsupported(self) -> list[str]:
        """What the variables say that this package's model lacks."""
        found: dict[str, None] = {}  # in order, each once
        for name in self._file.variables:
            for part in name.split("/"):
                if part in UNSUPPORTED and not self._is_off(name):
                    found[UNSUPPORTED[part]] = None
            if name.endswith("/gamma") and f"{name.removesuffix('gamma')}beta" not in self:
                found[UNSUPPORTED["layer_norm_use_residual"]] = None
        return list(found)

    def _is_off(self, name: str) -> bool:
        values = self._file.variables[name].values
        return values.ndim == 0 and not values.any()
