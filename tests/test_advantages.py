"""What rewards are worth: numbers worked by hand, in float64, and what must hold for any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolecall.actors.advantages import advantages

THIRD = 1 / 3


@pytest.mark.parametrize(
    ("rewards", "options", "expected"),
    [
        ([1, 1, 0, 0], {"scale": "none"}, [0.5, 0.5, -0.5, -0.5]),
        ([1, 1, 0, 0], {}, [0.999998, 0.999998, -0.999998, -0.999998]),  # ½ / (½ + eps)
        ([1, 1, 0, 0], {"ddof": 1, "eps": 1e-4}, [0.8658755, 0.8658755, -0.8658755, -0.8658755]),
        ([1, 0, 0, 0], {"eps": 0}, [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
        ([1, 0, 0, 0], {}, [1.7320468, -0.5773489, -0.5773489, -0.5773489]),  # √3 less eps's share
        ([3, 1], {"scale": "none"}, [1, -1]),
        # 1 − (1 + 0 + 0)/3 and 0 − (1 + 1 + 0)/3
        ([1, 1, 0, 0], {"centre": "leave_one_out", "scale": "none"}, [2 / 3, 2 / 3, -2 / 3, -2 / 3]),
        ([1, 0, 0, 0], {"centre": "leave_one_out", "scale": "none"}, [1, -THIRD, -THIRD, -THIRD]),
        ([1, 1, 0, 0], {"centre": "leave_one_out", "eps": 0}, [4 / 3, 4 / 3, -4 / 3, -4 / 3]),  # ⅔ / ½
        ([1, 0, -2], {"centre": "none", "scale": "none"}, [1, 0, -2]),
        ([2, 2], {"centre": "none", "scale": "none"}, [2, 2]),  # plain REINFORCE needs no siblings
    ],
)
def test_one_group_by_hand(rewards: list[float], options: dict, expected: list[float]) -> None:
    assert advantages([rewards], **options) == [pytest.approx(expected, abs=1e-7)]


def test_a_group_over_the_spread_of_the_whole_step_by_hand() -> None:
    # Rewards 1 0 3 1 2 2: mean 1.5, squares .25 2.25 2.25 .25 .25 .25 = 5.5; σ² = 5.5/6, or 5.5/5 with ddof 1.
    groups = [[1, 0], [3, 1], [2, 2]]
    for ddof, variance in ((0, 5.5 / 6), (1, 1.1)):
        sigma = variance**0.5
        values = advantages(groups, scale="batch_std", ddof=ddof, eps=0)
        assert values[0] == pytest.approx([0.5 / sigma, -0.5 / sigma])
        assert values[1] == pytest.approx([1 / sigma, -1 / sigma])
        assert values[2] == [0, 0]


@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [5.0], [0.0, 0.0], []])
@pytest.mark.parametrize("centre", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["std", "batch_std", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("others", [[], [[1.0, 0.0]]])
def test_equal_rewards_and_single_members_are_worth_exactly_zero(
    rewards, centre, scale, ddof, others
) -> None:
    values = advantages([rewards, *others], centre=centre, scale=scale, ddof=ddof)
    assert values[0] == [0.0] * len(rewards)
    assert all(any(own) for own in values[1:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("centre", ["mean", "none"])
def test_a_reward_that_is_not_finite_is_an_error(bad: float, centre) -> None:
    with pytest.raises(ValueError, match=f"reward 1 of the group is {bad}"):
        advantages([[0.0, 1.0], [1.0, bad, 0.0]], centre=centre, scale="none")


@pytest.mark.parametrize("scale", ["std", "batch_std"])
def test_rewards_that_are_not_centred_are_not_scaled(scale) -> None:
    with pytest.raises(ValueError, match="not centred"):
        advantages([[1.0, 0.0]], centre="none", scale=scale)


groups = st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), min_size=1, max_size=4)


@given(groups, st.sampled_from(["mean", "leave_one_out"]), st.sampled_from(["std", "batch_std", "none"]))
def test_advantages_sum_to_zero_and_keep_the_order(rewards_P_G, centre, scale) -> None:
    for rewards, values in zip(rewards_P_G, advantages(rewards_P_G, centre=centre, scale=scale), strict=True):
        assert sum(values) == pytest.approx(0, abs=1e-5 * len(rewards) * max(map(abs, [1, *values])))
        order = sorted(range(len(rewards)), key=lambda i: rewards[i])
        assert [values[i] for i in order] == sorted(values)


@given(groups, st.sampled_from(["std", "none"]))
def test_a_group_is_worth_the_same_whoever_else_is_in_the_step(rewards_P_G, scale) -> None:
    together = advantages(rewards_P_G, scale=scale)
    assert together == [advantages([rewards], scale=scale)[0] for rewards in rewards_P_G]
