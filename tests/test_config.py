"""Configs: nested changes, overrides from a command line, and unknown keys refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import pytest

from sader.config import from_dict, merge, parse_override, to_dict
from sader.errors import ConfigError
from sader.models import PRESETS, ModelConfig, get_preset


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    count: int = 3
    flag: bool = False
    name: str = "x"
    sizes: tuple[int, ...] = (1, 2)
    maybe: float | None = None
    pair: tuple[str, float] = ("x", 0.0)
    groups: tuple[tuple[tuple[str, ...], float], ...] = ()
    inner: Inner = Inner()


def test_merge_changes_only_what_is_named():
    base = Outer(count=5)
    changed = merge(base, {"inner": {"rate": 0.5}, "sizes": [4, 5, 6]})
    assert changed == Outer(count=5, sizes=(4, 5, 6), inner=Inner(rate=0.5))
    assert base == Outer(count=5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"inner": {"rate": 2}}, Outer(inner=Inner(rate=2.0))),
        ({"inner": {"rate": "2e-4"}}, Outer(inner=Inner(rate=2e-4))),  # YAML reads 2e-4 as text
        ({"maybe": 1}, Outer(maybe=1.0)),
        ({"maybe": None}, Outer(maybe=None)),
        ({"sizes": []}, Outer(sizes=())),
        ({"flag": True}, Outer(flag=True)),
        ({"pair": ["y", "1e-3"]}, Outer(pair=("y", 1e-3))),
        ({"groups": []}, Outer(groups=())),
        ({"groups": [[["B08"], 1], [[], 0.5]]}, Outer(groups=((("B08",), 1.0), ((), 0.5)))),
        ({"inner": {"kind": "b"}}, Outer(inner=Inner(kind="b"))),
    ],
)
def test_values_become_the_annotated_type(changes, expected):
    found = merge(Outer(), changes)
    assert found == expected
    assert type(found.inner.rate) is float


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cuont": 1}, r"unknown key cuont; did you mean count\?"),
        ({"inner": {"zzz": 1}}, r"unknown key inner\.zzz; known: kind, rate"),
        ({"count": 2.5}, r"count is 2\.5; expected int"),
        ({"count": True}, r"count is True; expected int"),
        ({"count": "3"}, r"count is '3'; expected int"),
        ({"flag": 1}, r"flag is 1; expected bool"),
        ({"name": 3}, r"name is 3; expected str"),
        ({"inner": {"rate": "fast"}}, r"inner\.rate is 'fast'; expected float"),
        ({"inner": {"rate": True}}, r"inner\.rate is True; expected float"),
        ({"inner": {"kind": "c"}}, r"inner\.kind is 'c'; expected one of 'a', 'b'"),
        ({"inner": 3}, r"inner is 3; expected a mapping"),
        ({"sizes": 3}, r"sizes is 3; expected a list"),
        ({"sizes": ["a"]}, r"sizes is 'a'; expected int"),
        ({"maybe": "x"}, r"maybe is 'x'; expected float"),
        ({"name": True}, r"name is True; expected str"),
        ({"pair": ["y"]}, r"pair is \['y'\]; expected 2 items \(str, float\)"),
        ({"pair": ["y", 1, 2]}, r"pair is \['y', 1, 2\]; expected 2 items"),
        ({"pair": ["y", "z"]}, r"pair is 'z'; expected float"),
        ({"groups": ["B08", 0.5]}, r"groups is 'B08'; expected a list"),
        ({"groups": [["B08", 0.5]]}, r"groups is 'B08'; expected a list"),
        ({"groups": [[["B08"]]]}, r"groups is \[\['B08'\]\]; expected 2 items \(list, float\)"),
    ],
)
def test_wrong_keys_and_values_are_refused_by_name(changes, text):
    with pytest.raises(ConfigError, match=text):
        merge(Outer(), changes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("count=4", {"count": 4}),
        ("inner.rate=0.5", {"inner": {"rate": 0.5}}),
        ("inner.rate=2e-4", {"inner": {"rate": "2e-4"}}),
        ("sizes=[1, 2]", {"sizes": [1, 2]}),
        ("maybe=null", {"maybe": None}),
        ("name=a=b", {"name": "a=b"}),
    ],
)
def test_overrides(text, expected):
    assert parse_override(text) == expected


def test_override_reaches_its_place():
    assert merge(Outer(), parse_override("inner.rate=2e-4")).inner.rate == 2e-4


@pytest.mark.parametrize("text", ["count", "=3", "sizes=[1, 2"])
def test_broken_overrides_are_refused(text):
    with pytest.raises(ConfigError, match="expected"):
        parse_override(text)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_a_trip_through_json(name):
    config = get_preset(name)
    assert config.name == name
    assert from_dict(ModelConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_replace_changes_nested_keys_only():
    base = get_preset("sen2_mtc_new")
    changed = base.replace(name="other", network={"use_fusion": False}, diffusion={"steps": 7})
    assert changed.name == "other"
    assert not changed.network.use_fusion
    assert changed.network.widths == base.network.widths
    assert changed.diffusion.steps == 7
    assert changed.sampling == base.sampling
    with pytest.raises(ConfigError, match=r"unknown key nework; did you mean network\?"):
        base.replace(nework={})
    with pytest.raises(ConfigError, match=r"unknown key network\.wdths; did you mean widths\?"):
        base.replace(network={"wdths": (1,)})


def test_values_that_do_not_fit_together_are_refused_when_merged():
    with pytest.raises(ConfigError, match="kernel is 4"):
        get_preset("small").replace(network={"kernel": 4})
    # Two keys that only fit together are changed together.
    assert get_preset("small").replace(
        network={"widths": (16, 32), "blocks": (1, 1), "cloud_widths": (8,), "refinement_widths": (8,)}
    )


def test_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown preset 'sen2_mtc'; did you mean sen2_mtc_new\?"):
        get_preset("sen2_mtc")
