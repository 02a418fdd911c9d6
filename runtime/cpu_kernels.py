"""Fused CPU kernels, called through ctypes: a decoder's small operations, paged attention, packed
linears and whole decoder blocks. :mod:`runtime.kernel_library` compiles and checks them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from runtime.ops import BlockOps, NormWeight, RotaryAngles
from runtime.spec.shift import ShiftedInputs
from runtime.verify import Verified
from runtime.verify_tree import VerifiedTree

MOST_BEST, MOST_ROWS = 8, 4  # of best_outputs
MAX_GROUP = 96  # query heads per key/value head that the attention kernel's tile holds

_SUFFIXES = MappingProxyType({torch.float32: "f32", torch.bfloat16: "bf16"})
_P, _L, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
_SIGNATURES = MappingProxyType(
    {
        "add_rms_norm": (_P, _P, _P, _P, _L, _L, _F),
        "norm_heads": (_P, _P, _L, _L, _L, _L, _F),
        "rotate": (_P, _P, _P, _L, _L, _L, _L, _L),
        "silu_mul": (_P, _P, _L, _L),
        "argmax": (_P, _P, _L, _L),
        "attend": (_P, _P, _P, _L, _L, _P, _L, _P, _P, _P, _L, _L, _L, _L, _F, _P),
        "linear": (_P, _P, _P, _P, _L, _L, _L),
        "best_outputs": (_P, _P, _P, _P, _P, _P, _P, _L, _L, _L, _L, _P),
        "blocks": (
            *(_P, _L, _P, _L, _L, _L, _P, _P, _L, _P),
            *(_P, _P, _L, _P, _L, _L, _L, _L, _F, _P),
        ),
    }
)


class BlockPointers(ctypes.Structure):
    """``Block`` of csrc/block.h: where one decoder block's weights lie."""

    _fields_ = (
        *((name, _P) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, _P) for name in ("qkv", "out", "gate_up", "down")),
        *((f"{name}_bias", _P) for name in ("qkv", "out", "gate_up", "down")),
        ("eps", _F),
    )


@dataclass(frozen=True)
class Screen:
    """``Screen`` of csrc/screen.h: a linear's weights in int8. O is padded to whole panels."""

    panels_PW16: torch.Tensor  # int32, four inputs a word
    scale_O: torch.Tensor  # float32: weights are about scale * int8
    sums_O: torch.Tensor  # float32: of the int8
    slack_O: torch.Tensor  # float32: an output is off by at most slack * |row|
    outputs: int


