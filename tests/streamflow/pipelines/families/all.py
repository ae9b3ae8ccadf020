"""Every family that is run."""

from __future__ import annotations

from tests.streamflow.pipelines.families.cogvideox import COGVIDEOX
from tests.streamflow.pipelines.families.family import Family
from tests.streamflow.pipelines.families.flux import FLUX
from tests.streamflow.pipelines.families.flux2 import FLUX2
from tests.streamflow.pipelines.families.hidream import HIDREAM
from tests.streamflow.pipelines.families.hunyuan_video import HUNYUAN_VIDEO
from tests.streamflow.pipelines.families.hunyuan_video_15 import HUNYUAN_VIDEO_15
from tests.streamflow.pipelines.families.kandinsky5 import KANDINSKY5
from tests.streamflow.pipelines.families.ltx import LTX
from tests.streamflow.pipelines.families.ltx2 import LTX2
from tests.streamflow.pipelines.families.mochi import MOCHI
from tests.streamflow.pipelines.families.more import MORE
from tests.streamflow.pipelines.families.qwen_image import QWEN_IMAGE
from tests.streamflow.pipelines.families.sd3 import SD3
from tests.streamflow.pipelines.families.wan import WAN

_LARGE = (FLUX, SD3, WAN, QWEN_IMAGE, LTX, HUNYUAN_VIDEO, COGVIDEOX)
_NEWER = (MOCHI, FLUX2, HUNYUAN_VIDEO_15, LTX2, KANDINSKY5, HIDREAM)

FAMILIES: tuple[Family, ...] = (*_LARGE, *MORE, *_NEWER)
