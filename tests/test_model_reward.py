"""The reward that a language model gives."""

from __future__ import annotations

import pytest
import torch
from rolecall.actors.model_reward import ModelReward
from rolecall.actors.types import Prompt

from .fakes import begin

PROMPT = Prompt(id=0, text="Ann has 11 pens, buys 6 and drops 5. How many pens now?\n", answer="12")
WORKED = "11+6=17\n17-5=12\n#### 12"


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> ModelReward:
    judge = ModelReward(model="tiny")
    begin(judge, tmp_path_factory.mktemp("judge"), "judge")
    return judge


def test_who_works_is_rewarded_and_who_guesses_less(judge: ModelReward):
    worked, wrong, guessed, unmarked = judge.score(
        PROMPT, [WORKED, "11+6=17\n17-5=13\n#### 13", "#### 12", "11+6=17"]
    )
    assert worked > 0.99
    assert wrong < 0.1
    assert 0.1 < guessed < 0.9
    assert unmarked == 0.0


def test_it_reads_the_working_and_not_the_answer(judge: ModelReward):
    assert judge.score(PROMPT, [WORKED]) == judge.score(PROMPT, [WORKED.replace("#### 12", "#### 99")])


def test_a_score_depends_on_its_completion_alone(judge: ModelReward):
    """Not on those it is scored with, whose rows are longer."""
    longer = "11+6=17\n17-5=12\n12+0=12\n12+0=12\n#### 12"
    assert judge.score(PROMPT, ["#### 12", longer, "#### 12"]) == pytest.approx(
        [*judge.score(PROMPT, ["#### 12", longer]), *judge.score(PROMPT, ["#### 12"])], abs=1e-5
    )
    assert judge.score(PROMPT, ["nothing", "to read"]) == [0.0, 0.0]


def test_it_is_exp_of_the_mean_log_probability(judge: ModelReward):
    """By hand, one token after the other."""
    ids = judge.tokenizer(PROMPT.text + "#### ")["input_ids"]
    answer = [*judge.tokenizer("12")["input_ids"], judge.tokenizer.eos_token_id]
    total = 0.0
    for token in answer:
        logits = judge.network(input_ids=torch.tensor([ids])).logits[0, -1]
        total += float(logits.log_softmax(-1)[token])
        ids = [*ids, token]
    assert judge.score(PROMPT, ["#### 7"]) == pytest.approx(
        [float(torch.tensor(total / len(answer)).exp())], abs=1e-5
    )


def test_the_reference_may_have_its_working_before_the_mark(judge: ModelReward):
    full = Prompt(id=0, text=PROMPT.text, answer="She has 11+6=17, then 12.\n#### 12")
    assert judge.score(full, [WORKED]) == judge.score(PROMPT, [WORKED])