class CpuKernels(BlockOps):
    """The compiled library. Float32 and bfloat16, contiguous inner dimensions, CPU tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {}
        for name, arguments in _SIGNATURES.items():
            for dtype, suffix in _SUFFIXES.items():
                function = getattr(library, f"{name}_{suffix}")
                function.argtypes = arguments
                function.restype = None
                self._functions[name, dtype] = function
        self._products = {
            dtype: bool(getattr(library, f"has_products_{suffix}")())
            for dtype, suffix in _SUFFIXES.items()
        }
        self._has_screen = bool(library.has_screen())
        self._accept_chains = library.accept_chains
        self._accept_chains.argtypes = (_P, _P, _L, _L, _P, _P, _P)
        self._accept_chains.restype = None
        self._shift_chains = library.shift_chains
        self._shift_chains.argtypes = (_P, _P, _P, _L, _L, _P, _P)
        self._shift_chains.restype = None
        self._walk_trees = library.walk_trees
        self._walk_trees.argtypes = (_P, _P, _P, _L, _L, _L, _P, _P, _P, _P)
        self._walk_trees.restype = None

    def has_products(self, dtype: torch.dtype) -> bool:
        """Whether :meth:`linear` and :meth:`run_blocks` are at home on this processor."""
        return self._products.get(dtype, False)

    def has_screen(self, dtype: torch.dtype) -> bool:
        """Whether :meth:`best_outputs` can be called."""
        return self._has_screen and self.has_products(dtype)

    def add_rms_norm(
        self, x_ND: torch.Tensor, delta_ND: torch.Tensor | None, norm: NormWeight
    ) -> torch.Tensor:
        assert x_ND.is_contiguous(), "the residual stream must be contiguous"
        assert norm.weight_D.dtype is torch.float32, "norm weights are float32"
        out_ND = torch.empty_like(x_ND)
        delta = None
        if delta_ND is not None:
            assert delta_ND.is_contiguous(), "delta must be contiguous"
            assert delta_ND.dtype is x_ND.dtype, "delta must have the dtype of x"
            delta = delta_ND.data_ptr()
        self._functions["add_rms_norm", x_ND.dtype](
            x_ND.data_ptr(),
            delta,
            norm.weight_D.data_ptr(),
            out_ND.data_ptr(),
            *x_ND.shape,
            norm.eps,
        )
        return out_ND

    def norm_heads(self, heads_NXC: torch.Tensor, norm: NormWeight) -> None:
        rows, heads, width = heads_NXC.shape
        assert heads_NXC.stride()[1:] == (width, 1), "the heads of a row must be contiguous"
        assert norm.weight_D.dtype is torch.float32, "norm weights are float32"
        self._functions["norm_heads", heads_NXC.dtype](
            heads_NXC.data_ptr(),
            norm.weight_D.data_ptr(),
            rows,
            heads,
            heads_NXC.stride(0),
            width,
            norm.eps,
        )

    def rotate(self, qkv_NXC: torch.Tensor, num_rotated: int, angles: RotaryAngles) -> None:
        rows, _, width = qkv_NXC.shape
        assert qkv_NXC.is_contiguous(), "qkv must be contiguous"
        assert angles.cos_NC.dtype is qkv_NXC.dtype, "angles must have the dtype of qkv"
        sin_offset = width // 2 * angles.sin_NC.element_size()  # the positive half
        self._functions["rotate", qkv_NXC.dtype](
            qkv_NXC.data_ptr(),
            angles.cos_NC.data_ptr(),
            angles.sin_NC.data_ptr() + sin_offset,
            width,
            rows,
            num_rotated,
            qkv_NXC.stride(0),
            width,
        )

    def silu_mul(self, gate_up_N2I: torch.Tensor) -> torch.Tensor:
        assert gate_up_N2I.is_contiguous(), "gate_up must be contiguous"
        rows, columns = gate_up_N2I.shape
        out_NI = gate_up_N2I.new_empty(rows, columns // 2)
        self._functions["silu_mul", gate_up_N2I.dtype](
            gate_up_N2I.data_ptr(), out_NI.data_ptr(), rows, columns // 2
        )
        return out_NI

    def argmax(self, logits_MV: torch.Tensor) -> torch.Tensor:
        """As :meth:`BlockOps.argmax`; a NaN is never the best."""
        logits_MV = logits_MV.contiguous()
        ids_M = torch.empty(logits_MV.shape[0], dtype=torch.int64)
        self._functions["argmax", logits_MV.dtype](
            logits_MV.data_ptr(), ids_M.data_ptr(), *logits_MV.shape
        )
        return ids_M

    def accept_chain(self, tokens_BK1: torch.Tensor, draft_ids_BK: torch.Tensor) -> Verified:
        tokens_BK1, draft_ids_BK = tokens_BK1.contiguous(), draft_ids_BK.contiguous()
        num_requests, num_drafts = draft_ids_BK.shape
        assert tokens_BK1.shape == (num_requests, num_drafts + 1), "one token more than drafts"
        assert tokens_BK1.dtype is draft_ids_BK.dtype is torch.int64, "ids are int64"
        ids_BK1 = torch.empty(num_requests, num_drafts + 1, dtype=torch.int64)
        num_emitted_B, last_ids_B = torch.empty(2, num_requests, dtype=torch.int64)
        self._accept_chains(
            tokens_BK1.data_ptr(),
            draft_ids_BK.data_ptr(),
            num_requests,
            num_drafts,
            ids_BK1.data_ptr(),
            num_emitted_B.data_ptr(),
            last_ids_B.data_ptr(),
        )
        return Verified(ids_BK1, num_emitted_B, last_ids_B)

    def shift_inputs(
        self, ids_BK1: torch.Tensor, last_ids_B: torch.Tensor, num_emitted_B: torch.Tensor
    ) -> ShiftedInputs:
        given = [x.contiguous() for x in (ids_BK1, last_ids_B, num_emitted_B)]
        assert all(x.dtype is torch.int64 for x in given), "ids and counts are int64"
        num_requests, num_rows = ids_BK1.shape
        assert last_ids_B.shape == num_emitted_B.shape == (num_requests,), "one of each a request"
        ids_N = torch.empty(num_requests * num_rows, dtype=torch.int64)
        end_rows_B = torch.empty(num_requests, dtype=torch.int64)
        self._shift_chains(
            *(x.data_ptr() for x in given),
            num_requests,
            num_rows,
            ids_N.data_ptr(),
            end_rows_B.data_ptr(),
        )
        return ShiftedInputs(ids_N, end_rows_B)

    def walk_tree(
        self,
        tokens_BR: torch.Tensor,
        node_ids_BN: torch.Tensor,
        parents_BN: torch.Tensor,
        depth: int,
    ) -> VerifiedTree:
        given = [x.contiguous() for x in (tokens_BR, node_ids_BN, parents_BN)]
        assert all(x.dtype is torch.int64 for x in given), "ids and rows are int64"
        count, num_nodes = node_ids_BN.shape
        assert tokens_BR.shape == (count, num_nodes + 1), "one token per row"
        assert parents_BN.shape == (count, num_nodes), "one parent per node"
        # One tensor each: tokens are broadcast over ranks in place.
        ids_BE, tokens_BE, path_BE = (
            torch.empty(count, depth + 1, dtype=torch.int64) for _ in range(3)
        )
        num_emitted_B = torch.empty(count, dtype=torch.int64)
        results = (ids_BE, tokens_BE, path_BE, num_emitted_B)
        self._walk_trees(
            *(x.data_ptr() for x in given),
            count,
            num_nodes,
            depth,
            *(x.data_ptr() for x in results),
        )
        return VerifiedTree(*results, last_ids_B=tokens_BE[:, -1])

    def attend(
        self,
        q_NHC: torch.Tensor,
        k_NGC: torch.Tensor,
        v_NGC: torch.Tensor,
        *,
        write_slots_N: torch.Tensor,
        pool_k: torch.Tensor,
        pool_v: torch.Tensor,
        requests_B6: torch.Tensor,
    ) -> torch.Tensor:
        """Store ``k, v`` at ``write_slots``, then attend; ``[N, H, C]``, contiguous.

        ``requests_B6`` (int64, host): first row, number of rows, number of keys (new ones
        included), the address of an int64 array with the slots of these keys; then, for rows of a
        tree, how many of the keys (the last ones) are the block, and the address of its mask, one
        byte per row and block key. Without a block (0, 0) rows attend causally. Rows of q, k, v may
        be strided, their heads must be contiguous.
        """
        rows, num_heads, width = q_NHC.shape
        num_kv_heads = k_NGC.shape[1]
        for tensor in (q_NHC, k_NGC, v_NGC):
            assert tensor.stride(2) == 1, "head elements must be contiguous"
            assert tensor.stride(1) == width, "the heads of a row must be contiguous"
        assert k_NGC.stride(0) == v_NGC.stride(0), "k and v must have one row stride"
        assert num_heads // num_kv_heads <= MAX_GROUP, "too many query heads per key head"
        out_NHC = q_NHC.new_empty(rows, num_heads, width)
        self._functions["attend", q_NHC.dtype](
            q_NHC.data_ptr(),
            k_NGC.data_ptr(),
            v_NGC.data_ptr(),
            q_NHC.stride(0),
            k_NGC.stride(0),
            write_slots_N.data_ptr(),
            rows,
            pool_k.data_ptr(),
            pool_v.data_ptr(),
            requests_B6.data_ptr(),
            requests_B6.shape[0],
            num_heads,
            num_kv_heads,
            width,
            width**-0.5,
            out_NHC.data_ptr(),
        )
        return out_NHC

    def linear(
        self,
        x_MI: torch.Tensor,
        panels_PW16: torch.Tensor,
        bias_O: torch.Tensor | None,
        *,
        outputs: int,
    ) -> torch.Tensor:
        """``[M, I] -> [M, O]``; :class:`runtime.panel_linear.PanelLinear` packs the weights.

        ``bias_O`` is float32 and added before the one rounding.
        """
        rows, inputs = x_MI.shape
        assert x_MI.is_contiguous(), "x must be contiguous"
        assert inputs * x_MI.element_size() == 4 * panels_PW16.shape[1], "x and weights differ"
        out_MO = x_MI.new_empty(rows, outputs)
        self._functions["linear", x_MI.dtype](
            x_MI.data_ptr(),
            panels_PW16.data_ptr(),
            None if bias_O is None else bias_O.data_ptr(),
            out_MO.data_ptr(),
            rows,
            inputs,
            outputs,
        )
        return out_MO

    def best_outputs(
        self, x_MI: torch.Tensor, panels_PW16: torch.Tensor, screen: Screen, *, count: int
    ) -> torch.Tensor:
        """The ``count`` best outputs of :meth:`linear` without a bias, int64 ``[M, count]``.

        The best is first, the lowest output on a tie. At most ``MOST_ROWS`` rows and ``MOST_BEST``
        outputs; :class:`runtime.screened_linear.ScreenedLinear` makes the screen.
        """
        rows, inputs = x_MI.shape
        assert x_MI.is_contiguous(), "x must be contiguous"
        assert inputs * x_MI.element_size() == 4 * panels_PW16.shape[1], "x and weights differ"
        assert rows <= MOST_ROWS
        assert 1 <= count <= min(MOST_BEST, screen.outputs)
        ids = torch.empty(rows, count, dtype=torch.int64)
        padded = screen.slack_O.shape[0]
        scratch = torch.empty(rows * (padded + inputs // 2), dtype=torch.int32)
        self._functions["best_outputs", x_MI.dtype](
            x_MI.data_ptr(),
            panels_PW16.data_ptr(),
            screen.panels_PW16.data_ptr(),
            screen.scale_O.data_ptr(),
            screen.sums_O.data_ptr(),
            screen.slack_O.data_ptr(),
            ids.data_ptr(),
            rows,
            inputs,
            screen.outputs,
            count,
            scratch.data_ptr(),
        )
        return ids

    def run_blocks(
        self,
        blocks: Sequence[BlockPointers],
        x_ND: torch.Tensor,
        angles: RotaryAngles,
        *,
        inner: int,
        num_heads: int,
        pool_k: Sequence[torch.Tensor],
        pool_v: Sequence[torch.Tensor],
        write_slots_N: torch.Tensor,
        requests_B6: torch.Tensor,
    ) -> None:
        """Decoder blocks over the first layers of a pool, adding to the residual stream ``x``.

        Arithmetic and rounding are those of the single operations. ``inner``: MLP width;
        ``pool_k[layer]`` is ``[slots, G, C]``, equally far apart in memory from layer to layer.
        """
        rows, model_width = x_ND.shape
        _, num_kv_heads, width = pool_k[0].shape
        assert x_ND.is_contiguous(), "the residual stream must be contiguous"
        assert num_heads // num_kv_heads <= MAX_GROUP, "too many query heads per key head"
        qkv_and_attended = 2 * (num_heads + num_kv_heads) * width
        scratch = x_ND.new_empty(rows * (model_width + qkv_and_attended + inner))
        addresses = (_P * len(blocks))(*(ctypes.addressof(block) for block in blocks))
        sin_offset = width // 2 * angles.sin_NC.element_size()  # the positive half
        first_k = pool_k[0].data_ptr()
        stride = pool_k[1].data_ptr() - first_k if len(blocks) > 1 else 0
        self._functions["blocks", x_ND.dtype](
            addresses,
            len(blocks),
            x_ND.data_ptr(),
            rows,
            model_width,
            inner,
            angles.cos_NC.data_ptr(),
            angles.sin_NC.data_ptr() + sin_offset,
            width,
            write_slots_N.data_ptr(),
            first_k,
            pool_v[0].data_ptr(),
            stride // x_ND.element_size(),
            requests_B6.data_ptr(),
            requests_B6.shape[0],
            num_heads,
            num_kv_heads,
            width,
            width**-0.5,
            scratch.data_ptr(),
        )
