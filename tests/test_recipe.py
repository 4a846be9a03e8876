"""Loading recipes, and their settings."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from rolecall import Unrecoverable
from rolecall.actors.losses import Loss
from rolecall.runtime.recipe import configure, from_saved, load_recipe, recipe_names, settings_of

RECIPE = """
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Literal

from msgspec import Meta
from rolecall import Graph

class Speed(Enum):
    SLOW = "slow"
    FAST = "fast"

@dataclass(frozen=True)
class Decay:
    rate: float = 0.5
    every: Annotated[int, Meta(ge=1, description="whole number from 1 up")] = 10

@dataclass(frozen=True)
class Schedule:
    kind: Literal["flat", "none"] | None = None
    warmup: int = 0
    decay: Decay = Decay(every=20)

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"warmup {self.warmup}: from 0 up")

@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 3
    lr: float = 1e-3
    model: str = "tiny"
    shuffle: bool = True
    limit: int | None = None
    mode: Literal["a", "b"] = "a"
    speed: Speed = Speed.SLOW
    schedule: Schedule = field(default_factory=lambda: Schedule(warmup=5))

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: at least 1")

def build(config: Config) -> Graph:
    return Graph("example")
"""


@pytest.fixture
def recipe(tmp_path: Path) -> ModuleType:
    path = tmp_path / "example.py"
    path.write_text(RECIPE)
    return load_recipe(str(path))


def refused(recipe: ModuleType, setting: str) -> str:
    with pytest.raises(Unrecoverable) as caught:
        configure(recipe, "example", [setting])
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_packages_own_recipes_have_a_config_and_a_build():
    assert "async_grpo" in recipe_names()
    for name in recipe_names():
        module = load_recipe(name)
        assert list(module.build(module.Config()))


def test_a_file_is_the_same_module_each_time(recipe: ModuleType):
    assert recipe.__file__ is not None
    assert load_recipe(recipe.__file__) is recipe
    assert sys.modules[recipe.__name__] is recipe


def test_a_file_has_the_same_name_in_another_process(recipe: ModuleType):
    code = (
        f"from rolecall.runtime.recipe import load_recipe; print(load_recipe({recipe.__file__!r}).__name__)"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.strip() == recipe.__name__


def test_two_files_of_one_name_are_two_modules(tmp_path: Path):
    modules = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "example.py").write_text(RECIPE)
        modules.append(load_recipe(str(tmp_path / folder / "example.py")))
    assert modules[0] is not modules[1]
    assert modules[0].Config is not modules[1].Config


def test_a_name_that_is_almost_right_is_suggested():
    with pytest.raises(Unrecoverable, match="no recipe 'async_grp'; did you mean 'async_grpo'") as caught:
        load_recipe("async_grp")
    assert caught.value.exit_code == 2


def test_an_installed_module_is_a_recipe_by_its_dotted_name():
    assert load_recipe("rolecall.recipes.sync_grpo") is load_recipe("sync_grpo")
    with pytest.raises(
        Unrecoverable, match=r"recipe no_such\.module can't be imported \(.*\): install"
    ) as caught:
        load_recipe("no_such.module")
    assert caught.value.exit_code == 2
    with pytest.raises(Unrecoverable, match="there is no recipe"):
        load_recipe("rolecall.__main__")  # importing it would be running it


def not_loaded(path: Path) -> str:
    with pytest.raises(Unrecoverable) as caught:
        load_recipe(str(path))
    assert caught.value.exit_code == 2
    return str(caught.value)


def null_byte() -> str:
    """What this release of Python raises for one: some of 3.11 SyntaxError, others ValueError."""
    try:
        compile("x = '\0'", "broken.py", "exec")
    except (SyntaxError, ValueError) as error:
        return type(error).__name__
    raise AssertionError("it takes it")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("x = 1\ndef build(:\n", ", line 2 can't be loaded: SyntaxError: invalid syntax"),
        ("import json\n\njson.loads('{')\n", ", line 3 can't be loaded: JSONDecodeError: "),
        ("x = 1\nraise KeyError('steps')", ", line 2 can't be loaded: KeyError: 'steps'"),
        ("x = '\0'", f" can't be loaded: {null_byte()}: source code string cannot contain null bytes"),
    ],
)
def test_a_file_that_cannot_be_loaded(tmp_path: Path, source: str, text: str):
    path = tmp_path / "broken.py"
    path.write_text(source)
    assert not_loaded(path).startswith(f"recipe file {path}{text}")


def test_a_config_that_is_no_dataclass(tmp_path: Path):
    path = tmp_path / "plain.py"
    path.write_text("class Config: ...\ndef build(config): ...\n")
    assert not_loaded(path) == f"recipe {path}: its Config is no dataclass: put @dataclass above it"
    path.write_text("def Config(): ...\ndef build(config): ...\n")
    assert "its Config is no dataclass" in not_loaded(path.rename(tmp_path / "function.py"))


def test_a_config_with_a_field_that_has_no_default(tmp_path: Path):
    path = tmp_path / "needy.py"
    path.write_text(RECIPE.replace("lr: float = 1e-3", "lr: float"))
    assert "missing 1 required keyword-only argument: 'lr'" in refused(load_recipe(str(path)), "steps=2")


def test_a_file_may_import_its_siblings_and_shadows_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_sibling.py").write_text("STEPS = 5\n")
    (tmp_path / "colorsys.py").write_text("raise AssertionError('the standard library comes first')\n")
    path = tmp_path / "example.py"
    path.write_text("import colorsys\nfrom my_sibling import STEPS\n" + RECIPE.replace("= 3", "= STEPS"))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert load_recipe(str(path)).Config().steps == 5


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(Unrecoverable, match=r"there is no recipe file .*missing.py: check the path"):
        load_recipe(str(tmp_path / "missing.py"))


def test_a_file_without_build(tmp_path: Path):
    (tmp_path / "half.py").write_text("class Config: ...\n")
    with pytest.raises(Unrecoverable, match="has no `build`"):
        load_recipe(str(tmp_path / "half.py"))


def test_a_file_that_raises_is_not_half_loaded(tmp_path: Path):
    path = tmp_path / "raises.py"
    path.write_text("import no_such_module\n" + RECIPE)
    text = (
        f"recipe file {path}, line 1 can't be loaded: ModuleNotFoundError: No module named 'no_such_module'"
    )
    for _ in range(2):
        assert not_loaded(path) == text
    path.write_text(RECIPE)
    assert load_recipe(str(path)).Config().steps == 3


def test_settings_become_their_fields_types(recipe: ModuleType):
    settings = ["steps=5", "lr=0.1", "model=a=b", "shuffle=false", "limit=7", "mode=b", "speed=fast"]
    config = configure(recipe, "example", settings)
    assert (config.steps, config.lr, config.model, config.shuffle) == (5, 0.1, "a=b", False)
    assert (config.limit, config.mode, config.speed.name) == (7, "b", "FAST")
    assert configure(recipe, "example", []) == recipe.Config()
    assert configure(recipe, "example", ["limit=null"]).limit is None


def test_settings_of_settings_have_dotted_names(recipe: ModuleType):
    config = configure(recipe, "example", ["schedule.kind=none", "schedule.decay.rate=0.1", "steps=5"])
    assert (config.steps, config.schedule.kind, config.schedule.warmup) == (5, "none", 5)
    assert (config.schedule.decay.rate, config.schedule.decay.every) == (0.1, 20)
    assert configure(recipe, "example", ["schedule.kind=null"]) == recipe.Config()
    flat = settings_of(config)
    assert list(flat)[-4:] == [
        "schedule.kind", "schedule.warmup", "schedule.decay.rate", "schedule.decay.every"
    ]  # fmt: skip
    assert (flat["steps"], flat["schedule.decay.rate"]) == (5, 0.1)


def test_a_setting_of_settings_without_a_default(tmp_path: Path):
    path = tmp_path / "needy.py"
    lazy = "field(default_factory=lambda: Schedule(warmup=5))"
    path.write_text(RECIPE.replace(f"schedule: Schedule = {lazy}", "schedule: Schedule"))
    needy = load_recipe(str(path))
    assert configure(needy, "needy", ["schedule.warmup=2"]).schedule == needy.Schedule(warmup=2)
    assert "'schedule'" in refused(needy, "steps=2")


def test_a_config_comes_back_from_a_runs_json(recipe: ModuleType):
    config = configure(recipe, "example", ["schedule.kind=flat", "schedule.decay.every=3", "limit=7"])
    saved = msgspec.json.decode(msgspec.json.encode(dataclasses.asdict(config)))
    del saved["speed"]  # an enum's value stays what JSON has for it
    assert from_saved(recipe.Config, saved) == config
    assert from_saved(recipe.Config, {}) == recipe.Config()
    for wrong in ({"stepz": 1}, {"schedule": {"knid": "flat"}}, {"schedule": 7}):
        with pytest.raises(TypeError):
            from_saved(recipe.Config, wrong)


@pytest.mark.parametrize("name", ["sync_grpo", "async_grpo"])
def test_a_recipes_loss_is_set_and_comes_back(name: str):
    module = load_recipe(name)
    config = configure(module, name, ["loss.kind=gspo", "loss.clip_high=0.28", "loss.correction=tis"])
    assert config.loss == Loss(kind="gspo", clip_high=0.28, correction="tis")
    [trainer] = [role for role in module.build(config) if role.name == "trainer"]
    assert trainer.kwargs["loss"] == config.loss
    saved = msgspec.json.decode(msgspec.json.encode(dataclasses.asdict(config)))
    assert from_saved(module.Config, saved) == config


def test_a_setting_that_is_not_there(recipe: ModuleType):
    text = refused(recipe, "stepz=4")
    assert text.startswith(
        "example has no setting 'stepz'; did you mean 'steps'? It has: limit, lr, mode, model"
    )
    assert refused(recipe, "quux=4").startswith("example has no setting 'quux'. It has:")
    assert "has no setting 'schedule.knid'; did you mean 'schedule.kind'?" in refused(
        recipe, "schedule.knid=flat"
    )
    assert refused(recipe, "schedule.decay=flat") == (
        "example: schedule.decay is several settings; set one of them: schedule.decay.rate, schedule.decay.every"
    )


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("steps", "write it as field=value"),
        ("steps=many", "steps='many' is not a int"),
        ("steps=1.5", "steps='1.5' is not a int"),
        ("shuffle=perhaps", "shuffle='perhaps' is not a bool"),
        ("mode=c", "mode='c' is not a value it can have: a, b"),
        ("schedule.kind=c", "schedule.kind='c' is not a value it can have: flat, none"),
        ("schedule.warmup=-1", "example: warmup -1: from 0 up"),
        ("schedule.warmup=x", "schedule.warmup='x' is not a int"),
        ("schedule.decay.every=0", "schedule.decay.every='0' is not a whole number from 1 up"),
        ("speed=faster", "speed='faster' is not a Speed"),
        ("steps=0", "steps=0: at least 1"),
    ],
)
def test_a_value_that_cannot_be(recipe: ModuleType, setting: str, text: str):
    assert text in refused(recipe, setting)
