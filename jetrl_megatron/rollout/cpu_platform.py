"""The CPU platform that `platform.activate` names; imports SGLang, so it is a module of its own."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class JetrlCpuPlatform(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "jetrl"

    def get_compile_backend(self, mode: Any = None) -> str:
        return "eager"

    def apply_server_args_defaults(self, server_args: Any) -> None: ...
