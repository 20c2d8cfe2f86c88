"""The error tree, suggestions, and the one way to ask for an optional package."""

from __future__ import annotations

import pytest

from sader import errors


def test_every_error_is_a_sader_error_and_a_builtin_one():
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.SaderError)]
    assert len(kinds) >= 10
    for kind in kinds:
        assert kind.__doc__
        if kind is not errors.SaderError:
            assert issubclass(kind, ValueError | RuntimeError | OSError | ImportError), kind


def test_require_returns_the_module_or_the_install_command():
    assert errors.require("json", extra="geo", purpose="reading") is __import__("json")
    with pytest.raises(errors.MissingDependencyError) as caught:
        errors.require("no_such_package.part", extra="geo", purpose="reading GeoTIFF")
    assert str(caught.value) == 'reading GeoTIFF needs no_such_package. Run: pip install "sader[geo]"'
    assert isinstance(caught.value, ImportError)


def test_suggestions():
    known = ["small", "sen2_mtc_new", "sen12mscrts_ea"]
    assert errors.did_you_mean("smal", known) == "; did you mean small?"
    assert errors.did_you_mean("sen2_mtc_nwe", known) == "; did you mean sen2_mtc_new?"
    assert errors.did_you_mean("zzz", known) == "; known: sen12mscrts_ea, sen2_mtc_new, small"
