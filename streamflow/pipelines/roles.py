"""What a component of a pipeline is for, seen from its name and its class. Pure: no torch, no clock."""

from __future__ import annotations

from streamflow.pipelines.policy import Role

#: How components that denoise are called: these are what streaming is for.
_TRANSFORMERS = ("transformer", "unet", "prior", "controlnet", "dit", "denoiser")
_VAE_CLASSES = ("Autoencoder", "AsymmetricAutoencoder", "VQModel", "ConsistencyDecoder")


def role_of(name: str, class_name: str, library: str) -> Role:
    """The role of the component ``name`` of a pipeline; ``library`` is the package that its class comes from."""
    if class_name.startswith(_VAE_CLASSES) or name.startswith("vae") or name.endswith("vae"):
        return Role.VAE
    if name.startswith(_TRANSFORMERS) and library != "transformers":
        return Role.TRANSFORMER
    if "encoder" in name or library == "transformers":
        return Role.ENCODER
    return Role.PART
