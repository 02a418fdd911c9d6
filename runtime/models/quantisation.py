"""What ``quantization_config`` says of a checkpoint's linears: which are quantised, how their
weights are stored, and how their inputs are rounded before they are multiplied.

Read are ``quant_method=fp8`` (a scale per block, as DeepSeek-V3 has it, or one per tensor) and the
eight-bit schemes of ``compressed-tensors``. Everything else is refused by field and value: a target
that is computed differently from how it is served gives features of another model.

Shape legend: O output features, I input features.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from runtime.models.fields import read_choice
from runtime.stored_weight import BlockSize

Kind = Literal["int8", "fp8"]
Strategy = Literal["tensor", "channel", "group", "block"]

_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_EMBEDDING = "model.embed_tokens"
_LM_HEAD = "lm_head"


@dataclass(frozen=True)
class WeightScheme:
    """``block``: outputs and inputs that share a scale; -1 for all of them."""

    kind: Kind
    strategy: Strategy
    block: BlockSize
    is_symmetric: bool = True
    is_packed: bool = False  # four values in an int32

    def block_of(self, shape: tuple[int, ...]) -> BlockSize:
        """In outputs and inputs of a weight ``[O, I]``."""
        rows, columns = self.block
        return shape[0] if rows < 0 else rows, shape[1] if columns < 0 else columns


@dataclass(frozen=True)
class InputScheme:
    """How the inputs of a linear are rounded: with a scale per row or tensor, found as they come
    (``is_dynamic``) or stored with the weight.
    """

    kind: Kind
    per_token: bool
    is_dynamic: bool
    is_symmetric: bool = True


@dataclass(frozen=True)
class LinearScheme:
    """Of one linear. ``inputs`` ``None``: inputs stay what they are (W8A16)."""

    weights: WeightScheme
    inputs: InputScheme | None = None

    @property
    def label(self) -> str:
        """``int8-channel w8a8-token-dynamic`` and the like."""
        kind, strategy = self.weights.kind, self.weights.strategy
        if strategy == "group":
            strategy_text = f"group{self.weights.block[1]}"
        elif strategy == "block":
            strategy_text = "block{}x{}".format(*self.weights.block)
        else:
            strategy_text = strategy
        if self.inputs is None:
            return f"{kind}-{strategy_text} w8a16"
        scope = "token" if self.inputs.per_token else "tensor"
        how = "dynamic" if self.inputs.is_dynamic else "static"
        return f"{kind}-{strategy_text} w8a8-{scope}-{how}"


@dataclass(frozen=True)
class SchemeGroup:
    """``targets``: names of modules, ``re:`` patterns of them, or ``Linear`` for all linears."""

    targets: tuple[str, ...]
    scheme: LinearScheme


@dataclass(frozen=True)
class Quantisation:
    """A checkpoint's. ``by_stored_dtype``: a weight is quantised where it is stored in fp8, and the
    lists say nothing (``quant_method=fp8``).
    """

    method: Literal["fp8", "compressed-tensors"]
    groups: tuple[SchemeGroup, ...]
    ignore: tuple[str, ...] = ()
    scale_suffix: str = "_scale"  # of the name of a weight; what stored values are multiplied by
    by_stored_dtype: bool = False
    has_kv_scales: bool = False  # k_scale and v_scale beside the projections

    @property
    def label(self) -> str:
        """One line for manifests, reports and messages."""
        schemes = list(dict.fromkeys(group.scheme.label for group in self.groups))
        ignored = f"; not: {', '.join(self.ignore)}" if self.ignore else ""
        kv = "; fp8 K/V scales" if self.has_kv_scales else ""
        return f"{self.method} {' + '.join(schemes)}{ignored}{kv}"

    @property
    def kinds(self) -> frozenset[Kind]:
        """Of stored weights."""
        return frozenset(group.scheme.weights.kind for group in self.groups)

    @property
    def rounds_inputs(self) -> bool:
        """Whether any linear rounds what it reads."""
        return any(group.scheme.inputs is not None for group in self.groups)

    @property
    def multiplies_int8(self) -> bool:
        """Whether all of it can be computed as products of int8."""
        return all(
            scheme.inputs is not None
            and {scheme.weights.kind, scheme.inputs.kind} == {"int8"}
            and scheme.weights.is_symmetric
            and scheme.inputs.is_symmetric
            and scheme.weights.strategy in ("tensor", "channel")
            for scheme in (group.scheme for group in self.groups)
        )

    def scheme_of(self, tensor: str) -> LinearScheme | None:
        """Of the linear whose weight is ``tensor``; ``None`` where it is not quantised.

        Exact names have precedence over patterns, and those over ``Linear``.
        """
        module = tensor.removesuffix(".weight")
        if module in (tensor, _EMBEDDING):
            return None
        if any(rank_match(module, entry) is not None for entry in self.ignore):
            return None
        found: list[tuple[int, LinearScheme]] = []
        for group in self.groups:
            ranks = [rank_match(module, target) for target in group.targets]
            best = min((rank for rank in ranks if rank is not None), default=None)
            if best is not None:
                found.append((best, group.scheme))
        return min(found, key=lambda item: item[0])[1] if found else None


def rank_match(module: str, target: str) -> int | None:
    """0 for the module's name, 1 for a pattern, 2 for its class, ``None`` for no match."""
    if target == module:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target.removeprefix("re:"), module) else None
    return 2 if target == "Linear" else None


