"""The public surface: every name is there, says what it guarantees, and is where it is said to be."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

import streamflow
from streamflow import errors
from streamflow.host_weights import errors as host_weight_errors
from streamflow.ranks import errors as rank_errors
from streamflow.stages import errors as stage_errors
from streamflow.stages.errors import StreamflowError
from streamflow.store import errors as store_errors
from streamflow.weights import errors as weight_errors

NAMES = [name for name in streamflow.__all__ if name != "__version__"]
ERRORS: set[type[BaseException]] = {
    cls
    for module in (errors, stage_errors, weight_errors, store_errors, host_weight_errors, rank_errors)
    for cls in vars(module).values()
    if inspect.isclass(cls) and issubclass(cls, BaseException) and cls.__module__ == module.__name__
}


def test_the_names_are_sorted_and_distinct() -> None:
    assert sorted(set(streamflow.__all__)) == sorted(streamflow.__all__)
    assert len(set(streamflow.__all__)) == len(streamflow.__all__)


@pytest.mark.parametrize("name", streamflow.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(streamflow, name) is not None
    assert name in dir(streamflow)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_says_what_it_guarantees(name: str) -> None:
    text = inspect.getdoc(getattr(streamflow, name))
    assert text
    assert text.strip().splitlines()[0].rstrip(".").strip()
    assert "TODO" not in text


def members(cls: type) -> list[tuple[str, Any]]:
    return [
        (name, value)
        for name, value in vars(cls).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, (property, classmethod)))
    ]


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isclass(getattr(streamflow, name))])
def test_every_public_method_and_property_says_what_it_guarantees(name: str) -> None:
    cls = getattr(streamflow, name)
    undocumented = [member for member, value in members(cls) if not inspect.getdoc(value)]
    assert undocumented == []


@pytest.mark.parametrize("name", ["offload", "open_offload", "open_streamed", "start_offload"])
def test_every_argument_of_a_public_function_has_a_type(name: str) -> None:
    signature = inspect.signature(getattr(streamflow, name))
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter.name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="opne_offload"):
        streamflow.opne_offload  # type: ignore[attr-defined]  # noqa: B018


def test_importing_everything_by_star_works_in_a_fresh_interpreter() -> None:
    """Names that are imported when they are used first have homes that exist, without anything imported before."""
    code = "from streamflow import *\nimport streamflow\nprint(all(name in globals() for name in streamflow.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("error", sorted(ERRORS, key=str), ids=str)
def test_every_error_refines_a_builtin_and_the_base_of_all(error: type[BaseException]) -> None:
    assert inspect.getdoc(error)
    if error.__name__ == "StopForward":  # not to be caught by `except Exception`
        assert not issubclass(error, Exception)
        return
    assert issubclass(error, StreamflowError)
    builtin = [base for base in error.__mro__ if base.__module__ == "builtins"]
    assert error in (StreamflowError, store_errors.StoreError) or builtin[0] not in (Exception, BaseException, object)
