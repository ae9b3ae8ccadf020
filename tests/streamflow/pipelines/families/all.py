"""Every family that is run."""

from __future__ import annotations

from tests.streamflow.pipelines.families.cogvideox import COGVIDEOX
from tests.streamflow.pipelines.families.family import Family
from tests.streamflow.pipelines.families.flux import FLUX
from tests.streamflow.pipelines.families.hunyuan_video import HUNYUAN_VIDEO
from tests.streamflow.pipelines.families.ltx import LTX
from tests.streamflow.pipelines.families.more import MORE
from tests.streamflow.pipelines.families.qwen_image import QWEN_IMAGE
from tests.streamflow.pipelines.families.sd3 import SD3
from tests.streamflow.pipelines.families.wan import WAN

FAMILIES: tuple[Family, ...] = (FLUX, SD3, WAN, QWEN_IMAGE, LTX, HUNYUAN_VIDEO, COGVIDEOX, *MORE)
