r"""Generalised advantage estimation over sampled tokens, with a critic's values (arXiv:1506.02438; T1, section 2.3).

    delta_j = r_j + gamma V(s_{j+1}) - V(s_j)          A_j = sum over n of (gamma lambda)^n delta_{j+n}

V are the critic's values before its own update. The reward comes with the last token of a trajectory and the value
after it is 0, so gamma = lambda = 1 (T1) gives A_j = R - V(s_j). The critic's targets are R_j = V(s_j) + A_j with a
lambda of their own (VAPO: decoupled; T1 has 1 for both, and the target is then the reward).

Suffix: T sampled tokens of a batch, those of a trajectory together and in order. Float64 numpy, no loop over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.core.credit.gigpo import discounted_returns

if TYPE_CHECKING:
    from strop.core.credit.gigpo import Floats, Ints


@dataclass(frozen=True, slots=True)
class GaeOptions:
    """discount: gamma.   policy_lambda, critic_lambda: for advantages and for value targets (1: T1).

    length_scale: VAPO's length-adaptive lambda of the policy, 1 - 1 / (length_scale l) for a trajectory of l sampled
    tokens (0.05 there), and 0 where that is negative (our choice: the paper is silent). It replaces policy_lambda.
    """

    discount: float = 1.0
    policy_lambda: float = 1.0
    critic_lambda: float = 1.0
    length_scale: float | None = None


def gae(value_T: Floats, reward_T: Floats, trajectory_T: Ints, discount: float, lambda_T: Floats | float) -> Floats:
    """Advantages [T]. `trajectory_T` numbers the trajectories; `lambda_T` is one number, or one a token (equal within a
    trajectory).

    >>> import numpy as np
    >>> gae(np.array([.5, .25]), np.array([0., 1]), np.array([0, 0]), 1.0, 1.0).tolist()
    [0.5, 0.75]
    """
    import numpy as np

    next_T = np.zeros_like(value_T)
    same = trajectory_T[1:] == trajectory_T[:-1]
    next_T[:-1] = value_T[1:] * same
    delta_T = reward_T + discount * next_T - value_T
    return discounted_returns(delta_T, trajectory_T, discount * lambda_T)


def adaptive_lambda(length_T: Ints, length_scale: float) -> Floats:
    """VAPO's lambda of each token, of the number of sampled tokens of its trajectory."""
    import numpy as np

    return np.maximum(1 - 1 / (length_scale * length_T), 0.0)


def advantages_and_targets(
    value_T: Floats, reward_N: Floats, length_N: Ints, options: GaeOptions
) -> tuple[Floats, Floats]:
    """Advantages and value targets [T] of N trajectories with these numbers of sampled tokens (none may be 0).

    `reward_N` comes with the last sampled token of each.
    """
    import numpy as np

    trajectory_T = np.repeat(np.arange(len(length_N)), length_N)
    reward_T = np.zeros(len(value_T))
    reward_T[np.cumsum(length_N) - 1] = reward_N
    lambda_T: Floats | float = options.policy_lambda
    if options.length_scale is not None:
        lambda_T = adaptive_lambda(np.repeat(length_N, length_N), options.length_scale)
    advantage_T = gae(value_T, reward_T, trajectory_T, options.discount, lambda_T)
    target_T = value_T + gae(value_T, reward_T, trajectory_T, options.discount, options.critic_lambda)
    return advantage_T, target_T