def read_quantisation(raw: Mapping[str, Any], source: str) -> Quantisation | None:
    """``None`` for an unquantised checkpoint. Raises ``ValueError`` naming the field, its value and
    what is allowed.
    """
    stated = raw.get("quantization_config")
    if stated is None:
        return None
    where = f"{source}: quantization_config"
    if not isinstance(stated, Mapping):
        raise ValueError(f"{where}={stated!r}; expected an object")
    method = read_choice(stated, "quant_method", ("fp8", "compressed-tensors"), where)
    return _read_fp8(stated, where) if method == "fp8" else _read_compressed(stated, where)


def _read_fp8(stated: Mapping[str, Any], where: str) -> Quantisation:
    block = stated.get("weight_block_size")
    if block is not None:
        is_pair = isinstance(block, list | tuple) and len(block) == 2
        if not is_pair or not all(type(size) is int and size > 0 for size in block):
            raise ValueError(
                f"{where}.weight_block_size={block!r}; allowed: two positive numbers, or none for "
                "one scale per tensor"
            )
        # Activations stay what they are: an engine that computes in fp8 rounds those too.
        weights = WeightScheme("fp8", "block", (block[0], block[1]))
        group = SchemeGroup(("Linear",), LinearScheme(weights))
        return Quantisation("fp8", (group,), scale_suffix="_scale_inv", by_stored_dtype=True)
    how = read_choice(stated, "activation_scheme", ("dynamic", "static"), where)
    inputs = InputScheme("fp8", per_token=how == "dynamic", is_dynamic=how == "dynamic")
    scheme = LinearScheme(WeightScheme("fp8", "tensor", (-1, -1)), inputs)
    return Quantisation("fp8", (SchemeGroup(("Linear",), scheme),), by_stored_dtype=True)


def _read_compressed(stated: Mapping[str, Any], where: str) -> Quantisation:
    stored = read_choice(stated, "format", _FORMATS, where)
    status = stated.get("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):
        raise ValueError(
            f"{where}.quantization_status={status!r}; allowed: 'compressed': save the model with "
            "its quantised weights"
        )
    for key in ("sparsity_config", "transform_config"):
        if stated.get(key):
            raise ValueError(f"{where}.{key}={stated[key]!r}; allowed: nothing")
    groups = stated.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"{where}.config_groups={groups!r}; expected one group or more")
    read = tuple(
        _read_group(group, f"{where}.config_groups.{name}", stored=str(stored))
        for name, group in groups.items()
    )
    ignore = stated.get("ignore") or []
    return Quantisation(
        "compressed-tensors",
        read,
        ignore=_names(ignore, f"{where}.ignore", classes=("Linear", "Embedding")),
        has_kv_scales=_read_kv(stated.get("kv_cache_scheme"), f"{where}.kv_cache_scheme"),
    )


def _read_group(group: Any, where: str, *, stored: str) -> SchemeGroup:
    if not isinstance(group, Mapping):
        raise ValueError(f"{where}={group!r}; expected an object")
    if group.get("output_activations") is not None:
        raise ValueError(
            f"{where}.output_activations={group['output_activations']!r}; allowed: null"
        )
    stored = str(group.get("format") or stored)
    if stored not in _FORMATS:
        raise ValueError(f"{where}.format={stored!r}; allowed: {', '.join(_FORMATS)}")
    weights = _read_weights(group.get("weights"), f"{where}.weights", stored=stored)
    inputs = None
    if group.get("input_activations") is not None:
        inputs = _read_inputs(group["input_activations"], f"{where}.input_activations")
        if inputs.kind != weights.kind:
            raise ValueError(
                f"{where}.input_activations.type: {inputs.kind} inputs of {weights.kind} weights; "
                "allowed: the same for both, or null"
            )
    targets = _names(group.get("targets"), f"{where}.targets", classes=("Linear",))
    return SchemeGroup(targets, LinearScheme(weights, inputs))


