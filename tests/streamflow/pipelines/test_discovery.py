"""Components are found by what pipelines declare, in their families' own classes and in any object like them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from streamflow.discovery import find_blocks
from streamflow.errors import PlanError
from streamflow.pipelines.discovery import Component, find_components, is_pipeline
from streamflow.pipelines.policy import Behaviour, Role
from streamflow.pipelines.roles import role_of
from streamflow.plan import OffloadPlan
from tests.streamflow.pipelines.families.all import FAMILIES
from tests.streamflow.pipelines.families.family import Family, modules_of

#: What is no encoder of all that is staged.
ROLES = {"vae": Role.VAE, "audio_vae": Role.VAE, "connectors": Role.PART, "vocoder": Role.PART}


def behaviours(found: tuple[Component, ...]) -> dict[str, Behaviour]:
    return {component.name: component.declared.behaviour for component in found}


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_what_a_familys_pipeline_declares(family: Family) -> None:
    pipeline = family.build()
    found = find_components(pipeline)
    assert behaviours(found) == {
        **dict.fromkeys(family.staged, Behaviour.STAGED),
        **dict.fromkeys(family.streamed, Behaviour.STREAMED),
    }
    assert [component.name for component in found] == in_declared_order(pipeline)
    for component in found:
        if component.name in family.streamed:
            assert len(find_blocks(component.module)) == family.streamed[component.name]
            assert component.declared.role is Role.TRANSFORMER
        else:
            assert component.declared.role is ROLES.get(component.name, Role.ENCODER)


def in_declared_order(pipeline: Any) -> list[str]:
    """The components that there are: those of the pipeline's sequence first, then those that it leaves out."""
    declared, there = pipeline.model_cpu_offload_seq.split("->"), modules_of(pipeline)
    return [name for name in declared if name in there] + [name for name in there if name not in declared]


class Model(nn.Module):
    """Three blocks and something before them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def pipeline_of(**components: Any) -> Any:
    return SimpleNamespace(components={**components, "scheduler": object(), "tokenizer": None})


def test_a_module_is_no_pipeline_and_neither_is_what_has_no_modules() -> None:
    assert not is_pipeline(Model())
    assert not is_pipeline(pipeline_of())
    assert not is_pipeline(SimpleNamespace(components=[Model()]))
    assert not is_pipeline(object())
    assert is_pipeline(pipeline_of(transformer=Model()))


def test_what_is_excluded_is_resident() -> None:
    pipeline = pipeline_of(transformer=Model(), safety_checker=Model(), vae=Model())
    pipeline._exclude_from_cpu_offload = ["safety_checker"]
    assert behaviours(find_components(pipeline)) == {
        "transformer": Behaviour.STREAMED,
        "safety_checker": Behaviour.RESIDENT,
        "vae": Behaviour.STAGED,
    }


def test_a_module_under_two_names_is_one_component() -> None:
    model = Model()
    assert [component.name for component in find_components(pipeline_of(transformer=model, transformer_2=model))] == [
        "transformer"
    ]


def test_a_transformer_without_blocks_is_staged() -> None:
    pipeline = pipeline_of(transformer=Model(), unet=nn.Linear(2, 2))
    found = find_components(pipeline)
    assert behaviours(found) == {"transformer": Behaviour.STREAMED, "unet": Behaviour.STAGED}
    assert found[1].declared.role is Role.PART


def test_a_pipeline_of_which_nothing_would_stream_is_refused() -> None:
    with pytest.raises(PlanError, match=r"nothing of SimpleNamespace would stream.*vae") as caught:
        find_components(pipeline_of(vae=Model()))
    assert caught.value.candidates == ("vae",)


PLAN = OffloadPlan(
    stacks=("transformer.blocks",), encoder_stacks=("text_encoder.blocks",), on_demand=("vae",), resident_eligible=()
)


def test_a_plan_says_what_each_component_does() -> None:
    pipeline = pipeline_of(transformer=Model(), text_encoder=Model(), vae=Model(), safety_checker=Model())
    for found in (find_components(pipeline, PLAN), find_components(declaring(pipeline))):
        assert behaviours(found) == {
            "transformer": Behaviour.STREAMED,
            "text_encoder": Behaviour.STREAMED,
            "vae": Behaviour.STAGED,
            "safety_checker": Behaviour.RESIDENT,
        }
        roles = {component.name: component.declared.role for component in found}
        assert roles["text_encoder"] is Role.ENCODER
        assert roles["transformer"] is Role.TRANSFORMER
        assert [component.plan for component in found[:2]] == [
            OffloadPlan(stacks=("blocks",), resident_eligible=()),
            OffloadPlan(stacks=("blocks",), resident_eligible=()),
        ]


def declaring(pipeline: Any) -> Any:
    pipeline.streamflow_plan = PLAN
    return pipeline


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (OffloadPlan(stacks=("transfromer.blocks",)), r"no component 'transfromer'.*transformer, vae"),
        (OffloadPlan(stacks=("transformer",)), "a component and no block list in one"),
        (OffloadPlan(stacks=("transformer.blocks",), on_demand=("vea",)), "no component 'vea'"),
    ],
)
def test_a_plan_that_names_what_is_not_there_is_refused(plan: OffloadPlan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        find_components(pipeline_of(transformer=Model(), vae=Model()), plan)


@pytest.mark.parametrize(
    ("name", "class_name", "library", "role"),
    [
        ("transformer_2", "WanTransformer3DModel", "diffusers", Role.TRANSFORMER),
        ("unet", "UNet2DConditionModel", "diffusers", Role.TRANSFORMER),
        ("controlnet", "FluxControlNetModel", "diffusers", Role.TRANSFORMER),
        ("prior", "PriorTransformer", "diffusers", Role.TRANSFORMER),
        ("prior_text_encoder", "CLIPTextModel", "transformers", Role.ENCODER),
        ("text_encoder_3", "T5EncoderModel", "transformers", Role.ENCODER),
        ("image_encoder", "CLIPVisionModel", "transformers", Role.ENCODER),
        ("safety_checker", "StableDiffusionSafetyChecker", "transformers", Role.ENCODER),
        ("vae", "AutoencoderKL", "diffusers", Role.VAE),
        ("audio_vae", "Oobleck", "diffusers", Role.VAE),
        ("movq", "VQModel", "diffusers", Role.VAE),
        ("connectors", "LTX2TextConnectors", "diffusers", Role.PART),
        ("vocoder", "Vocoder", "", Role.PART),
    ],
)
def test_roles(name: str, class_name: str, library: str, role: Role) -> None:
    assert role_of(name, class_name, library) is role
