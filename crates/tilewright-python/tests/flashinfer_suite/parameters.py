"""The parameters of FlashInfer's functions, read from its source, beside those of ``tilewright.flashinfer``."""

import ast
import enum
import importlib
import inspect

#: Names with other parameters: those that always refuse, or whose arguments have no effect; operators with hints among their
#: ``**default_params``; and ``plan``, which names arguments that FlashInfer takes as ``**kwargs``.
_OTHERS = {
    "fmha_v2_prefill_deepseek", "fmha_v2_prefill_sm120", "single_decode_with_kv_cache_with_jit_module",
    "single_prefill_with_kv_cache_with_jit_module", "BatchDecodeMlaWithPagedKVCacheWrapper.__init__",
    "BatchDecodeWithPagedKVCacheWrapper.plan", "BatchDecodeWithPagedKVCacheWrapper.workspace_size",
    "BatchPrefillWithPagedKVCacheWrapper.workspace_size", "FP4Tensor.__init__", "FusedProbsMinPSampleOp.__init__",
    "FusedProbsTopKSampleOp.__init__", "FusedProbsTopKTopPSampleOp.__init__", "FusedProbsTopPSampleOp.__init__",
    "FusedTemperatureSoftmaxOp.__init__", "determine_attention_backend",
}
#: Parameters that are only among keyword arguments, so that engines which look for them in the signature take other paths.
_HIDDEN = {"BatchMLAPagedAttentionWrapper.run": "ckv_scale_arr"}


def differences(checkout) -> list:
    """A line per public function or method, found in both packages, whose parameters differ in name, order, kind or default.
    FlashInfer's order may be followed by further parameters."""
    lines = []
    for path in sorted((checkout / "flashinfer").rglob("*.py")):
        module = ".".join(path.relative_to(checkout).with_suffix("").parts).removesuffix(".__init__")
        try:
            ours = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        lines += _differences(module, _functions(ast.parse(path.read_text(encoding="utf-8")).body), ours)
    return lines


def _functions(body, owner="") -> dict:
    """The definitions of a module by name, with those of the methods of its classes; the last of several counts."""
    found = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found |= _functions(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__init__"):
            found[owner + node.name] = node.args
    return found


def _differences(module, functions, ours) -> list:
    lines = []
    for name, theirs in functions.items():
        found = ours
        for part in name.split("."):
            found = getattr(found, part, None)
        if not inspect.isfunction(found) or name in _OTHERS:
            continue
        positional, named = theirs.posonlyargs + theirs.args, theirs.kwonlyargs
        defaults = [None] * (len(positional) - len(theirs.defaults)) + theirs.defaults + theirs.kw_defaults
        expected = [(one.arg, _text(default)) for one, default in zip(positional + named, defaults, strict=True)]
        parameters = list(inspect.signature(found).parameters.values())
        order = [one for one in parameters if one.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD][: len(positional)]
        order += [one for one in parameters if one.name in {two.arg for two in named}]
        expected = [one for one in expected if one[0] != _HIDDEN.get(name)]
        given = [(one.name, _default(one.default)) for one in order]
        if given != expected:
            lines.append(f"{module}.{name}: {sorted(set(given) ^ set(expected), key=str) or 'order of parameters'}")
    return lines


def _default(value):
    """The text of a value, None without one."""
    if value is inspect.Parameter.empty:
        return None
    return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else str(value)


def _text(default):
    """The text of a default value, None without one."""
    if default is None:
        return None
    try:
        return str(ast.literal_eval(default))
    except ValueError:
        return ast.unparse(default)
