"""Entry points of inference engines: each registers an attention backend and imports neither torch nor kernels.

vLLM and SGLang call these functions in every process, by the entry points of this package. A release with other registries gets a
warning and works without the backend.
"""

import os
import warnings

#: An existing backend of SGLang that the backend of this package replaces, for models that accept a list of names only.
SGLANG_REPLACES = "TILEWRIGHT_SGLANG_REPLACES"


def register_vllm() -> None:
    """Registers :class:`tilewright.vllm.TilewrightBackend` as vLLM's ``AttentionBackendEnum.CUSTOM``.

    ``vllm serve MODEL --attention-backend CUSTOM`` selects it.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as why:
        _warn("vLLM", "0.33", why)
        return
    register_backend(AttentionBackendEnum.CUSTOM, "tilewright.vllm.TilewrightBackend")


def register_sglang() -> None:
    """Registers :class:`tilewright.sglang.TilewrightAttnBackend` as SGLang's attention backend ``tilewright``.

    ``python -m sglang.launch_server --attention-backend tilewright`` selects it. The environment variable
    ``TILEWRIGHT_SGLANG_REPLACES=triton`` registers it under that name, too.
    """
    try:
        from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError as why:
        _warn("SGLang", "0.5.23", why)
        return
    if "tilewright" not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices(["tilewright"])
    for name in ("tilewright", os.environ.get(SGLANG_REPLACES)):
        if name:
            register_attention_backend(name)(_create_sglang_backend)


def _warn(engine: str, release: str, why: ImportError) -> None:
    warnings.warn(f"tilewright: the attention backend is not registered: {why}, expected {engine} {release}", stacklevel=3)


def _create_sglang_backend(runner):
    """The backend of a model runner of SGLang."""
    from ..sglang import TilewrightAttnBackend

    return TilewrightAttnBackend(runner)
