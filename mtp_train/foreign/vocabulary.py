"""``d2t`` and ``t2d``: which tokens a head drafts from, and in which of two conventions.

Engines read *offsets*: draft id ``i`` is token ``i + d2t[i]``. A list of ids in its place loads
without a word and drafts other tokens.

Shape legend: W draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mtp_train.export.layouts.eagle3 import MASK_NAME, OFFSETS_NAME, to_ids, to_mask
from mtp_train.foreign.files import HeadFiles
from mtp_train.foreign.findings import Finding, OpenChoice
from mtp_train.foreign.reading import Given
from mtp_train.foreign.sizes import Sizes

LM_HEAD_NAME = "lm_head.weight"
Convention = Literal["offset", "absolute", "unknown"]
_SAMPLED_PAIRS = 64


@dataclass(frozen=True)
class DraftIds:
    """``ids_W``: int64, strictly ascending; ``None`` where the convention is not known."""

    convention: Convention
    ids_W: torch.Tensor | None
    findings: tuple[Finding, ...] = ()
    open_choices: tuple[OpenChoice, ...] = ()


@dataclass(frozen=True)
class Vocabulary:
    """``size``: how many tokens the head drafts from, as stated or as ``lm_head`` has rows."""

    size: int
    draft: DraftIds | None  # None: drafts from all tokens
    findings: tuple[Finding, ...] = ()
    open_choices: tuple[OpenChoice, ...] = ()


def read_vocabulary(files: HeadFiles, sizes: Sizes, given: Given) -> Vocabulary:
    """Of an EAGLE-3 head, with what engines would stumble over."""
    findings: list[Finding] = []
    stated = files.config.get("draft_vocab_size")
    head = files.headers.get("lm_head.weight")
    if type(stated) is int and stated > 0:
        size = stated
    else:
        size = head.shape[0] if head is not None and len(head.shape) == 2 else sizes.vocab_size
        findings.append(
            Finding(
                "warning",
                "draft-vocab-size",
                "draft_vocab_size",
                "missing" if stated is None else repr(stated),
                f"{size}, the rows of lm_head",
                f"vLLM takes the vocabulary's {sizes.vocab_size}, SGLang fails; write it",
            )
        )
    has_list = OFFSETS_NAME in files.headers
    if size >= sizes.vocab_size:
        if has_list or MASK_NAME in files.headers:
            findings.append(
                Finding(
                    "warning",
                    "d2t-whole-vocabulary",
                    OFFSETS_NAME,
                    "there, with a draft vocabulary of all tokens",
                    f"no {OFFSETS_NAME}, no {MASK_NAME}",
                    "leave both out: vLLM refuses the directory, SGLang no longer shares lm_head",
                )
            )
        if has_list and bool(files.read(OFFSETS_NAME).any()):
            findings.append(
                Finding(
                    "error",
                    "d2t-permutes",
                    OFFSETS_NAME,
                    "not all 0, with a draft vocabulary of all tokens",
                    "0 everywhere, or no such tensor",
                    "leave it out and sort the rows of lm_head by token",
                )
            )
        return Vocabulary(size, None, tuple(findings))
    if not has_list:
        return Vocabulary(size, DraftIds("unknown", None), tuple(findings))
    draft = read_draft_ids(files, vocab_size=sizes.vocab_size, choice=given.choices.draft_ids)
    findings += draft.findings
    if draft.convention == "offset":
        findings += check_head_rows(files)
    return Vocabulary(size, draft, tuple(findings), draft.open_choices)


def read_draft_ids(
    files: HeadFiles, *, vocab_size: int, choice: Literal["auto", "offset", "absolute"]
) -> DraftIds:
    """Of a directory that has ``d2t``, ``[W]``."""
    stored_W = files.read(OFFSETS_NAME)
    if stored_W.dim() != 1 or stored_W.dtype.is_floating_point or not len(stored_W):
        value = f"{stored_W.dtype} {list(stored_W.shape)}"
        return DraftIds(
            "unknown",
            None,
            (
                Finding(
                    "error", "d2t-kind", OFFSETS_NAME, value, "a list of int64", "write it again"
                ),
            ),
        )
    stored_W = stored_W.to(torch.int64)
    mask_V = _read_mask(files, vocab_size)
    can_be: dict[Convention, torch.Tensor] = {
        "offset": to_ids(stored_W),
        "absolute": stored_W,
    }
    fitting = [name for name, ids_W in can_be.items() if _is_list(ids_W, vocab_size)]
    if mask_V is not None:
        fitting = [
            name
            for name in fitting
            if torch.equal(to_mask(can_be[name], vocab_size=vocab_size), mask_V)
        ]
    findings: list[Finding] = []
    if choice != "auto":
        return _as_chosen(choice, can_be, fitting, vocab_size)
    if not fitting:
        what = "does not name the tokens that t2d marks" if mask_V is not None else "is no list"
        return DraftIds(
            "unknown",
            None,
            (
                Finding(
                    "error",
                    "d2t-values",
                    OFFSETS_NAME,
                    f"{what}, read as offsets or as ids",
                    f"offsets: token i + d2t[i], ascending, below {vocab_size}",
                    "export the head again",
                ),
            ),
        )
    if len(fitting) == 2:
        question = (
            f"{OFFSETS_NAME} could hold offsets or ids: both are ascending lists of known tokens, "
            f"and there is no {MASK_NAME}"
        )
        return DraftIds(
            "unknown",
            None,
            (
                Finding(
                    "warning",
                    "d2t-ambiguous",
                    OFFSETS_NAME,
                    "offsets or ids",
                    "offsets, as engines read it",
                    "settle it with foreign.draft_ids=offset or absolute",
                ),
            ),
            (OpenChoice("foreign.draft_ids=offset|absolute", question),),
        )
    convention = fitting[0]
    if convention == "absolute":
        findings.append(_absolute())
    return DraftIds(convention, can_be[convention], tuple(findings))


def check_head_rows(files: HeadFiles) -> list[Finding]:
    """Whether ``lm_head``'s rows were picked by offsets in the place of ids: then rows repeat
    exactly where offsets do, which trained rows never do.
    """
    if LM_HEAD_NAME not in files.headers or len(files.headers[LM_HEAD_NAME].shape) != 2:
        return []
    offsets_W = files.read(OFFSETS_NAME)
    if len(offsets_W) != files.headers[LM_HEAD_NAME].shape[0]:
        return []
    equal_pairs = (offsets_W[1:] == offsets_W[:-1]).nonzero()[:, 0][:_SAMPLED_PAIRS].tolist()
    if not equal_pairs:
        return []
    rows = files.read(LM_HEAD_NAME)
    if not all(torch.equal(rows[index], rows[index + 1]) for index in equal_pairs):
        return []
    return [
        Finding(
            "error",
            "lm-head-rows",
            LM_HEAD_NAME,
            f"rows {equal_pairs[0]} and {equal_pairs[0] + 1} are the same, as are all others whose "
            f"{OFFSETS_NAME} is",
            f"row i of token i + {OFFSETS_NAME}[i]",
            "the rows were picked by offsets, not ids: prune the unpruned lm_head again",
        )
    ]


def _as_chosen(
    choice: Literal["offset", "absolute"],
    can_be: dict[Convention, torch.Tensor],
    fitting: list[Convention],
    vocab_size: int,
) -> DraftIds:
    ids_W = can_be[choice]
    if not _is_list(ids_W, vocab_size):
        finding = Finding(
            "error",
            "d2t-values",
            OFFSETS_NAME,
            f"is no ascending list of tokens below {vocab_size}, read as foreign.draft_ids={choice}"
            " says",
            "",
            "choose the other convention, or leave foreign.draft_ids at auto",
        )
        return DraftIds("unknown", None, (finding,))
    findings = [_absolute()] if choice == "absolute" else []
    if choice not in fitting:
        findings.append(
            Finding(
                "warning",
                "t2d-values",
                MASK_NAME,
                f"marks other tokens than {OFFSETS_NAME} read as foreign.draft_ids={choice} says",
                "the same tokens",
                "check the option",
            )
        )
    return DraftIds(choice, ids_W, tuple(findings))


def _absolute() -> Finding:
    return Finding(
        "error",
        "d2t-absolute",
        OFFSETS_NAME,
        "holds ids",
        "offsets: draft id i is token i + d2t[i]",
        "engines add i to them and draft other tokens, without a word; write d2t - arange, or "
        "import the head with foreign.draft_ids=absolute and export it",
    )


def _is_list(ids_W: torch.Tensor, vocab_size: int) -> bool:
    if int(ids_W.min()) < 0 or int(ids_W.max()) >= vocab_size:
        return False
    return len(ids_W) == 1 or int(ids_W.diff().min()) > 0


def _read_mask(files: HeadFiles, vocab_size: int) -> torch.Tensor | None:
    header = files.headers.get(MASK_NAME)
    if header is None or header.shape != (vocab_size,):
        return None
    return files.read(MASK_NAME).to(torch.bool)
