"""Facts about model types that are in their code and not in config.json; tests/families verifies them."""

from __future__ import annotations

ENCODERS = frozenset(
    {
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
        *(
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
    }
)
"""Model types that attend in both directions unless config.json has `is_decoder: true`."""
