"""The ``components`` option, rule by rule."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.errors import ComponentPolicyError, ComponentPolicyTypeError
from streamflow.pipelines.policy import Behaviour, DeclaredComponent, Role, checked_policy, resolve_behaviours

STREAMED, STAGED, RESIDENT = Behaviour.STREAMED, Behaviour.STAGED, Behaviour.RESIDENT
DECLARED = (
    DeclaredComponent("text_encoder", Role.ENCODER, STAGED),
    DeclaredComponent("text_encoder_2", Role.ENCODER, STREAMED),
    DeclaredComponent("transformer", Role.TRANSFORMER, STREAMED),
    DeclaredComponent("vae", Role.VAE, STAGED),
    DeclaredComponent("safety_checker", Role.PART, RESIDENT),
)
AS_DECLARED = {component.name: component.behaviour for component in DECLARED}


@pytest.mark.parametrize("policy", [None, {}, {"vae": True}, {"default": True}])
def test_what_is_declared_stays(policy: dict[str, bool] | None) -> None:
    assert resolve_behaviours(DECLARED, policy) == AS_DECLARED


def test_false_keeps_a_component_resident_and_no_other() -> None:
    expected = {**AS_DECLARED, "vae": RESIDENT}
    assert resolve_behaviours(DECLARED, {"vae": False}) == expected
    assert list(resolve_behaviours(DECLARED, {"vae": False})) == list(AS_DECLARED)


def test_false_takes_an_encoder_out_of_streaming_too() -> None:
    assert resolve_behaviours(DECLARED, {"text_encoder_2": False})["text_encoder_2"] is RESIDENT


def test_the_default_is_for_all_but_transformers() -> None:
    found = resolve_behaviours(DECLARED, {"default": False})
    assert found == {**dict.fromkeys(AS_DECLARED, RESIDENT), "transformer": STREAMED}


def test_an_exact_name_comes_before_the_default() -> None:
    found = resolve_behaviours(DECLARED, {"default": False, "vae": True})
    assert (found["vae"], found["text_encoder"]) == (STAGED, RESIDENT)
    found = resolve_behaviours(DECLARED, {"default": True, "vae": False})
    assert (found["vae"], found["text_encoder"]) == (RESIDENT, STAGED)


def test_true_permits_no_more_than_is_declared() -> None:
    assert resolve_behaviours(DECLARED, {"safety_checker": True})["safety_checker"] is RESIDENT


@pytest.mark.parametrize("policy", ["vae", ["vae"], {"vae"}, 1, True, [("vae", True)]])
def test_what_is_no_mapping_is_a_type_error(policy: Any) -> None:
    with pytest.raises(ComponentPolicyTypeError, match="map names to booleans"):
        checked_policy(policy)


@pytest.mark.parametrize("key", ["", 1, None, ("vae",), b"vae"])
def test_a_key_that_is_no_name_is_a_type_error(key: Any) -> None:
    with pytest.raises(ComponentPolicyTypeError, match="must be a component's name"):
        checked_policy({key: True})


@pytest.mark.parametrize("value", [0, 1, None, "no", 0.0])
def test_a_value_that_is_no_boolean_is_a_type_error(value: Any) -> None:
    with pytest.raises(ComponentPolicyTypeError, match=r"components\['vae'\] must be True or False"):
        checked_policy({"vae": value})


def test_any_mapping_will_do_and_none_stays_none() -> None:
    assert checked_policy(UserDict(vae=False)) == {"vae": False}
    assert checked_policy(None) is None


def test_an_unknown_name_is_a_value_error_that_lists_the_known_ones() -> None:
    with pytest.raises(
        ComponentPolicyError, match=r"no encoder or VAE 'vea'.*text_encoder, text_encoder_2, vae"
    ) as info:
        resolve_behaviours(DECLARED, {"vea": False})
    assert info.value.known == ("text_encoder", "text_encoder_2", "vae", "safety_checker")


@pytest.mark.parametrize("value", [True, False])
def test_a_transformers_name_is_a_value_error(value: bool) -> None:
    with pytest.raises(ComponentPolicyError, match="'transformer' is a transformer, which always streams"):
        resolve_behaviours(DECLARED, {"transformer": value})


def test_a_policy_without_streaming_is_a_value_error() -> None:
    still = [staged_only(component) for component in DECLARED]
    with pytest.raises(ComponentPolicyError, match="nothing streams"):
        resolve_behaviours(still, {"vae": False})
    assert set(resolve_behaviours(still, {}).values()) == {STAGED, RESIDENT}


def staged_only(component: DeclaredComponent) -> DeclaredComponent:
    """The same component, staged where it was streamed."""
    staged = STAGED if component.behaviour is STREAMED else component.behaviour
    return DeclaredComponent(component.name, component.role, staged)


def test_a_policy_for_a_transformer_alone_is_a_value_error() -> None:
    alone = [DeclaredComponent("Model", Role.TRANSFORMER, STREAMED)]
    with pytest.raises(ComponentPolicyError, match="there are none; components may name: nothing"):
        resolve_behaviours(alone, {"default": False})


NAMES = st.sampled_from(["text_encoder", "text_encoder_2", "vae", "safety_checker", "default"])


@given(st.dictionaries(NAMES, st.booleans()))
def test_a_component_does_what_is_declared_or_is_resident(policy: dict[str, bool]) -> None:
    found = resolve_behaviours(DECLARED, policy)
    assert list(found) == list(AS_DECLARED)
    for name, behaviour in found.items():
        permitted = name == "transformer" or policy.get(name, policy.get("default", True))
        assert behaviour is (AS_DECLARED[name] if permitted else RESIDENT)
