"""Entry points of inference engines: each registers an attention backend and imports neither torch nor kernels.

vLLM and SGLang call these functions in every process, by the entry points of this package.
"""

import os

#: An existing backend of SGLang that the backend of this package replaces, for models that accept a list of names only.
SGLANG_REPLACES = "TILEWRIGHT_SGLANG_REPLACES"


def register_vllm() -> None:
    """Registers :class:`tilewright.vllm.TilewrightBackend` as vLLM's ``AttentionBackendEnum.CUSTOM``.

    ``vllm serve MODEL --attention-backend CUSTOM`` selects it.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "tilewright.vllm.TilewrightBackend")


def register_sglang() -> None:
    """Registers :class:`tilewright.sglang.TilewrightAttnBackend` as SGLang's attention backend ``tilewright``.

    ``python -m sglang.launch_server --attention-backend tilewright`` selects it. The environment variable
    ``TILEWRIGHT_SGLANG_REPLACES=triton`` registers it under that name, too.
    """
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if "tilewright" not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices(["tilewright"])
    for name in ("tilewright", os.environ.get(SGLANG_REPLACES)):
        if name:
            register_attention_backend(name)(_create_sglang_backend)


def _create_sglang_backend(runner):
    """The backend of a model runner of SGLang."""
    from ..sglang import TilewrightAttnBackend

    return TilewrightAttnBackend(runner)
