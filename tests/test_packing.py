"""Rows unpacked again by what the attention mask lets each token see."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rolecall.actors.attention import BLOCK, attention_mask
from rolecall.actors.logprobs import logprobs, refuse_unless_packable
from rolecall.actors.lora import Lora
from rolecall.actors.model import add_lora, load_model
from rolecall.actors.packing import MAX_PADDING, Batch, pack
from rolecall.actors.types import Completion, Group, Prompt
from rolecall.runtime.errors import Unrecoverable


def group(number: int, prompt: list[int], answers: Sequence[list[int]], reasons: Sequence[str] = ()) -> Group:
    completions = [
        Completion(
            ids=ids,
            logprobs=[-number - i - t / 100 for t in range(len(ids))],
            versions=[0] * len(ids),
            finish_reason=reasons[i] if reasons else "stop",
            text="",
        )
        for i, ids in enumerate(answers)
    ]
    return Group(
        prompt=Prompt(id=number, text="", answer=""),
        prompt_ids=prompt,
        completions=completions,
        digests={},
        worker="rollout-0",
    )


def contexts(batch: Batch) -> dict[int, list[tuple[list[int], int, float, float]]]:
    """For each completion: (ids its predictor sees in order of position, target, lp_gen, advantage) by token."""
    length, masks = batch.input_ids.shape[1], attention_mask(batch.ends, "sdpa")
    assert isinstance(masks, torch.Tensor)
    found: dict[int, list[tuple[list[int], int, float, float]]] = {}
    for n in range(len(batch.target)):
        row, place = divmod(int(batch.predictor[n]), length)
        seen = masks[row, 0, place]
        positions, ids = batch.position_ids[row][seen], batch.input_ids[row][seen]
        assert sorted(positions.tolist()) == list(range(len(positions))), "a gap or a double in what is seen"
        entry = (
            ids[positions.argsort()].tolist(),
            int(batch.target[n]),
            float(batch.lp_gen[n]),
            float(batch.advantage[n]),
        )
        found.setdefault(int(batch.completion[n]), []).append(entry)
    return found


answers = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), min_size=1, max_size=5)
prompts = st.lists(st.integers(4, 9), min_size=1, max_size=5)


@given(st.lists(st.tuples(prompts, answers), min_size=1, max_size=5), st.integers(12, 120), st.booleans())
def test_every_token_is_predicted_from_exactly_its_own_past(drawn, row_tokens: int, joined: bool) -> None:
    groups = [group(i, prompt, ids) for i, (prompt, ids) in enumerate(drawn)]
    worth = [[float(i + 1 + j) for j in range(len(g.completions))] for i, g in enumerate(groups)]
    packed = pack(groups, worth, row_tokens=BLOCK if joined else row_tokens, joined=joined)
    found = {number: entries for batch in packed.batches for number, entries in contexts(batch).items()}
    number = 0
    for g, values in zip(groups, worth, strict=True):
        for completion, value in zip(g.completions, values, strict=True):
            expected = [
                ([*g.prompt_ids, *completion.ids[:t]], token, pytest.approx(lp), value)
                for t, (token, lp) in enumerate(zip(completion.ids, completion.logprobs, strict=True))
            ]
            assert found.pop(number) == expected
            number += 1
    assert not found
    assert packed.trained_tokens == sum(len(c.ids) for g in groups for c in g.completions)
    assert packed.skipped_groups == 0


@given(st.lists(st.tuples(prompts, answers), min_size=1, max_size=5), st.integers(12, 120))
def test_batches_keep_to_the_budget_and_have_little_padding(drawn, row_tokens: int) -> None:
    groups = [group(i, prompt, ids) for i, (prompt, ids) in enumerate(drawn)]
    packed = pack(groups, [[1.0] * len(g.completions) for g in groups], row_tokens=row_tokens)
    places = used = 0
    for batch in packed.batches:
        size, length = batch.input_ids.shape
        assert size * length <= row_tokens
        assert 1 - batch.tokens / (size * length) <= MAX_PADDING
        assert batch.position_ids.shape == (size, length)
        assert batch.ends.shape == (size, length)
        assert bool((batch.ends > torch.arange(length)).all()), "a token that sees nothing gives NaN"
        places, used = places + size * length, used + batch.tokens
    assert packed.fill == used / places


def test_siblings_share_the_prompt_and_their_common_start() -> None:
    [batch] = pack(
        [group(0, [7, 8], [[1, 2, 3], [1, 2, 4, 5], [1, 2, 3]])], [[1, 2, 3]], row_tokens=64
    ).batches
    # The prompt, 1, 2, and 4: the last token of each predicts nothing.
    assert batch.input_ids.tolist() == [[7, 8, 1, 2, 4]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4]]
    assert batch.completion.tolist() == [0, 0, 0, 2, 2, 2, 1, 1, 1, 1]
    assert batch.predictor.tolist() == [1, 2, 3, 1, 2, 3, 1, 2, 3, 4]


def test_positions_restart_after_the_prompt_and_branches_do_not_see_each_other() -> None:
    [batch] = pack([group(0, [7, 8], [[1, 1, 9], [2, 2, 9]])], [[1, -1]], row_tokens=64).batches
    assert batch.input_ids.tolist() == [[7, 8, 1, 1, 2, 2]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 3]]
    mask = attention_mask(batch.ends, "sdpa")
    assert isinstance(mask, torch.Tensor)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]


def test_a_group_too_long_for_a_row_repeats_its_prompt() -> None:
    packed = pack([group(0, [7, 8], [[1, 1, 9], [2, 2, 9], [3, 3, 9]])], [[1, 1, 1]], row_tokens=6)
    rows = [row for batch in packed.batches for row in batch.input_ids.tolist()]
    assert rows == [[7, 8, 1, 1, 2, 2], [7, 8, 3, 3]]
    assert packed.fill == 1


def test_a_completion_too_long_for_any_row_names_the_way_out() -> None:
    with pytest.raises(Unrecoverable, match=r"group 3: .* take 6 tokens, a row holds row_tokens=5") as caught:
        pack([group(3, [7, 8], [[1, 2, 3, 4, 5]])], [[1.0]], row_tokens=5)
    assert caught.value.exit_code == 2


def test_groups_without_variance_are_left_out_and_counted() -> None:
    groups = [group(0, [7], [[1, 2], [3]]), group(1, [8], [[1, 2], [3]])]
    packed = pack(groups, [[0.0, 0.0], [1.0, -1.0]], row_tokens=64)
    assert packed.skipped_groups == 1
    [batch] = packed.batches
    assert batch.completion.tolist() == [2, 2, 3]
    nothing = pack(groups, [[0.0, 0.0], [0.0, 0.0]], row_tokens=64)
    assert (nothing.batches, nothing.trained_tokens, nothing.skipped_groups, nothing.fill) == ([], 0, 2, 1.0)


def test_truncated_completions_can_be_masked() -> None:
    groups = [group(0, [7], [[1, 2], [3, 4, 5]], ["stop", "length"])]
    for mask_truncated, trained in ((False, 5), (True, 2)):
        packed = pack(groups, [[1.0, -1.0]], row_tokens=64, mask_truncated=mask_truncated)
        [batch] = packed.batches
        assert packed.trained_tokens == trained
        assert batch.loss_mask.dtype == torch.bool
        assert batch.loss_mask[batch.completion == 0].all()
        assert batch.loss_mask[batch.completion == 1].all() == (not mask_truncated)


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(ValueError, match="group 5 of rollout-0 has an empty prompt"):
        pack([group(5, [], [[1]])], [[1.0]], row_tokens=64)
    with pytest.raises(ValueError, match="group 5 of rollout-0 has a completion of 0 tokens"):
        pack([group(5, [1], [[]])], [[1.0]], row_tokens=64)


def test_joined_rows_are_filled_with_the_longest_first_and_come_in_few_lengths() -> None:
    groups = [group(i, [7] * length, [[1]]) for i, length in enumerate((200, 120, 100, 60, 30, 20, 10))]
    packed = pack(groups, [[1.0]] * 7, row_tokens=2 * BLOCK, joined=True)
    assert [batch.tokens for batch in packed.batches] == [250, 230, 60]
    assert [batch.input_ids.shape for batch in packed.batches] == [(1, 256), (1, 256), (1, 128)]
    assert packed.fill == 540 / 640
    with pytest.raises(ValueError, match="row_tokens=100 is no multiple"):
        pack(groups, [[1.0]] * 7, row_tokens=100, joined=True)


@given(
    st.lists(
        st.tuples(st.integers(1, 90), st.lists(st.integers(1, 90), min_size=1, max_size=4)),
        min_size=1,
        max_size=6,
    )
)
def test_a_block_mask_shows_what_a_dense_one_shows(lengths: list[tuple[int, list[int]]]) -> None:
    groups = [group(i, [7] * n, [[j] * m for j, m in enumerate(own)]) for i, (n, own) in enumerate(lengths)]
    for batch in pack(
        groups, [[1.0] * len(own) for _, own in lengths], row_tokens=4 * BLOCK, joined=True
    ).batches:
        dense, blocks = (attention_mask(batch.ends, backend) for backend in ("sdpa", "flex_attention"))
        assert isinstance(dense, torch.Tensor) and not isinstance(blocks, torch.Tensor)
        assert blocks.full_kv_num_blocks is not None and blocks.full_kv_indices is not None
        shown = torch.zeros_like(dense[0, 0])
        places = torch.arange(BLOCK)
        for query in range(len(shown) // BLOCK):
            for count, listed, every in (
                (blocks.kv_num_blocks, blocks.kv_indices, False),
                (blocks.full_kv_num_blocks, blocks.full_kv_indices, True),
            ):
                for key in listed[0, 0, query, : count[0, 0, query]].tolist():
                    q, k = query * BLOCK + places[:, None], key * BLOCK + places
                    shown[q, k] = True if every else blocks.mask_mod(torch.tensor(0), torch.tensor(0), q, k)
        assert torch.equal(shown, dense[0, 0])


def test_what_an_environment_wrote_is_read_and_not_trained() -> None:
    one = group(0, [4, 5], [[1, 2, 3], [1, 2, 9, 3]])
    mask = [True, False, False, True]
    several = msgspec.structs.replace(one.completions[1], mask=mask, finish_reason="length")
    one = msgspec.structs.replace(one, completions=[one.completions[0], several])
    packed = pack([one], [[1.0, -1.0]], row_tokens=20)
    (batch,) = packed.batches
    assert batch.loss_mask[batch.completion == 1].tolist() == mask
    assert batch.loss_mask[batch.completion == 0].all()
    assert packed.trained_tokens == 5
    found = contexts(batch)[1]
    assert found[3][0] == [4, 5, 1, 2, 9]  # the last token is predicted from all of them
    truncated = pack([one], [[1.0, -1.0]], row_tokens=20, mask_truncated=True)
    assert truncated.trained_tokens == 3


def test_a_mask_of_another_length_is_an_error() -> None:
    one = group(0, [4], [[1, 2]])
    one = msgspec.structs.replace(one, completions=[msgspec.structs.replace(one.completions[0], mask=[True])])
    with pytest.raises(ValueError, match="2 tokens with a mask of 1"):
        pack([one], [[1.0]], row_tokens=20)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_rows_attended_by_blocks_have_the_log_probs_of_rows_attended_whole() -> None:
    """Forward, and not compiled: a CPU has no backward for it."""
    answers = [[9, 8, 7] * 10, [9, 8, 6] * 12, [3] * 40]
    groups = [group(i, [5 + i] * (20 + i), answers) for i in range(3)]
    found: list[list[torch.Tensor]] = []
    for attention in ("sdpa", "flex_attention"):
        base = load_model("tiny", device="cpu", dtype=torch.float32, attention=attention)
        policy = add_lora(base, Lora(), seed=0)
        joined = attention == "flex_attention"
        packed = pack(groups, [[1.0] * 3] * 3, row_tokens=4 * BLOCK, joined=joined)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            refuse_unless_packable(policy, "tiny")
            lps = {
                int(number): lp[batch.completion == number]
                for batch in packed.batches
                for lp in [logprobs(policy, batch, 1.0)[0]]
                for number in batch.completion.unique()
            }
        found.append([lps[number] for number in sorted(lps)])
    whole, by_blocks = found
    assert [len(lp) for lp in whole] == [len(answer) for answer in answers] * 3
    for ours, theirs in zip(by_blocks, whole, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
