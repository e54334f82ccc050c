"""Layers of each pipeline stage: equally many, or as `override_transformer_config` says.

The keys are megatron-core's. A model chunk is a range of consecutive layers; chunk i is on stage i mod p of p stages,
so that with several chunks on a stage the pipeline is interleaved (arXiv:2104.04473).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from verl.config.megatron_flags import PIPELINE_LAYOUT
from verl.config.problems import Problem

_FIRST, _LAST, _EMBEDDING, _LOSS, _LAYOUT = PIPELINE_LAYOUT
_VIRTUAL = "virtual_pipeline_model_parallel_size"
_GROUP_SIZE = "microbatch_group_size_per_vp_stage"
_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_REPETITION = re.compile(r"([EtmL|])\*(\d+)")
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def layout_of_chunks(layout: object) -> list[str] | None:
    """Return the letters of each chunk of `pipeline_model_parallel_layout`; None if it is none.

    E is the embedding, t a layer, L the loss (with the norm before it), m a head of multi-token prediction; ``x*3`` and
    ``(xy|)*3`` repeat. A list of lists names them (embedding, decoder, loss, mtp) instead.
    """
    if isinstance(layout, str):
        text = layout.replace(",", "").replace(" ", "")
        for pattern in (_GROUP, _REPETITION):
            text = pattern.sub(lambda match: match[1] * int(match[2]), text)
        return text.split("|") if re.fullmatch(r"[EtmL|]+", text) else None
    if not isinstance(layout, Sequence) or not all(isinstance(chunk, Sequence) for chunk in layout):
        return None
    chunks = [[_LETTERS.get(str(part).strip().lower()) for part in chunk] for chunk in layout]
    return None if any(None in chunk for chunk in chunks) else ["".join(map(str, chunk)) for chunk in chunks]


def chunks_per_stage(override: Mapping[str, object], stages: int, virtual: int | None) -> int:
    """Return the model chunks on each stage: of `pipeline_model_parallel_layout`, else of the virtual size."""
    chunks = layout_of_chunks(override.get(_LAYOUT))
    return (virtual or 1) if chunks is None else max(1, len(chunks) // stages)


def layers_of_chunks(override: Mapping[str, object], stages: int, virtual: int | None, layers: int) -> list[int] | None:
    """Return the number of layers of each chunk, in the order of the layers; None if the keys do not divide them.

    Args:
        override: entries of `override_transformer_config`.
        stages: of the pipeline.
        virtual: chunks on each stage, if the layout does not say so.
        layers: of the model.
    """
    chunks = layout_of_chunks(override.get(_LAYOUT))
    if chunks is not None:
        counts = [chunk.count("t") for chunk in chunks]
        return counts if sum(counts) == layers else None
    pieces = virtual or 1
    first, last = (_count(override.get(key)) for key in (_FIRST, _LAST))
    extra = int(override.get(_EMBEDDING) is True), int(override.get(_LOSS) is True)
    middle = stages - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0) + sum(extra)
    if rest < 0 or (rest and not middle) or (middle and (rest % middle or not rest)):
        return None
    stage_layers = [rest // middle] * middle if middle else []
    stage_layers = [*([] if first is None else [first]), *stage_layers, *([] if last is None else [last])]
    if any(count % pieces for count in stage_layers):
        return None
    counts = [count // pieces for count in stage_layers] * pieces
    counts[0] -= extra[0]
    counts[-1] -= extra[1]
    return counts if min(counts) >= 0 else None


def layout_problems(override: Mapping[str, object], stages: int, virtual: int | None, path: str) -> Iterator[Problem]:
    """Yield values of :data:`PIPELINE_LAYOUT` that are wrong for any model.

    Args:
        override: entries of `override_transformer_config`.
        stages: of the pipeline.
        virtual: chunks on each stage, as configured.
        path: key of `override_transformer_config`.
    """
    for key in (_FIRST, _LAST):
        if (value := override.get(key)) is not None and _count(value) is None:
            yield Problem(f"{path}.{key}", value, "it is a number of layers", "a whole number from 1, null")
    for key in (_EMBEDDING, _LOSS):
        if not isinstance(value := override.get(key), bool | None):
            yield Problem(f"{path}.{key}", value, "this value cannot be used here", "true, false, null")
    group = override.get(_GROUP_SIZE)
    if isinstance(group, int) and group < stages and chunks_per_stage(override, stages, virtual) > 1:
        cause = f"an interleaved pipeline of {stages} stages takes at least as many passes at once"
        yield Problem(f"{path}.{_GROUP_SIZE}", group, cause, f"{stages} or more, null")
    uneven = [key for key in PIPELINE_LAYOUT if override.get(key) not in (None, False)]
    kinds = {(_FIRST, _LAST), (_EMBEDDING, _LOSS), (_LAYOUT,)}
    if sum(any(key in uneven for key in kind) for kind in kinds) > 1:
        cause = f"it divides the layers, and so does {', '.join(uneven[:-1])}"
        yield Problem(f"{path}.{uneven[-1]}", override[uneven[-1]], cause, "null", "set one kind of these keys")
        return
    if (layout := override.get(_LAYOUT)) is not None:
        yield from _layout_problems(layout, stages, virtual, f"{path}.{_LAYOUT}")
    elif stages == 1:
        for key in (key for key in (_FIRST, _LAST) if key in uneven):
            cause = "there is no pipeline to divide with pipeline_model_parallel_size=1"
            yield Problem(f"{path}.{key}", override[key], cause, "null", "or a pipeline_model_parallel_size above 1")


def _layout_problems(layout: object, stages: int, virtual: int | None, key: str) -> Iterator[Problem]:
    chunks = layout_of_chunks(layout)
    example = "for instance 'Ett|ttL' for two stages of two layers each"
    if chunks is None:
        cause = (
            "it is made of E (embedding), t (a layer), m (a head of multi-token prediction) and L (loss), with | "
            "between stages"
        )
        yield Problem(key, layout, cause, example)
        return
    letters = "".join(chunks)
    if "m" in letters and not re.fullmatch("t*m+L", chunks[-1]):
        cause = "heads of multi-token prediction (m) are on the last stage, before its L"
        yield Problem(key, layout, cause, "for instance 'Ett|ttmL'")
    elif not re.fullmatch("Et*m*L", letters):
        yield Problem(key, layout, "it has one E, which is first, and one L, which is last", example)
    elif stages == 1 and len(chunks) > 1:
        cause = f"it has {len(chunks)} stages, and pipeline_model_parallel_size=1 is no pipeline"
        yield Problem(key, layout, cause, "null", "or a pipeline_model_parallel_size above 1")
    elif len(chunks) % stages:
        cause = f"it has {len(chunks)} stages, which pipeline_model_parallel_size={stages} does not divide"
        yield Problem(key, layout, cause, f"a multiple of {stages} stages")
    elif virtual not in (None, len(chunks) // stages):
        cause = (
            f"it has {len(chunks) // stages} model chunks a stage, and virtual_pipeline_model_parallel_size={virtual}"
        )
        yield Problem(key, layout, cause, f"{virtual * stages} stages, or virtual_pipeline_model_parallel_size=null")


def division_problem(
    override: Mapping[str, object], stages: int, virtual: int | None, layers: int, sizes: str
) -> Problem | None:
    """Return what keeps a model of ``layers`` layers from its stages, with the sizes that fit; None if it fits.

    ``sizes`` is the section of the layout's keys; the other arguments are those of :func:`layers_of_chunks`.
    """

    def fits(stages: int = stages, **changes: object) -> bool:
        return layers_of_chunks({**override, **changes}, stages, virtual, layers) is not None

    if fits():
        return None
    path, pieces = f"{sizes}.override_transformer_config", virtual or 1
    by_pieces = "" if pieces == 1 else f" with {pieces} model chunks on each"
    if (chunks := layout_of_chunks(override.get(_LAYOUT))) is not None:
        cause = f"it has {''.join(chunks).count('t')} layers (t), and the model has {layers}"
        return Problem(f"{path}.{_LAYOUT}", override[_LAYOUT], cause, f"{layers} times t")
    for key in (_FIRST, _LAST):
        if override.get(key) is not None:
            cause = f"the model's {layers} layers do not divide so over {stages} stages{by_pieces}"
            allowed = [n for n in range(1, layers) if fits(**{key: n})]
            return Problem(f"{path}.{key}", override[key], cause, ", ".join(map(str, allowed[:12])) or "null")
    key = f"{sizes}.pipeline_model_parallel_size"
    counted = [word for entry, word in ((_EMBEDDING, "embedding"), (_LOSS, "loss")) if override.get(entry) is True]
    if counted:
        cause = f"it does not divide the model's {layers} layers, its {' and '.join(counted)} counted as one each"
        allowed = [n for n in range(1, layers + 3) if fits(n)]
        return Problem(key, stages, cause + by_pieces, ", ".join(map(str, allowed)))
    product = "it" if pieces == 1 else f"{key.rpartition('.')[2]} × {_VIRTUAL}={stages * pieces}"
    cause, allowed = f"{product} does not divide the model's {layers} layers", f"divisors of {layers}"
    remedy = f"or set {path}.{_FIRST} or {_LAST}" if stages > 1 else ""
    return Problem(key, stages, cause, allowed if pieces == 1 else f"{allowed} in all", remedy)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
