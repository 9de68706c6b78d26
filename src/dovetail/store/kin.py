"""Which supported architecture comes nearest to one that is not, so that a refusal says what to take instead."""

from __future__ import annotations

import difflib
from collections.abc import Collection

# By how they compute, where the name does not tell.
_KIN = {
    "gpt2": "opt", "gpt_neo": "opt", "gpt_neox": "opt", "gptneox": "opt", "gptj": "opt", "bloom": "opt", "mpt": "opt",
    "gpt_bigcode": "starcoder2", "starcoder": "starcoder2", "falcon": "cohere", "phi": "phi3", "phi2": "phi3",
    "phimoe": "mixtral", "olmoe": "qwen3_moe", "deepseek_v3": "deepseek_v2", "deepseek": "deepseek_v2",
    "granitemoe": "mixtral", "glm4_moe": "glm4", "qwen2_moe": "qwen3_moe", "gemma": "gemma2", "chatglm": "glm",
    "mamba": "granite", "command-r": "cohere",
    "camembert": "xlm-roberta", "distilbert": "bert", "electra": "bert", "mpnet": "bert",
    "deberta-v2": "bert", "nomic_bert": "modernbert", "nomic-bert": "modernbert", "t5": "bert",
}  # fmt: skip
_LIKENESS = 0.5
_COMMONEST = "llama"


def nearest(unknown: str, known: Collection[str]) -> str:
    """One of `known`: by kinship, else by name, else the commonest."""
    kin = _KIN.get(unknown)
    if kin in known:
        return str(kin)
    alike = difflib.get_close_matches(unknown.removesuffix("_text"), sorted(known), n=1, cutoff=_LIKENESS)
    return alike[0] if alike else _COMMONEST
