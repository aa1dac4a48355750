"""The Bradley–Terry loss of a reward model (arXiv 2009.01325, equation 1), as in TRL's RewardTrainer.

For a pair with rewards r_c of the chosen and r_r of the rejected completion, a margin m (arXiv 2307.09288, equation 2)
and a coefficient c that keeps rewards near 0 (arXiv 2312.09244, equation 6):

    −log σ(r_c − r_r − m) + c · (r_c + r_r)²
"""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen: Float[Tensor, " pairs"],
    rejected: Float[Tensor, " pairs"],
    margins: Float[Tensor, " pairs"],
    center: float = 0.0,
) -> Float[Tensor, " pairs"]:
    """The loss of each pair."""
    return -logsigmoid(chosen - rejected - margins) + center * (chosen + rejected) ** 2
