"""The DeepSpeed engine around a head: its configuration, the gate before a step, whole tensors.

The embedding and ``lm_head`` never enter the module given to DeepSpeed. bf16 runs accumulate and
communicate gradients in fp32 (DeepSpeed's defaults are bf16), and need ZeRO stage 1 or more.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from mtp_train.config import DeepSpeedConfig, TrainerConfig
from mtp_train.distributed import ProcessGroup
from mtp_train.heads.base import TrainingHead
from mtp_train.muon import make_muon
from mtp_train.optim import GatedAdamW, make_adamw

logger = logging.getLogger(__name__)

# A gradient entry above this would overflow the fp32 sum of squares of the global norm.
LARGEST_GRADIENT = 1e18


def deepspeed_config(
    *, config: TrainerConfig, sharding: DeepSpeedConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """DeepSpeed's dictionary. Raises ``ValueError`` for bf16 without ZeRO.

    ``device`` is that of training: only copies to and from a GPU gain by pinned memory.
    """
    zero_stage = sharding.zero_stage
    if dtype == torch.bfloat16 and zero_stage < 1:
        raise ValueError(
            f"deepspeed.zero_stage={zero_stage} with bfloat16: DeepSpeed keeps fp32 master weights "
            "only from stage 1 on; use stage 1, 2 or 3, or trainer.dtype=float32"
        )
    return {
        "train_micro_batch_size_per_gpu": 1,  # one packed batch
        "gradient_accumulation_steps": config.gradient_accumulation,
        "gradient_clipping": config.clip_norm,
        "zero_optimization": {"stage": zero_stage, **_offload(sharding, device)},
        "zero_allow_untested_optimizer": True,  # ours are made for its flat pieces
        # DeepSpeed's own Adam for offloaded states is compiled at its first use and has no gate;
        # torch's fused one runs on the host as well.
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "steps_per_print": 2**31,
    }


def _offload(sharding: DeepSpeedConfig, device: torch.device) -> dict[str, Any]:
    place = {"device": "cpu", "pin_memory": device.type == "cuda"}
    names = {
        "none": (),
        "optimizer": ("offload_optimizer",),
        "all": ("offload_optimizer", "offload_param"),
    }
    return dict.fromkeys(names[sharding.offload], place)


def ensure_process_group(group: ProcessGroup) -> None:
    """DeepSpeed needs torch.distributed even alone: make a group of one if there is none.

    It stays until the process ends, for DeepSpeed keeps references to it: a sweep trains several
    heads in one process.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if dist.is_initialized():
        return
    assert group.world_size == 1, "several ranks without torch.distributed"
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it even for one process
    backend = "nccl" if group.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed prints while it sets up and loads; send that to the debug log."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            yield
    finally:
        logger.debug("deepspeed: %s", text.getvalue())


def _make_optimizer(
    head: TrainingHead, *, config: TrainerConfig, group: ProcessGroup
) -> GatedAdamW:
    if config.optimizer == "muon":
        return make_muon(
            head.named_parameters(),
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=config.betas,
            ranks=group,
        )
    return make_adamw(head.parameters(), config=config)


class HeadEngine:
    """One head under DeepSpeed: backward, a checked step, and its whole tensors at any stage."""

    def __init__(
        self,
        head: TrainingHead,
        *,
        config: TrainerConfig,
        sharding: DeepSpeedConfig,
        dtype: torch.dtype,
        group: ProcessGroup,
    ) -> None:
        import deepspeed

        self._group = group
        self._zero_stage = sharding.zero_stage
        self._spec = head.spec
        self._parameters = dict(head.named_parameters())
        self._fixed = {name: b.detach().cpu().clone() for name, b in head.named_buffers()}
        self._bad = torch.zeros((), device=group.device)
        for parameter in self._parameters.values():
            parameter.register_hook(self._watch)
        self.gate = _make_optimizer(head, config=config, group=group)
        settings = deepspeed_config(
            config=config, sharding=sharding, dtype=dtype, device=group.device
        )
        with _quiet():
            self.engine: Any = deepspeed.initialize(
                model=head, optimizer=self.gate, config=settings
            )[0]
        self._accumulation = config.gradient_accumulation

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.engine(*args, **options)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients. ``loss`` is this rank's share of the global mean.

        DeepSpeed averages over ranks and micro-batches; both factors are taken back here, so that
        the accumulated gradient is that of the plain sum of shares.
        """
        self.engine.backward(loss * (self._group.world_size * self._accumulation))

    def end_micro_batch(self) -> None:
        """Between micro-batches of one step."""
        self.engine.step()

    def save(self, directory: str, tag: str) -> None:
        """Write DeepSpeed's files below ``directory/tag``. Collective."""
        with _quiet():
            self.engine.save_checkpoint(directory, tag=tag, save_latest=False)

    def load(self, directory: str, tag: str) -> bool:
        """Restore weights and optimiser; false when there is nothing to load. Collective."""
        with _quiet():
            loaded, _ = self.engine.load_checkpoint(
                directory, tag=tag, load_optimizer_states=True, load_lr_scheduler_states=False
            )
        return loaded is not None

    def take_nonfinite(self) -> torch.Tensor:
        """fp32 scalar on the device, > 0 when a gradient since the last call was not usable."""
        bad, self._bad = self._bad, torch.zeros_like(self._bad)
        return bad

    def step(self, *, learning_rate: float, is_finite: bool) -> float:
        """Step, or go through the motions with the gate closed. Returns the global gradient norm.

        The norm is that before clipping. All ranks must pass the same ``is_finite``.
        """
        for param_group in self.engine.optimizer.param_groups:
            param_group["lr"] = learning_rate * param_group.get("rate_share", 1.0)
        norm = self._plain_norm() if self._zero_stage == 0 else None
        self.gate.is_closed = not is_finite
        self.engine.step()
        self.gate.is_closed = False
        return float(norm if norm is not None else self.engine.get_global_grad_norm())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The head's whole tensors on the host, on every rank (a collective at stage 3)."""
        if self._zero_stage < 3:
            return self._copy_tensors()
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self._parameters.values())):
            return self._copy_tensors()

    def _copy_tensors(self) -> dict[str, torch.Tensor]:
        trained = {n: p.detach().cpu().clone() for n, p in self._parameters.items()}
        return trained | self._fixed

    def _watch(self, gradient: torch.Tensor) -> None:
        """Runs on each local gradient before DeepSpeed reduces it."""
        largest = gradient.detach().abs().amax().float()
        # not (x < limit) instead of x >= limit: it also catches NaN
        self._bad += (~(largest < LARGEST_GRADIENT)).float()

    def _plain_norm(self) -> torch.Tensor:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)