def _read_weights(raw: Any, where: str, *, stored: str) -> WeightScheme:
    kind = _read_kind(raw, where)
    allowed = ("tensor", "channel", "group", "block")
    strategy = cast(Strategy, read_choice(raw, "strategy", allowed, where))
    is_symmetric = raw.get("symmetric", True) is True
    if raw.get("dynamic", False) is not False:
        raise ValueError(f"{where}.dynamic={raw['dynamic']!r}; allowed: false")
    if raw.get("actorder") not in (None, False, "weight", "static"):
        raise ValueError(
            f"{where}.actorder={raw['actorder']!r}; allowed: null, 'weight' or 'static': columns "
            "in their own order"
        )
    if kind == "fp8" and not is_symmetric:
        raise ValueError(f"{where}.symmetric=false; allowed for fp8: true")
    if stored == "pack-quantized" and kind != "int8":
        raise ValueError(f"{where}.type={raw.get('type')!r}; allowed in pack-quantized: 'int'")
    if stored == "pack-quantized" and not is_symmetric and strategy not in ("channel", "group"):
        raise ValueError(
            f"{where}.strategy={strategy!r}; allowed in pack-quantized with symmetric=false: "
            "'channel', 'group'"
        )
    block = {"tensor": (-1, -1), "channel": (1, -1)}.get(strategy)
    if strategy == "group":
        size = raw.get("group_size")
        if type(size) is not int or size < 1:
            raise ValueError(f"{where}.group_size={size!r}; allowed: a positive number")
        block = (1, size)
    elif strategy == "block":
        structure = raw.get("block_structure")
        is_pair = isinstance(structure, list | tuple) and len(structure) == 2
        if not is_pair or not all(type(size) is int and size > 0 for size in structure):
            raise ValueError(f"{where}.block_structure={structure!r}; allowed: two numbers")
        block = (structure[0], structure[1])
    assert block is not None
    return WeightScheme(kind, strategy, block, is_symmetric, stored == "pack-quantized")


def _read_inputs(raw: Any, where: str) -> InputScheme:
    kind = _read_kind(raw, where)
    strategy = read_choice(raw, "strategy", ("tensor", "token"), where)
    dynamic = raw.get("dynamic", False)
    if dynamic not in (True, False):
        raise ValueError(f"{where}.dynamic={dynamic!r}; allowed: true, false")
    if strategy == "token" and not dynamic:
        raise ValueError(f"{where}.strategy='token' with dynamic=false; allowed: dynamic=true")
    is_symmetric = raw.get("symmetric", True) is True
    if kind == "fp8" and not is_symmetric:
        raise ValueError(f"{where}.symmetric=false; allowed for fp8: true")
    return InputScheme(kind, strategy == "token", bool(dynamic), is_symmetric)


def _read_kind(raw: Any, where: str) -> Kind:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where}={raw!r}; expected an object")
    if raw.get("num_bits") != 8:
        raise ValueError(f"{where}.num_bits={raw.get('num_bits')!r}; allowed: 8")
    kind = read_choice(raw, "type", ("int", "float"), where)
    if raw.get("scale_dtype") not in (None, "torch.bfloat16", "torch.float16", "torch.float32"):
        raise ValueError(
            f"{where}.scale_dtype={raw['scale_dtype']!r}; allowed: a float of 16 or 32 bits"
        )
    return "int8" if kind == "int" else "fp8"


def _read_kv(raw: Any, where: str) -> bool:
    if raw is None:
        return False
    if _read_kind(raw, where) != "fp8":
        raise ValueError(f"{where}.type={raw.get('type')!r}; allowed: 'float'")
    if read_choice(raw, "strategy", ("tensor",), where) and raw.get("dynamic", False) is not False:
        raise ValueError(f"{where}.dynamic={raw['dynamic']!r}; allowed: false")
    return True


def _names(raw: Any, where: str, *, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Names, patterns and some classes of modules."""
    if not isinstance(raw, list | tuple) or not all(isinstance(name, str) for name in raw):
        raise ValueError(f"{where}={raw!r}; expected a list of names")
    for name in raw:
        if name.startswith("re:"):
            try:
                re.compile(name.removeprefix("re:"))
            except re.error as error:
                raise ValueError(f"{where}: {name!r} is no pattern ({error})") from error
        elif "." not in name and name not in (*classes, _LM_HEAD):
            raise ValueError(
                f"{where}: {name!r}; allowed: names of modules, patterns (re:...), "
                f"{' and '.join(classes)}"
            )
    return tuple(raw)
